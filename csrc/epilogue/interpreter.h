// Runs a program over a fragment of F elements: the one interpreter of every kernel and of the host.
//
// Kernels call it through functions that are not inlined: CUTLASS unrolls the epilogue's subtile loop, and with a copy
// of the op switch per subtile every dispatch misses the instruction cache (6-10 us on a one-wave product, H200).
// Fragments travel by value, in registers; slots live in local memory, which is what allows them to be indexed at run
// time.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/host_device.h"
#include "epilogue/primitives.h"
#include "epilogue/program.h"

namespace cutfuse {

template <int F>
struct alignas(F % 4 == 0 ? 16 : 4) Fragment {
  float values[F];
};

// Values and their derivatives with respect to one input.
template <int F>
struct Dual {
  Fragment<F> value;
  Fragment<F> tangent;
};

namespace interpreter {

// Elements that a heavy op computes at once; the fragment is rotated through its first elements. Straight-line code for
// all 16 elements would be four times the size, and what a small product waits for is the first fetch of the code.
inline constexpr int kHeavyPass = 4;

// What an op's code is unrolled over: a pass, or the whole fragment for ops that are no longer than a pass of others.
constexpr int pass_of(Cost cost, int width) {
  if (cost == Cost::kRare) return 1;
  return cost == Cost::kHeavy && width > kHeavyPass ? kHeavyPass : width;
}

template <int F>
CUTFUSE_HOST_DEVICE void fill(Fragment<F>& fragment, float value) {
  CUTFUSE_UNROLL
  for (int i = 0; i < F; ++i) fragment.values[i] = value;
}

template <int F>
CUTFUSE_HOST_DEVICE void assign(Fragment<F>& target, Fragment<F> const& value, float) {
  target = value;
}

template <int F>
CUTFUSE_HOST_DEVICE void assign(Dual<F>& target, Fragment<F> const& value, float tangent) {
  target.value = value;
  fill(target.tangent, tangent);
}

template <int F>
CUTFUSE_HOST_DEVICE void assign(Fragment<F>& target, float value) {
  fill(target, value);
}

template <int F>
CUTFUSE_HOST_DEVICE void assign(Dual<F>& target, float value) {
  fill(target.value, value);
  fill(target.tangent, kMaskedTangent);
}

// The third argument is read element by element, from a slot or the second immediate: a fragment of it would cost
// registers.
template <class State>
struct Third {
  State const* slots;
  int source;
  float immediate;
};

template <class Op, class Primitives, int Pass, int F>
CUTFUSE_HOST_DEVICE void apply_pass(Fragment<F>& a, Fragment<F> const& b, Third<Fragment<F>> const& c, float const* p) {
  CUTFUSE_UNROLL
  for (int i = 0; i < Pass; ++i) {
    float second = 0.0f;
    float third = 0.0f;
    if constexpr (Op::kArity >= 2) second = b.values[i];
    if constexpr (Op::kArity == 3) third = c.source < kSlot0 ? c.immediate : c.slots[c.source - kSlot0].values[i];
    a.values[i] = Op::template forward<Primitives>(a.values[i], second, third, p[0], p[1]);
  }
}

template <class Op, class Primitives, int Pass, int F>
CUTFUSE_HOST_DEVICE void apply_pass(Dual<F>& a, Dual<F> const& b, Third<Dual<F>> const& c, float const* p) {
  CUTFUSE_UNROLL
  for (int i = 0; i < Pass; ++i) {
    float const first = a.value.values[i];
    float second = 0.0f;
    float third = 0.0f;
    float third_tangent = 0.0f;
    if constexpr (Op::kArity >= 2) second = b.value.values[i];
    if constexpr (Op::kArity == 3) {
      bool const immediate = c.source < kSlot0;
      third = immediate ? c.immediate : c.slots[c.source - kSlot0].value.values[i];
      third_tangent = immediate ? kMaskedTangent : c.slots[c.source - kSlot0].tangent.values[i];
    }
    float const y = Op::template forward<Primitives>(first, second, third, p[0], p[1]);
    float tangent =
        contribution(Op::template derivative_a<Primitives>(first, second, third, p[0], p[1], y), a.tangent.values[i]);
    if constexpr (Op::kArity >= 2) {
      tangent +=
          contribution(Op::template derivative_b<Primitives>(first, second, third, p[0], p[1], y), b.tangent.values[i]);
    }
    if constexpr (Op::kArity == 3) {
      tangent +=
          contribution(Op::template derivative_c<Primitives>(first, second, third, p[0], p[1], y), third_tangent);
    }
    a.value.values[i] = y;
    a.tangent.values[i] = tangent;
  }
}

template <int Pass, int F>
CUTFUSE_HOST_DEVICE void rotate(Fragment<F>& fragment) {
  float first[Pass];
  CUTFUSE_UNROLL
  for (int i = 0; i < Pass; ++i) first[i] = fragment.values[i];
  CUTFUSE_UNROLL
  for (int i = 0; i + Pass < F; ++i) fragment.values[i] = fragment.values[i + Pass];
  CUTFUSE_UNROLL
  for (int i = 0; i < Pass; ++i) fragment.values[F - Pass + i] = first[i];
}

template <int Pass, int F>
CUTFUSE_HOST_DEVICE void rotate(Dual<F>& fragment) {
  rotate<Pass>(fragment.value);
  rotate<Pass>(fragment.tangent);
}

template <int F>
constexpr int width_of(Fragment<F> const*) {
  return F;
}

template <int F>
constexpr int width_of(Dual<F> const*) {
  return F;
}

// a = op(a, b, c), a heavy op in passes. The width comes from outside although it is known here: ptxas peels
// the first pass off a loop with a constant trip count, which doubles the code (sigmoid at F = 16: 117 instructions
// instead of 66).
template <class Op, class Primitives, class State>
CUTFUSE_HOST_DEVICE void apply(int width, State& a, State& b, Third<State> const& c, float const* parameters) {
  constexpr int kWidth = width_of(static_cast<State const*>(nullptr));
  constexpr int kPass = pass_of(Op::kCost, kWidth);
  if constexpr (kPass == kWidth) {
    apply_pass<Op, Primitives, kWidth>(a, b, c, parameters);
  } else {
    static_assert(kWidth % kHeavyPass == 0, "a fragment holds whole passes");
    static_assert(Op::kArity < 3, "a heavy op has no third argument: a slot cannot be rotated");
    CUTFUSE_NO_UNROLL
    for (int done = 0; done < width; done += kPass) {
      apply_pass<Op, Primitives, kPass>(a, b, c, parameters);
      rotate<kPass>(a);
      if constexpr (Op::kArity == 2) rotate<kPass>(b);
    }
  }
}

// nvcc makes a jump table of it when told to (--jump-table-density), a binary search of branches otherwise.
template <class Primitives, class State>
CUTFUSE_HOST_DEVICE void dispatch(int op, int width, State& a, State& b, Third<State> const& c,
                                  float const* parameters) {
  switch (static_cast<OpCode>(op)) {
#define CUTFUSE_OP(Camel, ...)                                 \
  case OpCode::k##Camel:                                       \
    apply<ops::Camel, Primitives>(width, a, b, c, parameters); \
    break;
#include "epilogue/ops.def"
    default:  // find_fault has refused every other code, so that no range check is needed here
      __builtin_unreachable();
  }
}

// Brings operands, numbers as a and the previous result as b into local memory. Seldom taken, and apart from what is:
// merged with the other sources it would cost each instruction a select for every element.
template <class State, class LoadOperand>
CUTFUSE_HOST_DEVICE void gather_arguments(Instruction const& instruction, State const& previous, State* locals, int wrt,
                                          LoadOperand const& load) {
  if (instruction.b == kPrevious) locals[kArgumentLocal + 1] = previous;
  if (instruction.a == kImmediate0 || instruction.a == kImmediate1) {
    assign(locals[kArgumentLocal], instruction.immediate[instruction.a - kImmediate0]);
  }
  CUTFUSE_NO_UNROLL
  for (int argument = 0; argument < 2; ++argument) {
    int const operand = (argument == 0 ? instruction.a : instruction.b) - kOperand0;
    if (operand >= 0) {
      assign(locals[kArgumentLocal + argument], load(operand), wrt == operand + 1 ? 1.0f : kMaskedTangent);
    }
  }
}

template <int F>
CUTFUSE_HOST_DEVICE void scale_and_shift(Fragment<F>& fragment, float scale, float shift) {
  CUTFUSE_UNROLL
  for (int i = 0; i < F; ++i) fragment.values[i] = ::fmaf(fragment.values[i], scale, shift);
}

template <int F>
CUTFUSE_HOST_DEVICE void scale_and_shift(Dual<F>& fragment, float scale, float shift) {
  scale_and_shift(fragment.value, scale, shift);
  CUTFUSE_UNROLL
  for (int i = 0; i < F; ++i) fragment.tangent.values[i] = contribution(scale, fragment.tangent.values[i]);
}

// An instruction in registers. Its bytes are taken out of words by shifts: byte loads and the compiler's own unpacking
// are chains of dependent instructions, and what an op costs beside its arithmetic is latency.
struct Decoded {
  uint32_t head;  // op, a, b, c
  uint32_t plan;  // slot, a_local, b_local, steps
  float immediate[2];
  float number;
  float scale;
  float shift;

  CUTFUSE_HOST_DEVICE int op() const { return static_cast<int>(head & 0xffu); }
  CUTFUSE_HOST_DEVICE int c() const { return static_cast<int>(head >> 24); }
  CUTFUSE_HOST_DEVICE int slot() const { return static_cast<int>(plan & 0xffu); }
  CUTFUSE_HOST_DEVICE int a_local() const { return static_cast<int>((plan >> 8) & 0xffu); }
  CUTFUSE_HOST_DEVICE int b_local() const { return static_cast<int>((plan >> 16) & 0xffu); }
  CUTFUSE_HOST_DEVICE bool does(uint32_t steps) const { return (plan & (steps << 24)) != 0; }
};

CUTFUSE_HOST_DEVICE Decoded decode(Instruction const& instruction) {
  Decoded decoded;
#if defined(__CUDA_ARCH__)
  uint4 const first = reinterpret_cast<uint4 const*>(&instruction)[0];
  float4 const second = reinterpret_cast<float4 const*>(&instruction)[1];
  decoded = {first.x, first.y, {__uint_as_float(first.z), __uint_as_float(first.w)}, second.x, second.y, second.z};
#else
  memcpy(&decoded.head, &instruction, sizeof(decoded.head));
  memcpy(&decoded.plan, &instruction.slot, sizeof(decoded.plan));
  decoded.immediate[0] = instruction.immediate[0];
  decoded.immediate[1] = instruction.immediate[1];
  decoded.number = instruction.number;
  decoded.scale = instruction.scale;
  decoded.shift = instruction.shift;
#endif
  return decoded;
}

// State is Fragment<F> for values, Dual<F> for values with tangents with respect to one input: wrt = 0 for z, k for
// operand k - 1. Everything but the previous result and one argument lives in local memory: it can be indexed there at
// run time, and costs no registers beside the accumulators of a GEMM.
template <class State, class Primitives, int F, class LoadOperand>
CUTFUSE_HOST_DEVICE State interpret(Program const& program, Fragment<F> const& z, int wrt, LoadOperand const& load) {
  State locals[kLocals];
  // A constant that the compiler cannot see: operand_count is never negative.
  int const width = F + (program.operand_count < 0);
  State previous;
  assign(previous, z, wrt == 0 ? 1.0f : kMaskedTangent);
  if (program.keeps_input) locals[kInputLocal] = previous;
  int const length = program.length;
  Decoded next = decode(program.instructions[0]);
  CUTFUSE_NO_UNROLL
  for (int index = 0; index < length; ++index) {
    Decoded const instruction = next;
    next = decode(program.instructions[index + 1]);
    State b;
    if (instruction.does(kGather | kFetchA | kFetchB | kNumberB)) {
      if (__builtin_expect(instruction.does(kGather), 0)) {
        gather_arguments(program.instructions[index], previous, locals, wrt, load);
      }
      if (instruction.does(kFetchB)) {
        b = locals[instruction.b_local()];
      } else {
        assign(b, instruction.number);
      }
      if (instruction.does(kFetchA)) previous = locals[instruction.a_local()];
    }
    dispatch<Primitives>(instruction.op(), width, previous, b,
                         Third<State>{locals, instruction.c(), instruction.immediate[1]}, instruction.immediate);
    if (instruction.does(kScaleShift)) scale_and_shift(previous, instruction.scale, instruction.shift);
    if (instruction.does(kKeep)) locals[instruction.slot()] = previous;
  }
  return previous;
}

}  // namespace interpreter

// The program's value at z. load(k) gives operand k's fragment.
template <int F, class Primitives = AccuratePrimitives, class LoadOperand>
CUTFUSE_HOST_DEVICE Fragment<F> interpret(Program const& program, Fragment<F> const& z, LoadOperand const& load) {
  return interpreter::interpret<Fragment<F>, Primitives>(program, z, -1, load);
}

// The program's value and its derivative with respect to z (wrt = 0) or operand wrt - 1; see input_gradient.
template <int F, class Primitives = AccuratePrimitives, class LoadOperand>
CUTFUSE_HOST_DEVICE Dual<F> differentiate(Program const& program, Fragment<F> const& z, int wrt,
                                          LoadOperand const& load) {
  return interpreter::interpret<Dual<F>, Primitives>(program, z, wrt, load);
}

}  // namespace cutfuse
