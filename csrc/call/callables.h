// Recognises callables by what they read from outside.
#pragma once

#include <Python.h>

#include <cstdint>

namespace cutfuse::call {

// A number that stands for what a callable computes: equal numbers only for callables of which everything that they
// read is equal; 0 where it has none yet. None is 1, the identity. Needs the GIL, or an attached thread in a
// free-threaded build; runs no Python code, and never raises.
uint64_t recognise(PyObject* callable);

// The number, which the callable has from now on; 0 where it cannot have one: where what it reads may change without
// the key changing, or is too large. Or what `learn_fact` has to be told first: a tuple of a name and of what it is of.
// A new reference; null with an exception set.
PyObject* number_of(PyObject* callable);

// A number that no callable has had.
uint64_t new_number();

// Takes what Python says of code, of a class or of one of its attributes: see cutfuse/epilogue/fingerprint.py. False
// with an exception set.
bool learn_fact(PyObject* name, PyObject* given);

// What is the same in the whole process, before the first callable has a number. False with an exception set.
bool learn_language(PyObject* known, PyObject* hooks, PyObject* types);

// A number that a class has until anything about it or a base changes, and no class has afterwards; 0 where it has
// none.
uint32_t class_version(PyTypeObject* type);

void forget_callables();

struct CallableCounts {
  uint64_t keys;     // at the moment
  uint64_t numbers;  // given so far
  uint64_t hits;     // of recognise, None not counted
};

CallableCounts callable_counts();

}  // namespace cutfuse::call
