// The numbers that predicted times are made of, in microseconds, one table for each device: devices/*.def.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace cutfuse {

// Of kernels of tensor cores that have the epilogue in their own text, by tile and schedule. A wave is one tile on
// every multiprocessor.
struct TileTimes {
  double start;
  double per_wave;
  double per_wave_of_1024_k;  // where every multiprocessor has a tile
  double contention;          // the share of it that is lost to contention where all have one
  double single_wave;         // what a single wave that fills the device adds: its tiles all read from memory at once
  double per_op;              // of the epilogue, over 128x128 elements
  double per_wave_of_rows;    // where rows are reduced
  double per_fetched_byte;    // of an operand that the copy engine brings, over 128x128 elements
  double per_operand_byte;    // of one that is loaded, over as many
  // A product and the epilogue of the tile before it, which share the issue slots and the power, run side by side: the
  // shorter one then adds this share of its time.
  double interference;
  double per_further_line;    // of the main loop: see further_lines
  double per_further_sector;  // the same: see further_sectors
};

// cuBLAS's product on tensor cores, as if it took the fastest of all tiles: see predict_fastest_cublas_waves.
struct CublasTimes {
  double start;
  double per_1024_k;  // of 128x128 elements, on a device of which each multiprocessor has a tile
  double per_further_line;
  double per_further_sector;
  double per_slice;
  double per_area;  // of 128x128 elements in a wave
  double contention;
  double written_bytes_per_microsecond;
};

struct DeviceNumbers {
  TileTimes cooperative_128x256;
  TileTimes cooperative_128x128;
  TileTimes pingpong_128x128;
  TileTimes pingpong_64x128;
  TileTimes pingpong_64x64;
  TileTimes pingpong_64x32;
  double compiled_bytes_per_microsecond;  // of what the epilogue of such a kernel moves
  double wrong_cluster;                   // what a cluster along the shorter dimension adds
  double early_finalize;                  // the kernel that folds a row reduction, which starts early behind these
  double bytes_per_microsecond;           // of memory, for the operands of products on tensor cores
  CublasTimes cublas;
};

// A device that has a table, by its name as PyTorch gives it.
struct DeviceTimes {
  std::string name;
  int multiprocessors;
  double gigabytes_per_second;  // of its memory
  DeviceNumbers numbers;
};

// All that there are. The first one's numbers are those of every device without any, and stand in the place of those
// that another table leaves out.
std::vector<DeviceTimes> const& device_times();

// Raises std::invalid_argument for a name that has none.
DeviceTimes const& times_of(std::string const& device);

// The numbers by their names in the table.
std::map<std::string, double> named_numbers(DeviceNumbers const& numbers);

// A table with other numbers, which may be fewer. Raises std::invalid_argument for a name that there is not.
DeviceTimes with_numbers(DeviceTimes times, std::map<std::string, double> const& numbers);

}  // namespace cutfuse
