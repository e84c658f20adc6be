#include "plan/predictions.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>

#include "common/division.h"

namespace cutfuse {

namespace {

// Times of one kernel on an H200 in microseconds. A wave is one tile on every multiprocessor; a pingpong kernel's
// epilogue hides behind the other warpgroup's product. Without planes: fitted to 1719 bf16 problems of M 16 to 16384, N
// and K 256 to 12000, most drawn at random, with five epilogues, weights cold (mean error 6 to 8% for cooperative
// tiles, 11 to 17% for pingpong ones), on an idle device. tf32 takes twice as long for the same K. Over planes: 54
// problems of M 32 to 4096 (mean error 3%).
struct TileTiming {
  int tile_m;
  int tile_n;
  Schedule schedule;
  double start;
  double per_wave;
  double per_wave_of_1024_k;
  double per_op;            // of cost 1, interpreted over 128x128 elements
  double per_operand_byte;  // of an operand that is a matrix, over as many
};

constexpr TileTiming kTimings[] = {
    {128, 256, Schedule::kCooperative, 0.7, 9.6, 10.6, 1.17, 1.25},
    {128, 128, Schedule::kCooperative, 2.0, 5.8, 5.5, 1.1, 0.95},
    {128, 128, Schedule::kPingpong, 0.9, 4.4, 5.97, 3.3, 4.45},
    {64, 128, Schedule::kPingpong, 0.7, 4.2, 3.8, 3.35, 1.95},
    {64, 64, Schedule::kPingpong, 1.8, 3.1, 2.64, 1.65, 2.05},
    {64, 32, Schedule::kPingpong, 1.8, 2.6, 2.1, 1.65, 2.05},
    {128, 128, Schedule::kSplit3, 7.0, 2.6, 16.9, 1.1, 0.0},
    {128, 128, Schedule::kSplit6, 7.0, 2.5, 29.8, 1.1, 0.0},
    {128, 128, Schedule::kConvert3, 7.0, 3.7, 23.2, 1.1, 0.0},
    {128, 128, Schedule::kConvert6, 4.6, 5.8, 41.4, 1.1, 0.0},
};

// The rows of kernels that have the epilogue in their own text.
struct CompiledTiming {
  int tile_m;
  int tile_n;
  Schedule schedule;
  TileTimes DeviceNumbers::* times;
};

constexpr CompiledTiming kCompiledTimings[] = {
    {128, 256, Schedule::kCooperative, &DeviceNumbers::cooperative_128x256},
    {128, 128, Schedule::kCooperative, &DeviceNumbers::cooperative_128x128},
    {128, 128, Schedule::kPingpong, &DeviceNumbers::pingpong_128x128},
    {64, 128, Schedule::kPingpong, &DeviceNumbers::pingpong_64x128},
    {64, 64, Schedule::kPingpong, &DeviceNumbers::pingpong_64x64},
    {64, 32, Schedule::kPingpong, &DeviceNumbers::pingpong_64x32},
};

// The kernel that folds a row reduction behind kernels that interpret, and what a wave spends on its partial states.
constexpr double kFinalize = 4.0;
constexpr double kRowsPerWave = 2.0;
// Waiting for the last of K's slices, and one block's adding of a slice's sums.
constexpr double kFirstSlice = 3.0;
constexpr double kPerSlice = 0.8;
// Of what the epilogue of a kernel that interprets it moves.
constexpr double kProductBytesPerMicrosecond = 2.1e6;
constexpr double kBytesPerMicrosecondAndMultiprocessor = 45e3;

// By tile and schedule alone: kernels that read the weight's columns were not timed, and count as those that read rows.
template <class Timing, size_t count>
Timing const& timing_of(GemmConfig const& config, Timing const (&timings)[count], char const* table) {
  for (Timing const& timing : timings) {
    bool const same_tile = timing.tile_m == config.tile_m && timing.tile_n == config.tile_n;
    if (same_tile && timing.schedule == config.schedule) return timing;
  }
  throw std::logic_error(std::string(config.name) + " has no row in " + table + ": measure its tile and add one");
}

// Tiles of the result, which clusters round up, and what they take of a persistent kernel.
struct Waves {
  int64_t tiles_m;
  double count;
  double occupancy;  // the share of the multiprocessors that have a tile in the first wave
};

Waves waves_of(GemmConfig const& config, GemmProblem const& problem, int slices) {
  int64_t const tiles_m = ceil_divide(ceil_divide(problem.m, config.tile_m), config.cluster_m) * config.cluster_m;
  int64_t const tiles_n = ceil_divide(ceil_divide(problem.n, config.tile_n), config.cluster_n) * config.cluster_n;
  int64_t const multiprocessors = std::max(problem.multiprocessors, 1);
  int64_t const tiles = tiles_m * tiles_n * slices;
  double const share = static_cast<double>(tiles) / static_cast<double>(multiprocessors);
  return {tiles_m, static_cast<double>(ceil_divide(tiles, multiprocessors)), std::min(share, 1.0)};
}

double tf32_factor(GemmProblem const& problem) {
  return problem.input == DType::kFloat32 && problem.product == Product::kPlain ? kTf32Factor : 1.0;
}

// What one wave's products take, of so much of K, in kernels that interpret the epilogue or multiply planes.
double predict_main_loop(GemmConfig const& config, GemmProblem const& problem, Waves const& waves, double k,
                         double per_wave_of_1024_k) {
  double const main_loop = per_wave_of_1024_k * k / 1024.0 * tf32_factor(problem);
  if (waves.tiles_m > 1) return main_loop;
  // Nobody shares a tile's columns of weight: they come at the rate of one multiprocessor.
  double const bytes = config.tile_n * k * static_cast<double>(size_of(problem.input));
  return std::max(main_loop, bytes / kBytesPerMicrosecondAndMultiprocessor);
}

// Stored beside each element of the result, over 128x128 elements: 3.2 us a wave of bf16 alone, most of which the
// product hides. With the device's table, five layers of 25 to 757 us have a mean error of 3%.
constexpr double kPerStoredByte = 1.2;
double bytes_of_pre_activation(GemmProblem const& problem) {
  return problem.stores_pre_activation ? static_cast<double>(size_of(problem.input)) : 0.0;
}

// The memory's time of a kernel that multiplies matrices as they are: what it stores and the operands, which its
// epilogue reads between the tiles, move at a rate of their own.
double predict_memory(GemmProblem const& problem, double operand_bytes, double epilogue_bytes_per_microsecond,
                      double share_that_reads = 1.0) {
  double const elements = static_cast<double>(problem.m) * static_cast<double>(problem.n);
  bool const reduces = problem.reduction != Reduction::kNone;
  double const written = reduces ? 0.0 : static_cast<double>(size_of(problem.output));
  double const bytes = elements * (written + bytes_of_pre_activation(problem) + operand_bytes);
  return predict_reading_microseconds(problem) / share_that_reads + bytes / epilogue_bytes_per_microsecond;
}

// The tiles of one multiprocessor, one after another. Both warpgroups of a pingpong kernel run their epilogues at once,
// so that one of them at most waits: a tile takes half of a product and an epilogue where that is longer than a
// product.
double predict_tiles(GemmConfig const& config, TileTimes const& timing, double tiles, double product, double epilogue) {
  bool const is_pingpong = config.schedule == Schedule::kPingpong;
  double const longer = std::max(product, is_pingpong ? (product + epilogue) / 2 : epilogue);
  double const each = longer + timing.interference * std::min(product, epilogue);
  return (tiles - 1) * each + product + epilogue;
}

double predict_compiled_main_loop(TileTimes const& timing, GemmProblem const& problem, Waves const& waves) {
  double const contention = 1.0 - timing.contention * (1.0 - waves.occupancy);
  double const missing = waves.count > 1.0 ? 0.0 : timing.single_wave * std::pow(waves.occupancy, 4);
  double const loop = timing.per_wave_of_1024_k * static_cast<double>(problem.k) / 1024.0;
  return loop * contention * (1.0 + missing) * tf32_factor(problem);
}

double predict_compiled_microseconds(GemmConfig const& config, GemmProblem const& problem, OperandBytes operand_bytes) {
  DeviceNumbers const& numbers = numbers_of(problem);
  TileTimes const& timing = numbers.*timing_of(config, kCompiledTimings, "kCompiledTimings").times;
  Waves const waves = waves_of(config, problem, 1);
  bool const reduces = problem.reduction != Reduction::kNone;
  double const main_loop = predict_compiled_main_loop(timing, problem, waves);
  double const lines =
      1.0 + timing.per_further_line * further_lines(problem) + timing.per_further_sector * further_sectors(problem);
  double const product = main_loop * lines + timing.per_wave + (reduces ? timing.per_wave_of_rows : 0.0);
  double const area = config.tile_m * config.tile_n / (128.0 * 128.0);
  double const fetched = fetches_operand(config) ? operand_bytes.fetched : 0.0;
  double const loaded = operand_bytes.all - fetched;
  // Of fp32 the copy engine has three subtiles under way and not four.
  double const per_fetched_byte = timing.per_fetched_byte * (problem.input == DType::kFloat32 ? 2.0 : 1.0);
  double const epilogue = area * (problem.epilogue_cost * timing.per_op + fetched * per_fetched_byte +
                                  loaded * timing.per_operand_byte + bytes_of_pre_activation(problem) * kPerStoredByte);
  double const compute = predict_tiles(config, timing, waves.count, product, epilogue);
  // Where tiles are fewer than multiprocessors, so many alone read: 112 tiles of 96x14336x5120 take 53 us for 147 MB.
  // Those of 64 rows have more of the weight under way at once.
  double const share = config.tile_m > 64 ? waves.occupancy : std::sqrt(waves.occupancy);
  double const memory = predict_memory(problem, operand_bytes.all, numbers.compiled_bytes_per_microsecond, share);
  // Clusters along the shorter dimension are up to 12% slower, and the same elsewhere.
  bool const is_along_n = config.cluster_n > config.cluster_m;
  double const least = is_along_n == (problem.n > problem.m) ? 0.0 : numbers.wrong_cluster;
  double const ends = reduces ? numbers.early_finalize : 0.0;
  return timing.start + ends + std::max(compute, memory) + least;
}

// Products by fused multiply-adds.

// Fitted to 107 problems of M 1 to 1500, N 68 to 7832 and K 64 to 7744, without an epilogue and with their operands in
// L2 (mean error 2 to 5%). A wave is one tile on every multiprocessor.
struct FmaTiming {
  int tile_m;
  int tile_n;
  Schedule schedule;
  double start;
  double per_wave;
  double per_1024_k;          // of the only wave
  double per_wave_of_1024_k;  // of several, of which two share a multiprocessor where their registers allow that
  int shared_waves;
};

constexpr FmaTiming kFmaTimings[] = {
    {16, 32, Schedule::kFma, 2.39, 1.43, 7.5, 12.0, 2},
    {32, 32, Schedule::kFma, 1.7, 2.48, 10.2, 10.2, 1},
    {64, 64, Schedule::kFma, 0.93, 4.32, 31.3, 31.3, 1},
};

// Operands without vectors of four elements are copied one by one.
constexpr double kSingleElements = 1.3;
constexpr int64_t kVector = 4;
// Seven problems of 8 to 32 rows whose weights, 67 to 268 MB, come from memory: within 8%.
constexpr double kColdWeight = 1.1;
// Of an epilogue over a tile of 32x32, of cost 1.
constexpr double kPerOp = 0.12;
// Of memory, for what the epilogue reads and for what is stored.
constexpr double kBytesPerMicrosecond = 2.5e6;

bool has_vectors(GemmProblem const& problem) { return problem.lda % kVector == 0 && problem.ldb % kVector == 0; }

double bytes_of_lines(GemmProblem const& problem, int64_t lines) {
  return sizeof(float) * static_cast<double>(problem.k) * static_cast<double>(lines);
}

// Whether the weight comes from memory each time: L2 does not keep one of this size from call to call.
bool is_cold(GemmProblem const& problem) {
  constexpr double kKeptBytes = 40e6;
  return bytes_of_lines(problem, problem.n) > kKeptBytes;
}

double predict_fma_epilogue(GemmConfig const& config, GemmProblem const& problem, OperandBytes operand_bytes,
                            double waves) {
  double const elements = static_cast<double>(problem.m) * static_cast<double>(problem.n);
  double const stored = problem.stores_pre_activation ? 2.0 * sizeof(float) : sizeof(float);
  double const area = std::max(config.tile_m * config.tile_n / (32.0 * 32.0), 0.5);
  double const compute = waves * area * kPerOp * problem.epilogue_cost;
  return compute + elements * (operand_bytes.all + stored) / kBytesPerMicrosecond;
}

double predict_fma_tiles(GemmConfig const& config, GemmProblem const& problem, int64_t waves) {
  FmaTiming const& timing = timing_of(config, kFmaTimings, "kFmaTimings");
  double const copies = (has_vectors(problem) ? 1.0 : kSingleElements) * (is_cold(problem) ? kColdWeight : 1.0);
  double const k = static_cast<double>(problem.k) / 1024.0 * copies;
  double const products =
      waves == 1 ? k * timing.per_1024_k
                 : k * timing.per_wave_of_1024_k * static_cast<double>(ceil_divide(waves, timing.shared_waves));
  return timing.start + static_cast<double>(waves) * timing.per_wave + products;
}

// The dot kernel's blocks read the weight once for each eight rows, and x as often as there are blocks along N.
struct DotReads {
  int64_t tiles_m;
  int64_t rounds;  // of two blocks on each multiprocessor
  double weight;   // bytes of the whole
  double x;
};

constexpr int64_t kDotBlocks = 2;  // of a multiprocessor
constexpr double kL2BytesPerMicrosecond = 19e6;

DotReads reads_of_dot(GemmConfig const& config, GemmProblem const& problem, int64_t waves) {
  return {ceil_divide(problem.m, config.tile_m), ceil_divide(waves, kDotBlocks), bytes_of_lines(problem, problem.n),
          bytes_of_lines(problem, problem.m * ceil_divide(problem.n, config.tile_n))};
}

// Fitted to 39 problems of up to 16 rows (mean error 10%).
double predict_warm_dot(GemmConfig const& config, GemmProblem const& problem, DotReads const& reads) {
  double const steps = static_cast<double>(ceil_divide(problem.k, config.tile_k));
  double const weight = reads.weight * static_cast<double>(reads.tiles_m) / kL2BytesPerMicrosecond;
  return 1.9 + static_cast<double>(reads.rounds) * (1.5 + 0.87 * steps) + weight + reads.x / 4.4e6;
}

// Fitted to 20 problems of up to 16 rows with weights of 48 to 268 MB (mean error 4%). For more than 8 rows the other
// prediction can be larger, by up to 13%, and is taken: a larger problem takes no less.
double predict_cold_dot(GemmConfig const& config, GemmProblem const& problem, DotReads const& reads) {
  constexpr double kBytesOfL1 = 200e3;  // for the rows of x, which all blocks of a multiprocessor read
  double const again = reads.weight * static_cast<double>(reads.tiles_m - 1);
  // The last round takes as long with fewer blocks.
  int64_t const blocks = reads.rounds * kDotBlocks * std::max(problem.multiprocessors, 1);
  double const absent = bytes_of_lines(problem, blocks * config.tile_n) - reads.weight - again;
  bool const in_l1 = bytes_of_lines(problem, std::min<int64_t>(problem.m, config.tile_m)) <= kBytesOfL1;
  return 8.5 + reads.weight / 5.4e6 + again / kL2BytesPerMicrosecond + absent / 13.7e6 +
         reads.x / (in_l1 ? 4.1e6 : 3.2e6);
}

double predict_dot(GemmConfig const& config, GemmProblem const& problem, int64_t waves) {
  DotReads const reads = reads_of_dot(config, problem, waves);
  double const warm = predict_warm_dot(config, problem, reads);
  return is_cold(problem) ? std::max(warm, predict_cold_dot(config, problem, reads)) : warm;
}

double predict_fma_microseconds(GemmConfig const& config, GemmProblem const& problem, OperandBytes operand_bytes) {
  int64_t const tiles = ceil_divide(problem.m, config.tile_m) * ceil_divide(problem.n, config.tile_n);
  int64_t const waves = ceil_divide(tiles, std::max(problem.multiprocessors, 1));
  double const product = config.schedule == Schedule::kDot ? predict_dot(config, problem, waves)
                                                           : predict_fma_tiles(config, problem, waves);
  return product + predict_fma_epilogue(config, problem, operand_bytes, static_cast<double>(waves));
}

}  // namespace

double further_lines(GemmProblem const& problem) {
  constexpr int64_t kLine = 128;
  auto const bytes = static_cast<int64_t>(size_of(problem.input));
  int64_t const shared = std::gcd(problem.lda * bytes, kLine) + std::gcd(problem.ldb * bytes, kLine);
  return 1.0 - static_cast<double>(shared) / (2.0 * kLine);
}

double further_sectors(GemmProblem const& problem) {
  constexpr int64_t kSector = 32;
  auto const bytes = static_cast<int64_t>(size_of(problem.input));
  auto const begins_within = [&](int64_t pitch) { return pitch * bytes % kSector == 0 ? 0.0 : 0.5; };
  return begins_within(problem.lda) + begins_within(problem.ldb);
}

double predict_reading_microseconds(GemmProblem const& problem) {
  double const elements = static_cast<double>(problem.m + problem.n) * static_cast<double>(problem.k);
  return elements * static_cast<double>(size_of(problem.input)) / numbers_of(problem).bytes_per_microsecond;
}

double predict_microseconds(GemmConfig const& config, GemmProblem const& problem, int slices,
                            OperandBytes operand_bytes) {
  if (problem.product == Product::kFma) return predict_fma_microseconds(config, problem, operand_bytes);
  bool const over_planes = is_over_planes(problem.product);
  if (problem.specializes && !over_planes) return predict_compiled_microseconds(config, problem, operand_bytes);
  TileTiming const& timing = timing_of(config, kTimings, "kTimings");
  Waves const waves = waves_of(config, problem, slices);
  bool const reduces = problem.reduction != Reduction::kNone;

  double const k = static_cast<double>(problem.k);
  double const k_of_wave =
      slices == 1 ? k : static_cast<double>(ceil_divide(problem.k / kSplitBlock, slices) * kSplitBlock);
  double const main_loop = predict_main_loop(config, problem, waves, k_of_wave, timing.per_wave_of_1024_k);
  double const wave = main_loop + timing.per_wave + (reduces ? kRowsPerWave : 0.0);
  double const area = config.tile_m * config.tile_n / (128.0 * 128.0);
  bool const pingpong = config.schedule == Schedule::kPingpong;
  double const bytes = operand_bytes.all + bytes_of_pre_activation(problem);
  double const epilogue = area * (problem.epilogue_cost * timing.per_op + bytes * timing.per_operand_byte);
  double const compute = pingpong ? waves.count * std::max(wave, epilogue) + epilogue : waves.count * (wave + epilogue);

  double const memory = over_planes ? predict_memory(problem, 0.0, numbers_of(problem).bytes_per_microsecond)
                                    : predict_memory(problem, operand_bytes.all, kProductBytesPerMicrosecond);
  double const gathering = slices == 1 ? 0.0 : kFirstSlice + slices * kPerSlice;
  return timing.start + (reduces ? kFinalize : 0.0) + gathering + std::max(compute, memory);
}

double predict_split_microseconds(int64_t rows, int64_t columns) {
  constexpr double kLaunch = 2.5;
  constexpr double kBytesPerMicrosecond = 4.0e6;
  return kLaunch + 8.0 * static_cast<double>(rows) * static_cast<double>(columns) / kBytesPerMicrosecond;
}

}  // namespace cutfuse
