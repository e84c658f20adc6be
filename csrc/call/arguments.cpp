#include "call/arguments.h"

#include <algorithm>
#include <cstring>

#include "call/callables.h"
#include "specialize/specialization.h"

namespace cutfuse::call {

namespace {

// What an argument is, in a key: no two kinds share their words.
enum Mark : uint64_t { kNone = 1, kTensor, kFloat, kInteger, kBoolean, kSequence };

uint64_t identity_of(PyObject* object) { return reinterpret_cast<uintptr_t>(object); }

class Reader {
 public:
  Reader(TorchState const& torch, Arguments& arguments) : torch_(torch), out_(arguments) {}

  // Without its layout in the key.
  bool take_tensor(PyObject* object) {
    if (!torch_.is_plain_tensor(object) || out_.tensor_count == Arguments::kMaxTensors) return false;
    if (!torch_.read(object, out_.facts[out_.tensor_count])) return false;
    out_.tensors[out_.tensor_count++] = object;
    return true;
  }

  void add_last_tensor() {
    out_.key.add(kTensor);
    out_.key.add(out_.facts[out_.tensor_count - 1]);
  }

  bool add_tensor(PyObject* object) {
    if (!take_tensor(object)) return false;
    add_last_tensor();
    return true;
  }

  bool add_optional_tensor(PyObject* object) {
    if (object != Py_None) return add_tensor(object);
    out_.key.add(kNone);
    return true;
  }

  bool add_operands(PyObject* operands) {
    bool const is_tuple = PyTuple_CheckExact(operands);
    if (!is_tuple && !PyList_CheckExact(operands)) return false;
    out_.first_operand = out_.tensor_count;
    Py_ssize_t const count = is_tuple ? PyTuple_GET_SIZE(operands) : PyList_GET_SIZE(operands);
    if (count > kMaxOperands) return false;
    out_.key.add(static_cast<uint64_t>(count));
    for (Py_ssize_t k = 0; k < count; ++k) {
      if (!add_operand(is_tuple ? PyTuple_GET_ITEM(operands, k) : PyList_GET_ITEM(operands, k))) return false;
    }
    return true;
  }

  bool add_flag(PyObject* flag) {
    if (!PyBool_Check(flag)) return false;
    out_.key.add(flag == Py_True ? 1 : 0);
    return true;
  }

  // A reduction's name, of at most 16 letters.
  bool add_name(PyObject* name) {
    if (name == Py_None) {
      out_.key.add(kNone);
      return true;
    }
    Py_ssize_t length = 0;
    char const* const text = PyUnicode_CheckExact(name) ? PyUnicode_AsUTF8AndSize(name, &length) : nullptr;
    if (text == nullptr || length > 16) return false;
    uint64_t words[2] = {};
    std::memcpy(words, text, static_cast<size_t>(length));
    out_.key.add(static_cast<uint64_t>(length) << 8 | kSequence);
    out_.key.add(words[0]);
    out_.key.add(words[1]);
    return true;
  }

  bool add_integer(PyObject* number) {
    if (!PyLong_CheckExact(number)) return false;
    int overflow = 0;
    long long const value = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (overflow != 0) return false;
    out_.key.add(kInteger);
    out_.key.add(static_cast<uint64_t>(value));
    return true;
  }

  bool add_dims(PyObject* dims) {
    if (dims == Py_None) {
      out_.key.add(kNone);
      return true;
    }
    return PyLong_CheckExact(dims) ? add_integer(dims) : add_integers(dims);
  }

  bool add_integers(PyObject* numbers) {
    bool const is_tuple = PyTuple_CheckExact(numbers);
    if (!is_tuple && !PyList_CheckExact(numbers)) return false;
    Py_ssize_t const count = is_tuple ? PyTuple_GET_SIZE(numbers) : PyList_GET_SIZE(numbers);
    out_.key.add(kSequence);
    out_.key.add(static_cast<uint64_t>(count));
    for (Py_ssize_t k = 0; k < count; ++k) {
      if (!add_integer(is_tuple ? PyTuple_GET_ITEM(numbers, k) : PyList_GET_ITEM(numbers, k))) return false;
    }
    return true;
  }

 private:
  bool add_operand(PyObject* operand) {
    if (PyFloat_CheckExact(operand)) {
      double const value = PyFloat_AS_DOUBLE(operand);
      if (value != value) return false;  // a callable may find it in a container, by identity
      uint64_t bits = 0;
      std::memcpy(&bits, &value, sizeof(bits));
      out_.key.add(kFloat);
      out_.key.add(bits);
      return true;
    }
    if (PyBool_Check(operand)) {
      out_.key.add(kBoolean);
      return add_flag(operand);
    }
    if (PyLong_CheckExact(operand)) return add_integer(operand);
    return add_tensor(operand);
  }

  TorchState const& torch_;
  Arguments& out_;
};

// Whether PyTorch's own linear layer takes the tensors, and as cutfuse.linear takes them: that refuses some shapes and
// types that PyTorch's does not.
bool is_linear_layer(Arguments const& arguments) {
  TensorFacts const& x = arguments.facts[0];
  TensorFacts const& weight = arguments.facts[1];
  if (x.ndim == 0 || weight.ndim != 2 || x.sizes[x.ndim - 1] != weight.sizes[1]) return false;
  if (!is_floating(x.dtype) || weight.dtype != x.dtype) return false;
  if (!arguments.has_bias) return true;
  TensorFacts const& bias = arguments.facts[2];
  return bias.ndim == 1 && bias.sizes[0] == weight.sizes[0] && bias.dtype == x.dtype;
}

// The number of a callable; kUnnumbered asks for it.
uint64_t number_of(PyObject* callable, uint64_t known) { return known == kUnnumbered ? recognise(callable) : known; }

Reading finish(Arguments const& arguments) { return arguments.key.is_complete() ? Reading::kKeyed : Reading::kGeneral; }

// Without their layouts in the key.
bool take_layer(Reader& reader, PyObject* x, PyObject* weight, PyObject* bias, Arguments& arguments) {
  arguments.has_bias = bias != Py_None;
  return reader.take_tensor(x) && reader.take_tensor(weight) && (!arguments.has_bias || reader.take_tensor(bias)) &&
         is_linear_layer(arguments);
}

void add_layer(Arguments& arguments) {
  for (int k = 0; k < arguments.tensor_count; ++k) arguments.key.add(arguments.facts[k]);
  arguments.key.add(arguments.has_bias ? kTensor : kNone);
}

// What the key of an operator ends with.
Reading finish_operator(PyObject* out_dtype, Arguments& arguments) {
  arguments.key.add(identity_of(out_dtype));
  arguments.key.add(static_cast<uint64_t>(specialize::mode()) << 1 | (torch_state().is_batch_invariant() ? 1 : 0));
  return finish(arguments);
}

// And that of a public function.
Reading finish_function(PyObject* out_dtype, Arguments& arguments) {
  arguments.key.add(torch_state().default_dtype());
  return finish_operator(out_dtype, arguments);
}

Reading read_linear(PyObject* const* given, uint64_t callable, Arguments& arguments) {
  auto const& [x, weight, bias, epilogue, operands, reduce, keepdim, out_dtype] =
      *reinterpret_cast<PyObject* const(*)[8]>(given);
  TorchState const& torch = torch_state();
  Reader reader(torch, arguments);
  if (!take_layer(reader, x, weight, bias, arguments)) return Reading::kGeneral;
  TensorFacts const& facts = arguments.facts[0];
  bool const is_bare = epilogue == Py_None && reduce == Py_None && out_dtype == Py_None && keepdim == Py_False &&
                       PyTuple_CheckExact(operands) && PyTuple_GET_SIZE(operands) == 0;
  bool const has_precision = facts.dtype == kFloat32Word && torch.serves(facts);
  if (is_bare && !has_precision && !torch.is_batch_invariant()) return Reading::kPlain;
  add_layer(arguments);
  if (!reader.add_operands(operands) || !torch.serves(arguments.facts[0])) return Reading::kGeneral;
  uint64_t const wanted = torch.wanted_gradients(arguments.tensors, arguments.tensor_count);
  if (wanted != 0 && reduce != Py_None) return Reading::kGeneral;
  arguments.key.add(wanted);
  uint64_t const number = number_of(epilogue, callable);
  if (number == 0) return Reading::kUnknown;
  arguments.key.add(number);
  if (!reader.add_name(reduce) || !reader.add_flag(keepdim)) return Reading::kGeneral;
  if (has_precision) arguments.key.add(torch.precision());
  arguments.key.add(torch.rounds_as_eager() ? 1 : 0);
  return finish_function(out_dtype, arguments);
}

Reading read_linear_operator(PyObject* const* given, uint64_t /*callable*/, Arguments& arguments) {
  auto const& [x, weight, bias, operands, program, reduction, out_dtype, scheme, planes] =
      *reinterpret_cast<PyObject* const(*)[9]>(given);
  TorchState const& torch = torch_state();
  Reader reader(torch, arguments);
  if (!take_layer(reader, x, weight, bias, arguments) || !torch.serves(arguments.facts[0])) return Reading::kGeneral;
  add_layer(arguments);
  if (!reader.add_operands(operands) || !reader.add_integer(program)) return Reading::kGeneral;
  if (!reader.add_name(reduction) || !reader.add_integer(scheme)) return Reading::kGeneral;
  if (planes != Py_None && !reader.add_tensor(planes)) return Reading::kGeneral;
  if (arguments.facts[0].dtype == kFloat32Word) arguments.key.add(torch.precision());
  return finish_operator(out_dtype, arguments);
}

Reading read_pointwise(PyObject* const* given, uint64_t callable, Arguments& arguments) {
  auto const& [fn, x, operands, out_dtype] = *reinterpret_cast<PyObject* const(*)[4]>(given);
  TorchState const& torch = torch_state();
  Reader reader(torch, arguments);
  if (fn == Py_None || !reader.add_tensor(x)) return Reading::kGeneral;
  if (!reader.add_operands(operands) || !torch.serves(arguments.facts[0])) return Reading::kGeneral;
  if (torch.wanted_gradients(arguments.tensors, arguments.tensor_count) != 0) return Reading::kGeneral;
  uint64_t const number = number_of(fn, callable);
  if (number == 0) return Reading::kUnknown;
  arguments.key.add(number);
  return finish_function(out_dtype, arguments);
}

Reading read_reduce(PyObject* const* given, uint64_t callable, Arguments& arguments) {
  auto const& [x, dim, op, keepdim, prologue, operands, out_dtype] = *reinterpret_cast<PyObject* const(*)[7]>(given);
  TorchState const& torch = torch_state();
  Reader reader(torch, arguments);
  if (!reader.add_tensor(x)) return Reading::kGeneral;
  if (!reader.add_operands(operands) || !torch.serves(arguments.facts[0])) return Reading::kGeneral;
  if (torch.wanted_gradients(arguments.tensors, arguments.tensor_count) != 0) return Reading::kGeneral;
  uint64_t const number = number_of(prologue, callable);
  if (number == 0) return Reading::kUnknown;
  arguments.key.add(number);
  if (!reader.add_dims(dim) || !reader.add_name(op) || !reader.add_flag(keepdim)) return Reading::kGeneral;
  return finish_function(out_dtype, arguments);
}

// The function that is an MLP's plan leaves the mode of rounding itself: its results round once in each.
Reading read_mlp(PyObject* const* given, uint64_t callable, Arguments& arguments) {
  auto const& [hidden, has_gate, recompute, x, w1, b1, up, up_bias, w2, b2, residual] =
      *reinterpret_cast<PyObject* const(*)[11]>(given);
  TorchState const& torch = torch_state();
  Reader reader(torch, arguments);
  for (PyObject* const tensor : {x, w1, b1, up, up_bias, w2, b2, residual}) {
    if (!reader.add_optional_tensor(tensor)) return Reading::kGeneral;
  }
  TensorFacts const& facts = arguments.facts[0];
  if (x == Py_None || !torch.serves(facts)) return Reading::kGeneral;
  if (!reader.add_flag(has_gate) || !reader.add_flag(recompute)) return Reading::kGeneral;
  arguments.key.add(torch.wanted_gradients(arguments.tensors, arguments.tensor_count));
  uint64_t const number = number_of(hidden, callable);
  if (number == 0) return Reading::kUnknown;
  arguments.key.add(number);
  if (facts.dtype == kFloat32Word) arguments.key.add(torch.precision());
  return finish_function(Py_None, arguments);
}

Reading read_pointwise_operator(PyObject* const* given, uint64_t /*callable*/, Arguments& arguments) {
  auto const& [x, operands, program, out_dtype] = *reinterpret_cast<PyObject* const(*)[4]>(given);
  Reader reader(torch_state(), arguments);
  if (!reader.add_tensor(x) || !torch_state().serves(arguments.facts[0])) return Reading::kGeneral;
  if (!reader.add_operands(operands) || !reader.add_integer(program)) return Reading::kGeneral;
  return finish_operator(out_dtype, arguments);
}

Reading read_reduce_operator(PyObject* const* given, uint64_t /*callable*/, Arguments& arguments) {
  auto const& [x, operands, program, reduction, dims, out_dtype] = *reinterpret_cast<PyObject* const(*)[6]>(given);
  Reader reader(torch_state(), arguments);
  if (!reader.add_tensor(x) || !torch_state().serves(arguments.facts[0])) return Reading::kGeneral;
  if (!reader.add_operands(operands) || !reader.add_integer(program)) return Reading::kGeneral;
  if (!reader.add_name(reduction) || !reader.add_dims(dims)) return Reading::kGeneral;
  return finish_operator(out_dtype, arguments);
}

Reading read_backward_operator(PyObject* const* given, uint64_t /*callable*/, Arguments& arguments) {
  auto const& [grad, x, operands, program, wanted, sums_columns] = *reinterpret_cast<PyObject* const(*)[6]>(given);
  Reader reader(torch_state(), arguments);
  if (!reader.add_tensor(grad) || !reader.add_tensor(x)) return Reading::kGeneral;
  if (!torch_state().serves(arguments.facts[0])) return Reading::kGeneral;
  if (!reader.add_operands(operands) || !reader.add_integer(program)) return Reading::kGeneral;
  if (!reader.add_integers(wanted) || !reader.add_flag(sums_columns)) return Reading::kGeneral;
  arguments.key.add(static_cast<uint64_t>(specialize::mode()));
  return finish(arguments);
}

// Tensors of a list, None among them where that is allowed.
bool add_tensors(Reader& reader, CallKey& key, PyObject* tensors, bool may_be_none) {
  if (!PyList_CheckExact(tensors)) return false;
  Py_ssize_t const count = PyList_GET_SIZE(tensors);
  key.add(static_cast<uint64_t>(count));
  for (Py_ssize_t k = 0; k < count; ++k) {
    PyObject* const tensor = PyList_GET_ITEM(tensors, k);
    if (!(may_be_none ? reader.add_optional_tensor(tensor) : reader.add_tensor(tensor))) return false;
  }
  return true;
}

Reading read_joined_operator(PyObject* const* given, uint64_t /*callable*/, Arguments& arguments) {
  auto const& [x, weights, biases] = *reinterpret_cast<PyObject* const(*)[3]>(given);
  Reader reader(torch_state(), arguments);
  if (!reader.add_tensor(x) || !torch_state().serves(arguments.facts[0])) return Reading::kGeneral;
  bool const are_read =
      add_tensors(reader, arguments.key, weights, false) && add_tensors(reader, arguments.key, biases, true);
  return are_read ? finish(arguments) : Reading::kGeneral;
}

bool is_operator(Function function) { return function >= Function::kLinearOperator; }

}  // namespace

bool may_run_kernels(Function function, Arguments const& arguments) {
  if (is_operator(function)) return true;  // PyTorch's dispatcher or compiler has seen to it
  TorchState const& torch = torch_state();
  PyObject* const* const end = arguments.tensors + arguments.tensor_count;
  return !torch.is_watched() &&
         std::none_of(arguments.tensors, end, [&](PyObject* tensor) { return torch.is_negated(tensor); });
}

Reading read_arguments(Function function, PyObject* const* given, uint64_t callable, Arguments& arguments) {
  using Read = Reading(PyObject* const*, uint64_t, Arguments&);
  static constexpr Read* readers[] = {
      read_linear,          read_pointwise,          read_reduce,          read_mlp,
      read_linear_operator, read_pointwise_operator, read_reduce_operator, read_backward_operator,
      read_joined_operator};
  arguments.key.add(static_cast<uint64_t>(function));
  Reading const reading = readers[static_cast<size_t>(function)](given, callable, arguments);
  PyErr_Clear();
  return reading;
}

}  // namespace cutfuse::call
