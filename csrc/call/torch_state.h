// What a call asks PyTorch, through functions that Python hands over once: this module is not linked with PyTorch, so
// that one build of it serves every version.
#pragma once

#include <Python.h>

#include <cstdint>

#include "call/python_objects.h"
#include "common/dtype.h"

namespace cutfuse::call {

// The part of DLPack's C exchange API that is used: https://dmlc.github.io/dlpack/latest/c_api.html, version 1.3.
// PyTorch gives it from 2.10 on, as the capsule torch.Tensor.__dlpack_c_exchange_api__.

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

// Of an element type: DLPack's code and bits; of types that DLPack or this module does not know, some other number.
constexpr uint64_t dtype_word(uint32_t code, uint32_t bits) { return code << 8 | bits; }
constexpr uint64_t kFloat32Word = dtype_word(2, 32);
constexpr uint64_t kFloat64Word = dtype_word(2, 64);
constexpr uint64_t kFloat16Word = dtype_word(2, 16);
constexpr uint64_t kBFloat16Word = dtype_word(4, 16);

constexpr uint64_t word_of(DType dtype) {
  if (dtype == DType::kFloat32) return kFloat32Word;
  return dtype == DType::kFloat16 ? kFloat16Word : kBFloat16Word;
}

constexpr bool is_floating(uint64_t dtype) {
  return dtype == kFloat32Word || dtype == kFloat64Word || dtype == kFloat16Word || dtype == kBFloat16Word;
}

// Of a tensor's memory.
struct TensorFacts {
  static constexpr int kMaxDims = 8;

  void* data;
  int32_t device_type;
  int32_t device_index;
  uint64_t dtype;
  int ndim;
  int64_t sizes[kMaxDims];
  int64_t strides[kMaxDims];
};

// The functions and constants that are handed over, by name. dtype_words is of dtypes, where there is no exchange API;
// forward_ad, process, invariance and rounding are dictionaries of modules and objects.
// clang-format off
#define CUTFUSE_TORCH_OBJECTS(OBJECT)                                                                             \
  OBJECT(dtype_words) OBJECT(function_modes) OBJECT(dispatch_modes) OBJECT(functorch) OBJECT(profiler)            \
  OBJECT(tracing) OBJECT(autocast) OBJECT(device_name) OBJECT(forward_ad) OBJECT(grad_enabled) OBJECT(is_neg)     \
  OBJECT(default_dtype) OBJECT(current_device) OBJECT(current_stream) OBJECT(empty_strided) OBJECT(linear)        \
  OBJECT(bytes_dtype) OBJECT(context_mode) OBJECT(inherited_mode) OBJECT(process) OBJECT(allows_tf32)             \
  OBJECT(is_capturing) OBJECT(copy) OBJECT(context_invariance) OBJECT(invariance)               \
  OBJECT(context_rounding) OBJECT(rounding)
// clang-format on

class TorchState {
 public:
  // Takes the functions by name. Raises KeyError for one that is missing, and returns false.
  bool connect(PyObject* functions);
  void disconnect() { connected_ = false; }
  bool connected() const { return connected_; }

  // torch.Tensor or torch.nn.Parameter itself: a subclass may mean something else by every operation.
  bool is_plain_tensor(PyObject* object) const {
    return Py_TYPE(object) == tensor_type_ || Py_TYPE(object) == parameter_type_;
  }

  // Of a plain tensor. False where it is no memory with strides, or has too many dimensions.
  bool read(PyObject* tensor, TensorFacts& facts) const;

  // Whether PyTorch negates what lies in its memory whenever it reads it.
  bool is_negated(PyObject* tensor) const;

  // Where the memory of a tensor that was just made begins. False, with an exception, where that cannot be read.
  bool read_address(PyObject* tensor, void*& address) const;

  // The device that the kernels serve: CUDA, or what a test puts in its place.
  bool serves(TensorFacts const& facts) const { return facts.device_type == device_type_; }

  // Whether anything is to see each operation of PyTorch's, or to change it: a mode, a transform, a profiler, autocast.
  bool is_watched() const;
  // Whether PyTorch casts the arguments of products on the served device.
  bool is_autocasting() const;
  // Which tensors a gradient is wanted of, a bit each; none where gradients are off.
  uint64_t wanted_gradients(PyObject* const* tensors, int count) const;
  bool records_gradients() const;
  // Whether the current stream is captured in a CUDA graph.
  bool is_capturing() const;
  bool is_current_device(int32_t index) const;

  // Identities that a plan depends on: of the default type, and of how fp32 matrices are multiplied.
  uint64_t default_dtype() const;
  uint64_t precision() const;
  // Whether a row's result is to be the same however many rows come with it.
  bool is_batch_invariant() const { return holds(context_invariance_, invariance_); }
  // Whether a linear layer rounds as PyTorch's eager mode.
  bool rounds_as_eager() const { return holds(context_rounding_, rounding_); }

  bool current_stream(int32_t device_index, void*& stream) const;
  // torch.empty_strided on the current device of the served kind.
  PyRef allocate(PyObject* sizes, PyObject* strides, PyObject* dtype) const;
  PyRef allocate_bytes(PyObject* sizes) const;
  // A contiguous copy in memory of its own.
  PyRef copy(PyObject* tensor) const;
  // F.linear.
  PyRef multiply(PyObject* x, PyObject* weight, PyObject* bias) const;

 private:
  // A mode of cutfuse/switch.py.
  static bool holds(PyObject* context, PyObject* variables);
  bool read_exchanged(PyObject* tensor, TensorFacts& facts) const;
  bool read_attributes(PyObject* tensor, TensorFacts& facts) const;

  bool connected_ = false;
  PyTypeObject* tensor_type_ = nullptr;
  PyTypeObject* parameter_type_ = nullptr;
  ExchangeApi const* exchange_ = nullptr;
  int32_t device_type_ = kCuda;
  PyRef kept_;  // the mapping, which keeps everything below alive
#define CUTFUSE_TORCH_OBJECT(name) PyObject* name##_ = nullptr;
  CUTFUSE_TORCH_OBJECTS(CUTFUSE_TORCH_OBJECT)
#undef CUTFUSE_TORCH_OBJECT
};

TorchState& torch_state();

}  // namespace cutfuse::call
