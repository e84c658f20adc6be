#include "plan/host_times.h"

#include <algorithm>

namespace cutfuse {

// In compiled code a further layer of 32 rows takes 10 us as one kernel, 16 as a product, and 26 as a product and a
// Triton kernel, beside an H100 whose host takes 1.3 times as long as the one of these times. Behind the dispatcher a
// fused kernel takes 30.
HostTimes host_times(Issuer issuer) {
  constexpr double kFurther = 3.0;
  switch (issuer) {
    case Issuer::kCall:
    case Issuer::kTraining:
      return {8.5, kFurther, 13.0, 9.0};
    case Issuer::kCompiledCode:
      return {8.0, kFurther, 12.0, 7.5};
    case Issuer::kCompiledCpp:
      return {30.0, kFurther, 12.0, 7.0};
    case Issuer::kGraph:
      break;
  }
  return {0.0, 0.0, 0.0, 0.0};
}

// A device that is done sooner than the host issues its work waits for the host. Where the two are close, the host's
// other work decides which is waited for: with gelu, twelve blocks 768/3072 of 1576 rows take 1.10 of eager's time with
// a product by cuBLAS and PyTorch's own gelu, 26 us by prediction, and 0.94 with one kernel, 27 us. Compiled code does
// less besides, unless it calls operators through the dispatcher: in the same blocks a product with a residual
// takes 20.9 us as one kernel, and 13.7 by cuBLAS where the next norm's kernel adds the residual, 25.5 and 23.4 us by
// prediction. In a training step that waits for the host as a whole, the device counts for less: the smallest such
// steps keep it busy for a quarter of the time, the largest for nearly all of it.
double compared(double device_microseconds, double host_microseconds, Issuer issuer) {
  constexpr double kShareOfHost = 0.2;
  constexpr double kShareOfCompiledHost = 0.1;
  constexpr double kShareOfDevice = 0.35;
  if (issuer == Issuer::kTraining) return host_microseconds + kShareOfDevice * device_microseconds;
  double const share = issuer == Issuer::kCompiledCode ? kShareOfCompiledHost : kShareOfHost;
  return std::max(device_microseconds, host_microseconds) + share * host_microseconds;
}

}  // namespace cutfuse
