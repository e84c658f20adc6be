// What issuing launches takes of the host, and how that counts beside the device's time.
#pragma once

#include "common/dtype.h"
#include "plan/linear_request.h"

namespace cutfuse {

// In microseconds beside an H200: of a fused kernel, of each further launch of a fused plan, of PyTorch's product, and
// what a pass behind that adds.
struct HostTimes {
  double fused;
  double further;
  double product;
  double pass;
  double share;  // of the host's time, which its other work waits for wherever the two are close
};

// input: of the product.
HostTimes host_times(Issuer issuer, DType input);

// What is compared of two ways of computing a layer.
double compared(double device_microseconds, double host_microseconds, Issuer issuer, DType input);

}  // namespace cutfuse
