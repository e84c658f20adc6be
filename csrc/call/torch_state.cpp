#include "call/torch_state.h"

#include <algorithm>

namespace cutfuse::call {

namespace {

PyObject* call(PyObject* function) { return PyObject_Vectorcall(function, nullptr, 0, nullptr); }

// Whether a function without arguments gives exactly `expected`. Forgets an error, which is not that.
bool gives(PyObject* function, PyObject* expected) {
  PyRef const result = PyRef::steal(call(function));
  if (!result) PyErr_Clear();
  return result.get() == expected;
}

// As an integer; `otherwise` where it raises or gives none.
int64_t integer_of(PyRef const& value, int64_t otherwise) {
  int64_t const number = value ? PyLong_AsLongLong(value.get()) : -1;
  if (!PyErr_Occurred()) return number;
  PyErr_Clear();
  return otherwise;
}

PyObject* interned(char const* name) { return PyUnicode_InternFromString(name); }

PyRef call_method(PyObject* object, PyObject* name) {
  PyObject* const self[] = {object};
  return PyRef::steal(PyObject_VectorcallMethod(name, self, 1, nullptr));
}

bool is_true(PyObject* object, PyObject* attribute) {
  PyRef const value = PyRef::steal(PyObject_GetAttr(object, attribute));
  if (!value) PyErr_Clear();
  return value.get() == Py_True;
}

// Integers of a tuple (torch.Size is one).
bool read_integers(PyRef const& tuple, int64_t* out, int& count) {
  if (!tuple || !PyTuple_Check(tuple.get()) || PyTuple_GET_SIZE(tuple.get()) > TensorFacts::kMaxDims) return false;
  count = static_cast<int>(PyTuple_GET_SIZE(tuple.get()));
  for (int d = 0; d < count; ++d) {
    out[d] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.get(), d));
    if (out[d] == -1 && PyErr_Occurred()) return false;
  }
  return true;
}

bool has_elements(TensorFacts const& facts) {
  return std::find(facts.sizes, facts.sizes + facts.ndim, 0) == facts.sizes + facts.ndim;
}

}  // namespace

bool TorchState::connect(PyObject* functions) {
  connected_ = false;
  kept_ = PyRef::share(functions);
  auto const take = [&](char const* name) {
    PyObject* const found = PyDict_GetItemString(functions, name);
    if (found == nullptr && !PyErr_Occurred()) PyErr_SetString(PyExc_KeyError, name);
    return found;
  };
  struct Place {
    char const* name;
    PyObject** object;
  };
  PyObject* tensor_type = nullptr;
  PyObject* parameter_type = nullptr;
  PyObject* exchange = nullptr;
  PyObject* device_type = nullptr;
  Place const places[] = {{"tensor_type", &tensor_type},
                          {"parameter_type", &parameter_type},
                          {"exchange_api", &exchange},
                          {"device_type", &device_type},
#define CUTFUSE_TORCH_OBJECT(name) {#name, &name##_},
                          CUTFUSE_TORCH_OBJECTS(CUTFUSE_TORCH_OBJECT)
#undef CUTFUSE_TORCH_OBJECT
  };
  for (auto const& [name, object] : places) {
    *object = take(name);
    if (*object == nullptr) return false;
  }
  tensor_type_ = reinterpret_cast<PyTypeObject*>(tensor_type);
  parameter_type_ = reinterpret_cast<PyTypeObject*>(parameter_type);
  device_type_ = static_cast<int32_t>(PyLong_AsLong(device_type));
  exchange_ = nullptr;
  if (exchange != Py_None) {
    auto const* const api = static_cast<ExchangeApi const*>(PyCapsule_GetPointer(exchange, kExchangeCapsule));
    if (api == nullptr) return false;
    if (api->major == kExchangeMajorVersion) exchange_ = api;
  }
  connected_ = !PyErr_Occurred();
  return connected_;
}

bool TorchState::read(PyObject* tensor, TensorFacts& facts) const {
  bool found = exchange_ != nullptr ? read_exchanged(tensor, facts) : read_attributes(tensor, facts);
  // PyTorch has tensors of zeros for which nothing is stored.
  if (found && facts.data == nullptr && has_elements(facts)) found = false;
  if (!found) PyErr_Clear();
  return found;
}

bool TorchState::is_negated(PyObject* tensor) const {
  PyObject* const self[] = {tensor};
  PyRef const negated = PyRef::steal(PyObject_Vectorcall(is_neg_, self, 1, nullptr));
  if (!negated) PyErr_Clear();
  return negated.get() != Py_False;
}

bool TorchState::read_address(PyObject* tensor, void*& address) const {
  static PyObject* const data_ptr = interned("data_ptr");
  if (exchange_ != nullptr) {
    ExchangedTensor given;
    if (exchange_->read(tensor, &given) != 0) return false;
    address = static_cast<char*>(given.data) + given.byte_offset;
    return true;
  }
  PyRef const number = call_method(tensor, data_ptr);
  if (!number) return false;
  address = PyLong_AsVoidPtr(number.get());
  return !PyErr_Occurred();
}

bool TorchState::read_exchanged(PyObject* tensor, TensorFacts& facts) const {
  ExchangedTensor given;
  if (exchange_->read(tensor, &given) != 0 || given.ndim > TensorFacts::kMaxDims) return false;
  if (given.ndim > 0 && given.strides == nullptr) return false;
  facts.data = static_cast<char*>(given.data) + given.byte_offset;
  facts.device_type = given.device_type;
  facts.device_index = given.device_index;
  facts.dtype = given.dtype_lanes == 1 ? dtype_word(given.dtype_code, given.dtype_bits) : ~uint64_t{0};
  facts.ndim = given.ndim;
  std::copy_n(given.shape, given.ndim, facts.sizes);
  std::copy_n(given.strides, given.ndim, facts.strides);
  return true;
}

bool TorchState::read_attributes(PyObject* tensor, TensorFacts& facts) const {
  static PyObject* const shape = interned("shape");
  static PyObject* const stride = interned("stride");
  static PyObject* const data_ptr = interned("data_ptr");
  static PyObject* const dtype = interned("dtype");
  static PyObject* const is_cuda = interned("is_cuda");
  static PyObject* const is_cpu = interned("is_cpu");
  static PyObject* const get_device = interned("get_device");
  int strides = 0;
  if (!read_integers(PyRef::steal(PyObject_GetAttr(tensor, shape)), facts.sizes, facts.ndim)) return false;
  if (!read_integers(call_method(tensor, stride), facts.strides, strides) || strides != facts.ndim) return false;
  PyRef const address = call_method(tensor, data_ptr);
  if (!address) return false;
  facts.data = PyLong_AsVoidPtr(address.get());
  PyRef const type = PyRef::steal(PyObject_GetAttr(tensor, dtype));
  if (!type) return false;
  PyObject* const word = PyDict_GetItemWithError(dtype_words_, type.get());
  facts.dtype = word == nullptr ? reinterpret_cast<uintptr_t>(type.get()) : PyLong_AsUnsignedLongLong(word);
  facts.device_type = is_true(tensor, is_cuda) ? kCuda : is_true(tensor, is_cpu) ? kCpu : 0;
  facts.device_index =
      facts.device_type == kCuda ? static_cast<int32_t>(integer_of(call_method(tensor, get_device), 0)) : 0;
  return !PyErr_Occurred();
}

bool TorchState::is_watched() const {
  static PyObject* const level = interned("_current_level");
  PyObject* const forward_level = PyDict_GetItemWithError(forward_ad_, level);
  if (forward_level == nullptr || PyLong_AsLong(forward_level) >= 0) {
    PyErr_Clear();
    return true;
  }
  if (integer_of(PyRef::steal(call(function_modes_)), 1) != 0) return true;
  if (integer_of(PyRef::steal(call(dispatch_modes_)), 1) != 0) return true;
  if (!gives(functorch_, Py_None) || !gives(profiler_, Py_False) || !gives(tracing_, Py_None)) return true;
  return is_autocasting();
}

bool TorchState::is_autocasting() const {
  PyObject* const device[] = {device_name_};
  PyRef const autocast = PyRef::steal(PyObject_Vectorcall(autocast_, device, 1, nullptr));
  if (!autocast) PyErr_Clear();
  return autocast.get() != Py_False;
}

uint64_t TorchState::wanted_gradients(PyObject* const* tensors, int count) const {
  static PyObject* const requires_grad = interned("requires_grad");
  if (!records_gradients()) return 0;
  uint64_t wanted = 0;
  for (int k = 0; k < count; ++k) wanted |= static_cast<uint64_t>(is_true(tensors[k], requires_grad)) << k;
  return wanted;
}

bool TorchState::records_gradients() const { return !gives(grad_enabled_, Py_False); }

bool TorchState::is_capturing() const { return gives(is_capturing_, Py_True); }

bool TorchState::is_current_device(int32_t index) const {
  return integer_of(PyRef::steal(call(current_device_)), -1) == index;
}

uint64_t TorchState::default_dtype() const {
  PyRef const dtype = PyRef::steal(call(default_dtype_));
  if (!dtype) PyErr_Clear();
  return reinterpret_cast<uintptr_t>(dtype.get());
}

uint64_t TorchState::precision() const {
  static PyObject* const process_mode = interned("_process_mode");
  PyObject* found = nullptr;
  if (PyContextVar_Get(context_mode_, inherited_mode_, &found) != 0) PyErr_Clear();
  PyRef const context = PyRef::steal(found);
  PyObject* mode = context.get();
  if (mode == inherited_mode_) mode = PyDict_GetItemWithError(process_, process_mode);
  if (mode == nullptr) PyErr_Clear();
  PyRef const tf32 = PyRef::steal(call(allows_tf32_));
  if (!tf32) PyErr_Clear();
  bool const allowed = tf32.get() == Py_True || (tf32 && PyUnicode_Check(tf32.get()) &&
                                                 PyUnicode_CompareWithASCIIString(tf32.get(), "tf32") == 0);
  return reinterpret_cast<uintptr_t>(mode) << 1 | (allowed ? 1 : 0);
}

bool TorchState::holds(PyObject* context, PyObject* variables) {
  static PyObject* const of_process = interned("of_process");
  PyObject* found = nullptr;
  if (PyContextVar_Get(context, Py_None, &found) != 0) PyErr_Clear();
  PyRef const of_context = PyRef::steal(found);
  if (of_context.get() != Py_None) return of_context.get() == Py_True;
  return PyDict_GetItemWithError(variables, of_process) == Py_True;
}

bool TorchState::current_stream(int32_t device_index, void*& stream) const {
  if (exchange_ != nullptr) return exchange_->current_stream(device_type_, device_index, &stream) == 0;
  PyRef const index = PyRef::steal(PyLong_FromLong(device_index));
  PyObject* const arguments[] = {index.get()};
  PyRef const handle = PyRef::steal(PyObject_Vectorcall(current_stream_, arguments, 1, nullptr));
  if (!handle) return false;
  stream = PyLong_AsVoidPtr(handle.get());
  return !PyErr_Occurred();
}

PyRef TorchState::allocate(PyObject* sizes, PyObject* strides, PyObject* dtype) const {
  PyObject* const arguments[] = {sizes, strides, dtype};
  return PyRef::steal(PyObject_Vectorcall(empty_strided_, arguments, 3, nullptr));
}

PyRef TorchState::allocate_bytes(PyObject* sizes) const {
  static PyObject* const stride = Py_BuildValue("(i)", 1);
  return allocate(sizes, stride, bytes_dtype_);
}

PyRef TorchState::copy(PyObject* tensor) const {
  PyObject* const arguments[] = {tensor};
  return PyRef::steal(PyObject_Vectorcall(copy_, arguments, 1, nullptr));
}

PyRef TorchState::multiply(PyObject* x, PyObject* weight, PyObject* bias) const {
  PyObject* const arguments[] = {x, weight, bias};
  return PyRef::steal(PyObject_Vectorcall(linear_, arguments, 3, nullptr));
}

TorchState& torch_state() {
  static TorchState* const state = new TorchState();  // never freed: Python may be gone when statics are
  return *state;
}

}  // namespace cutfuse::call
