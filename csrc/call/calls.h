// The public functions' direct path: a call whose key is in the table of plans runs in one C++ function.
//
//   linear(x, ...) -> call_linear -> read the arguments -> key -> plan -> allocate once -> launch -> the result
//
// Everything else, and every message, is the general path's, in Python.
#pragma once

#include <Python.h>

#include <cstdint>

namespace cutfuse::call {

// Each takes its arguments as positional ones, and returns the result; None for a call that is the general path's; and
// NotImplemented for one whose key is not in the table: the general path runs it, and may make a plan for the next.
//
// Those of operators are called by torch.ops.cutfuse and Inductor's code: what PyTorch's dispatcher or compiler has
// seen to is not asked for again. program: a number of new_callable_number's. scheme, planes: those of a prepared
// weight; 0 and None where it has none. call_backward_operator gives a list; a bias of call_joined_operator may be
// None, and so may all tensors of call_mlp but x, w1 and w2.
PyMethodDef const* call_functions();

enum class Function : uint64_t {
  kLinear,
  kPointwise,
  kReduce,
  kMlp,
  // Those of operators from here on.
  kLinearOperator,
  kPointwiseOperator,
  kReduceOperator,
  kBackwardOperator,
  kJoinedOperator,
};

class CallKey;
struct CallPlan;

// The key of a call as things are now, of arguments in a tuple as above, whose callable has a number of recognise's.
// False where such a call has none.
bool read_key(Function function, PyObject* given, uint64_t callable, CallKey& key);

// Puts a plan into the table for the arguments of a call. `before`: its key before the plan was made. False where it is
// another one by now: what the plan was made of may be neither's.
bool remember_call(Function function, PyObject* given, uint64_t callable, CallKey const& before, CallPlan plan);

// What a plan gives for tensors that are laid out as those that it was made for: as of the function's arguments, of
// which at most Arguments::kMaxTensors. device: theirs, which is the current one. Null with an exception where that
// fails.
PyObject* run_plan(CallPlan const& plan, PyObject* const* tensors, int count, int first_operand, int32_t device);

// Calls that ran directly, since the process began.
uint64_t direct_calls();

// While paused, every call is the general path's.
void pause_calls(bool paused);

}  // namespace cutfuse::call
