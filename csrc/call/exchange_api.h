// The part of DLPack's C exchange API that is used: https://dmlc.github.io/dlpack/latest/c_api.html, version 1.3.
// PyTorch gives it from 2.10 on, as the capsule torch.Tensor.__dlpack_c_exchange_api__.
#pragma once

#include <cstdint>

namespace cutfuse::call {

constexpr uint32_t kExchangeMajorVersion = 1;
constexpr char const* kExchangeCapsule = "dlpack_exchange_api";

constexpr int32_t kCpu = 1;
constexpr int32_t kCuda = 2;

struct ExchangedTensor {  // DLTensor
  void* data;
  int32_t device_type;
  int32_t device_index;
  int32_t ndim;
  uint8_t dtype_code;
  uint8_t dtype_bits;
  uint16_t dtype_lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct ExchangeApi {  // DLPackExchangeAPI
  uint32_t major;
  uint32_t minor;
  ExchangeApi* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object;
  void* managed_tensor_to_py_object;
  int (*read)(void* py_object, ExchangedTensor* out);
  int (*current_stream)(int32_t device_type, int32_t device_index, void** out);
};

}  // namespace cutfuse::call
