#include "common/launch_loaded.h"
#include "pointwise/kernels.h"

namespace cutfuse {

cudaError_t launch_pointwise_specialized(LoadedKernel const& kernel, PointwiseParameters const& parameters,
                                         cudaStream_t stream) {
  PointwisePlan const& plan = parameters.plan;
  return launch_loaded(kernel, block_count(plan), plan.width * plan.height, stream, parameters);
}

}  // namespace cutfuse
