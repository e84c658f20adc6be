#include "plan/host_times.h"

#include <algorithm>

namespace cutfuse {

// In eager code beside a quiet host, where PyTorch's own operations take 12 us each: of blocks of a norm and two
// layers, a layer takes 12 to 13 us as one kernel, and 22 to 27 by PyTorch's product and a kernel of ours. Called in a
// loop, which keeps everything in the host's caches, they take 8 and 16. The times of fp32, tf32 included, are those of
// such a loop, because its choices were compared by the time of whole calls. In compiled code a further layer of 32
// rows takes 10 us as one kernel, 16 as a product, and 26 as a product and a Triton kernel, beside an H100 whose host
// takes 1.3 times as long as the one of these times. Behind the dispatcher a fused kernel takes 30.
//
// The shares: with gelu, twelve blocks 768/3072 of 1576 rows take 1.10 of eager's time with a product by cuBLAS and
// PyTorch's own gelu, and 0.94 with one kernel, which keeps the device busy for as long. Of 83 stacks of such blocks in
// bf16, drawn at random, none was faster where the host counted for less than here. Compiled code does less besides.
HostTimes host_times(Issuer issuer, DType input) {
  constexpr double kFurther = 3.0;
  switch (issuer) {
    case Issuer::kCall:
    case Issuer::kTraining:
      if (input == DType::kFloat32) return {8.5, kFurther, 13.0, 9.0, 0.2};
      return {12.5, kFurther, 15.0, 7.0, 0.1};
    case Issuer::kCompiledCode:
      return {8.0, kFurther, 12.0, 7.5, 0.1};
    case Issuer::kCompiledCpp:
      return {30.0, kFurther, 12.0, 7.0, 0.2};
    case Issuer::kGraph:
      break;
  }
  return {0.0, 0.0, 0.0, 0.0, 0.0};
}

// A device that is done sooner than the host issues its work waits for the host. In a training step that waits for the
// host as a whole, the device counts for less: the smallest such steps keep it busy for a quarter of the time, the
// largest for nearly all of it.
double compared(double device_microseconds, double host_microseconds, Issuer issuer, DType input) {
  constexpr double kShareOfDevice = 0.35;
  if (issuer == Issuer::kTraining) return host_microseconds + kShareOfDevice * device_microseconds;
  double const share = host_times(issuer, input).share;
  return std::max(device_microseconds, host_microseconds) + share * host_microseconds;
}

}  // namespace cutfuse
