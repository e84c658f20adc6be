// What was read of callables, as a tree: a node says what is read next, an edge what that gave.
#pragma once

#include <Python.h>

#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <utility>
#include <vector>

#include "call/python_objects.h"

namespace cutfuse::call {

constexpr size_t kScanLimit = 8;  // edges that are looked through one by one
constexpr int kSlotsLimit = 512;  // values of one callable

// What is read. Values are numbered in the order in which they are found; each read is of one of them.
enum class Read {
  kValue,            // what the value is
  kCode,             // of a function: its code, by identity
  kDefaultValues,    // of a function: its defaults, by identity
  kQualname,         // of the function of a value
  kGlobal,           // argument (name, attribute...): finds a value
  kFree,             // argument (index, attribute...): finds a value
  kDefaults,         // finds the tuple, if there is one
  kKeywordDefaults,  // finds names and values
  kKeywords,         // of a partial: finds names and values
  kHooks,            // argument (namespace, name of the check, its code, containers): that all are empty
  kAttributes,       // of a torch.nn.Module: finds values, and names and modules inside of it
  kForward,          // of a torch.nn.Module: the code of its class's forward, which is the value's function
  kAttribute,        // argument (attribute, attribute of that...): finds a value
  kEnd,              // nothing: the number is known
};

enum class Answer {
  kSame,       // an object by identity, which the tree keeps alive: of Python's or the language's own
  kCode,       // code by identity, which it does not keep alive
  kSeen,       // the function that was found as number `bits`
  kFloat,      // by bits
  kInt,        // by value
  kText,       // str or bytes by type and value; an int beyond 64 bits, too
  kTuple,      // of `bits` items, which become values
  kFloatType,  // a subclass of float, by identity; the float becomes a value
  kPartial,    // its function and its arguments become values
  kMethod,     // of a function with this code, by identity, which it does not keep alive; its object becomes a value
  kModule,     // a torch.nn.Module as a whole, of a class by its version
  kClass,      // an object of which attributes are read, of a class by its version
  kEpilogue,   // an Epilogue by its expression, which it does not keep alive, and its number of operands
  kDepth,      // how many attributes were taken
  kPlace,      // where an object has the attribute, and how many of that one's were taken
  kSize,       // how many items there are
  kNames,      // (names, types, number of modules inside)
  kNone,
};

// What a read gave. The object is not owned.
struct Token {
  Answer answer;
  int64_t bits;
  PyObject* object;
};

// Of two texts of the same type and hash, or integers. Runs no Python code: their types are Python's own.
inline bool is_equal(PyObject* first, PyObject* second) {
  if (first == second) {
    return true;
  }
  return Py_TYPE(first) == Py_TYPE(second) && PyObject_RichCompareBool(first, second, Py_EQ) == 1;
}

inline bool operator==(Token const& first, Token const& second) {
  if (first.answer != second.answer || first.bits != second.bits) {
    return false;
  }
  return first.object == second.object || (first.answer == Answer::kText && is_equal(first.object, second.object));
}

inline uint64_t hash_of(Token const& token) {
  uint64_t const object = token.answer == Answer::kText ? 0 : reinterpret_cast<uintptr_t>(token.object) >> 4;
  uint64_t const mixed = (static_cast<uint64_t>(token.bits) ^ object) * 0x9E3779B97F4A7C15ull;
  return (mixed ^ (mixed >> 32)) + static_cast<uint64_t>(token.answer);
}

inline Token whole(Answer answer, int64_t bits) { return {answer, bits, nullptr}; }

// Where an object has an attribute: see cutfuse/epilogue/reads.py.
enum class Place { kObject, kClass, kChildren };

inline Token place_token(int64_t place, int64_t depth) { return whole(Answer::kPlace, (place << 32) | depth); }

inline Token text_token(PyObject* text) { return {Answer::kText, PyObject_Hash(text), text}; }

inline Token float_token(PyObject* number) {
  double const value = PyFloat_AS_DOUBLE(number);
  int64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return whole(Answer::kFloat, bits);
}

inline Token int_token(PyObject* number) {
  int overflow = 0;
  long long const value = PyLong_AsLongLongAndOverflow(number, &overflow);
  return overflow != 0 ? text_token(number) : whole(Answer::kInt, value);
}

struct Edge {
  Token token;
  PyRef owned;  // what keeps the token's object alive
  PyRef weak;   // or a weak reference to it
  size_t child;

  // Whether the token's object is still the one that was meant. An address is used again.
  bool is_alive() const { return !weak || target_of(weak.get()).get() == token.object; }
};

struct Node {
  Read read = Read::kEnd;
  int slot = 0;
  int index = 0;  // of a free variable
  PyRef argument;
  uint64_t number = 0;
  std::vector<Edge> edges;
  std::unordered_multimap<uint64_t, size_t> by_hash;  // once there are more than kScanLimit

  Edge* find(Token const& token) {
    if (edges.size() <= kScanLimit) {
      for (Edge& edge : edges) {
        if (edge.token == token) {
          return &edge;
        }
      }
      return nullptr;
    }
    auto const range = by_hash.equal_range(hash_of(token));
    for (auto item = range.first; item != range.second; ++item) {
      if (edges[item->second].token == token) {
        return &edges[item->second];
      }
    }
    return nullptr;
  }

  void add(Edge edge) {
    edges.push_back(std::move(edge));
    if (edges.size() <= kScanLimit) {
      return;
    }
    size_t const first = by_hash.empty() ? 0 : edges.size() - 1;
    for (size_t k = first; k < edges.size(); ++k) {
      by_hash.emplace(hash_of(edges[k].token), k);
    }
  }
};

}  // namespace cutfuse::call
