// Launches of kernels that the driver compiled.
#include <climits>

#include "pointwise/kernels.h"

namespace cutfuse {
namespace {

template <class Parameters>
cudaError_t launch_loaded(LoadedKernel const& kernel, Parameters const& parameters, cudaStream_t stream) {
  PointwisePlan const& plan = parameters.plan;
  int64_t const blocks = block_count(plan);
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(plan.width * plan.height));
  config.stream = stream;
  void* arguments[] = {const_cast<Parameters*>(&parameters)};
  cudaError_t const status = cudaLaunchKernelExC(&config, kernel.function, arguments);
  if (status != cudaSuccess) cudaGetLastError();  // clears the error, which the next launch would otherwise report
  return status;
}

}  // namespace

cudaError_t launch_pointwise_specialized(LoadedKernel const& kernel, PointwiseParameters const& parameters,
                                         cudaStream_t stream) {
  return launch_loaded(kernel, parameters, stream);
}

cudaError_t launch_pointwise_backward_specialized(LoadedKernel const& kernel,
                                                  PointwiseBackwardParameters const& parameters, cudaStream_t stream) {
  return launch_loaded(kernel, parameters, stream);
}

}  // namespace cutfuse
