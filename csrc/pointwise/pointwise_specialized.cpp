#include "common/launch_loaded.h"
#include "pointwise/kernels.h"

namespace cutfuse {
namespace {

template <class Parameters>
cudaError_t launch(LoadedKernel const& kernel, Parameters const& parameters, cudaStream_t stream) {
  PointwisePlan const& plan = parameters.plan;
  return launch_loaded(kernel, block_count(plan), plan.width * plan.height, stream, parameters);
}

}  // namespace

cudaError_t launch_pointwise_specialized(LoadedKernel const& kernel, PointwiseParameters const& parameters,
                                         cudaStream_t stream) {
  return launch(kernel, parameters, stream);
}

cudaError_t launch_pointwise_backward_specialized(LoadedKernel const& kernel,
                                                  PointwiseBackwardParameters const& parameters, cudaStream_t stream) {
  return launch(kernel, parameters, stream);
}

}  // namespace cutfuse
