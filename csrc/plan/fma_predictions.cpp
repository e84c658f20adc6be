#include "plan/fma_predictions.h"

#include <algorithm>
#include <stdexcept>

#include "common/ceil_divide.h"

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
  double const k = static_cast<double>(problem.k) / 1024.0 * (has_vectors(problem) ? 1.0 : kSingleElements);
  double const products =
      waves == 1 ? k * timing.per_1024_k
                 : k * timing.per_wave_of_1024_k * static_cast<double>(ceil_divide(waves, timing.shared_waves));
  return timing.start + static_cast<double>(waves) * timing.per_wave + products;
}

// Eight rows at the rate of memory: mean error 11%. Blocks read x again, from L2.
double predict_dot(GemmConfig const& config, GemmProblem const& problem, int64_t waves) {
  constexpr int64_t kResident = 2;  // blocks of a multiprocessor
  double const rounds = static_cast<double>(ceil_divide(waves, kResident));
  double const steps = static_cast<double>(ceil_divide(problem.k, config.tile_k));
  double const bytes = static_cast<double>(problem.k) * sizeof(float);
  double const of_weight = bytes * static_cast<double>(problem.n * ceil_divide(problem.m, config.tile_m));
  double const of_x = bytes * static_cast<double>(problem.m * ceil_divide(problem.n, config.tile_n));
  return 1.9 + rounds * (1.5 + 0.87 * steps) + of_weight / 19e6 + of_x / 4.4e6;
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
