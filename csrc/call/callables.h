// Recognises callables by what they read from outside, as cutfuse/epilogue/fingerprint.py reads it.
#pragma once

#include <Python.h>

#include <cstdint>

namespace cutfuse::call {

// A number that stands for what a callable computes: equal numbers only for equal fingerprints; 0 where it is not
// known. None is 1, the identity. Needs the GIL, or an attached thread in a free-threaded build; runs no Python code,
// and never raises.
uint64_t recognise(PyObject* callable);

// A number that no callable has had.
uint64_t new_number();

// Learns that a callable which gives the answers of a trail has a number. trail: a list of (read, slot, argument,
// answer, found), see cutfuse/epilogue/fingerprint.py. False where it cannot be kept; false with an exception set where
// it is no trail.
bool learn(PyObject* trail, uint64_t number);

// The types whose values are looked into; before anything is learnt. False with an exception set.
bool learn_types(PyObject* partial, PyObject* epilogue);

// A number that a class has until anything about it or a base changes, and no class has afterwards; 0 where it has
// none.
uint32_t class_version(PyTypeObject* type);

void forget_callables();

struct CallableCounts {
  uint64_t nodes;    // of the tree, at the moment
  uint64_t numbers;  // given so far
  uint64_t hits;     // of recognise, None not counted
};

CallableCounts callable_counts();

}  // namespace cutfuse::call
