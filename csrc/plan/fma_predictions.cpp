#include <algorithm>
#include <stdexcept>

#include "common/division.h"
#include "plan/predictions.h"

namespace cutfuse {

namespace {

// Fitted to 107 problems of M 1 to 1500, N 68 to 7832 and K 64 to 7744, without an epilogue and with their operands in
// L2 (mean error 2 to 5%). A wave is one tile on every multiprocessor.
struct FmaTiming {
  int tile_m;
  int tile_n;
  double start;
  double per_wave;
  double per_1024_k;          // of the only wave
  double per_wave_of_1024_k;  // of several, of which two share a multiprocessor where their registers allow that
  int shared_waves;
};

constexpr FmaTiming kFmaTimings[] = {
    {16, 32, 2.39, 1.43, 7.5, 12.0, 2},
    {32, 32, 1.7, 2.48, 10.2, 10.2, 1},
    {64, 64, 0.93, 4.32, 31.3, 31.3, 1},
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

FmaTiming const& timing_of(GemmConfig const& config) {
  for (FmaTiming const& timing : kFmaTimings) {
    if (timing.tile_m == config.tile_m && timing.tile_n == config.tile_n) return timing;
  }
  throw std::logic_error(std::string(config.name) + " has no row in kFmaTimings: measure its tile and add one");
}

bool has_vectors(GemmProblem const& problem) { return problem.lda % kVector == 0 && problem.ldb % kVector == 0; }

double bytes_of_lines(GemmProblem const& problem, int64_t lines) {
  return sizeof(float) * static_cast<double>(problem.k) * static_cast<double>(lines);
}

// Whether the weight comes from memory each time: L2 does not keep one of this size from call to call.
bool is_cold(GemmProblem const& problem) {
  constexpr double kKeptBytes = 40e6;
  return bytes_of_lines(problem, problem.n) > kKeptBytes;
}

double predict_epilogue(GemmConfig const& config, GemmProblem const& problem, OperandBytes operand_bytes,
                        double waves) {
  double const elements = static_cast<double>(problem.m) * static_cast<double>(problem.n);
  double const stored = problem.stores_pre_activation ? 2.0 * sizeof(float) : sizeof(float);
  double const area = std::max(config.tile_m * config.tile_n / (32.0 * 32.0), 0.5);
  double const compute = waves * area * kPerOp * problem.epilogue_cost;
  return compute + elements * (operand_bytes.all + stored) / kBytesPerMicrosecond;
}

double predict_tiles(GemmConfig const& config, GemmProblem const& problem, int64_t waves) {
  FmaTiming const& timing = timing_of(config);
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

}  // namespace

double predict_fma_microseconds(GemmConfig const& config, GemmProblem const& problem, OperandBytes operand_bytes) {
  int64_t const tiles = ceil_divide(problem.m, config.tile_m) * ceil_divide(problem.n, config.tile_n);
  int64_t const waves = ceil_divide(tiles, std::max(problem.multiprocessors, 1));
  double const product =
      config.schedule == Schedule::kDot ? predict_dot(config, problem, waves) : predict_tiles(config, problem, waves);
  return product + predict_epilogue(config, problem, operand_bytes, static_cast<double>(waves));
}

}  // namespace cutfuse
