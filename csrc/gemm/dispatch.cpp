#include "gemm/dispatch.h"

#include <cstdint>
#include <string>
#include <utility>

#include "common/launch.h"
#include "plan/linear_plan.h"

namespace cutfuse {

#define CUTFUSE_GEMM_CONFIG(name, ...) LaunchStatus launch_##name(GemmLaunch const&, cudaStream_t);
#include "plan/gemm_configs.def"
#undef CUTFUSE_GEMM_CONFIG

namespace {

// The launcher of a kernel. `config` is an element of gemm_configs(), which has the launchers' order.
GemmLauncher launcher_of(GemmConfig const& config) {
#define CUTFUSE_GEMM_CONFIG(name, ...) launch_##name,
  static constexpr GemmLauncher kLaunchers[] = {
#include "plan/gemm_configs.def"
  };
#undef CUTFUSE_GEMM_CONFIG
  return kLaunchers[&config - gemm_configs().data()];
}

// Kernels on CUDA cores read single elements where they have to.
uintptr_t alignment_of(GemmConfig const& config) {
  return product_of(config) == Product::kFma ? sizeof(float) : uintptr_t{16};
}

std::string check_joined(JoinedWeights const& joined, uintptr_t alignment) {
  if (joined.count < 1 || joined.count > kMostJoinedWeights) {
    return "joins 1 to " + std::to_string(kMostJoinedWeights) + " weights, not " + std::to_string(joined.count);
  }
  for (int k = 0; k < joined.count; ++k) {
    auto const weight = reinterpret_cast<uintptr_t>(joined.items[k].weight);
    auto const bias = reinterpret_cast<uintptr_t>(joined.items[k].bias);
    if (weight == 0 || weight % alignment != 0 || bias % alignment != 0) {
      return "joined weights and biases have to start at multiples of " + std::to_string(alignment) + " bytes";
    }
  }
  return {};
}

std::string check_pointers(GemmConfig const& config, GemmBuffers const& buffers) {
  uintptr_t const alignment = alignment_of(config);
  bool const rows = config.output == GemmOutput::kRows;
  bool const planes = is_over_planes(product_of(config));
  bool const converts = converts_weight(product_of(config));
  bool const planes_b = planes && !converts;
  void const* const weight = converts ? buffers.converted_b.data : buffers.b;
  std::pair<char const*, void const*> const required[] = {
      {planes ? "planes of x" : "x", planes ? buffers.planes_a.values : buffers.a},
      {planes_b ? "planes of weight" : "weight", planes_b ? buffers.planes_b.values : weight},
      {planes ? "scales of x" : "x", planes ? buffers.planes_a.scales : buffers.a},
      {planes_b ? "scales of weight" : "weight", planes_b ? buffers.planes_b.scales : weight},
      {rows ? "partials" : "output", rows ? buffers.partials : buffers.d}};
  for (auto const& [which, pointer] : required) {
    if (pointer == nullptr || reinterpret_cast<uintptr_t>(pointer) % alignment != 0) {
      return std::string(which) + " has to start at a multiple of " + std::to_string(alignment) +
             " bytes, got address " + std::to_string(reinterpret_cast<uintptr_t>(pointer));
    }
  }
  if (planes && buffers.slices.count > 1 && (buffers.slices.sums == nullptr || buffers.slices.arrived == nullptr)) {
    return "slices of K need memory for their sums and arrivals";
  }
  if (reinterpret_cast<uintptr_t>(buffers.bias) % alignment != 0) {
    return "bias has to start at a multiple of " + std::to_string(alignment) + " bytes";
  }
  if (config.output == GemmOutput::kJoined) return check_joined(buffers.joined, alignment);
  return {};
}

// The operand that the copy engine brings to a specialized epilogue.
std::string check_source(GemmLaunch const& launch) {
  int const source = staged_by(launch.specialized).source;
  if (source < 0) return {};
  auto const address = reinterpret_cast<uintptr_t>(launch.operands.items[source].data);
  if (address % kOperandAlignment == 0) return {};
  return "operand " + std::to_string(source) + " has to start at a multiple of " + std::to_string(kOperandAlignment) +
         " bytes in this epilogue, got address " + std::to_string(address);
}

}  // namespace

void run_gemm(GemmConfig const& config, GemmLaunch const& launch, cudaStream_t stream) {
  std::string fault = find_rejection(config, launch.problem);
  if (fault.empty()) {
    fault = check_pointers(config, launch.buffers);
  }
  if (fault.empty()) {
    fault = check_source(launch);
  }
  int const slices = launch.buffers.slices.count;
  if (fault.empty() && slices != 1 && (!is_over_planes(product_of(config)) || !slices_fit(launch.problem.k, slices))) {
    fault = "K cannot be cut into " + std::to_string(slices) + " slices";
  }
  if (!fault.empty()) {
    throw std::invalid_argument(std::string(config.name) + ": " + fault + " (" + describe(launch.problem) + ")");
  }
  LaunchStatus const status = launcher_of(config)(launch, stream);
  if (status.error != cudaSuccess) {
    throw std::runtime_error(failure_of(std::string(config.name) + ": " + status.action, status.error) + ", " +
                             describe(launch.problem) + ", swizzle " + std::to_string(launch.swizzle));
  }
}

}  // namespace cutfuse
