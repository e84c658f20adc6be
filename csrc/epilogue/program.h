// The epilogue program: a straight-line, three-address program over fp32 fragments, run once per output element.
// Plain data, passed by value as a kernel argument, so that one compiled kernel runs every chain.
#pragma once

#include <cstdint>
#include <string>

#include "common/dtype.h"

namespace cutfuse {

constexpr int kMaxInstructions = 32;
constexpr int kMaxOperands = 4;
constexpr int kMaxSlots = 6;
constexpr uint8_t kNoSlot = 255;
constexpr int32_t kNoChain = -1;

// Where an instruction takes an argument from. Slots and operands are ranges of kMaxSlots and kMaxOperands values.
enum Source : uint8_t {
  kPrevious = 0,  // result of the previous instruction; the input for the first one
  kInput = 1,     // z, the pre-activation
  kImmediate0 = 2,
  kImmediate1 = 3,
  kSlot0 = 4,
  kOperand0 = kSlot0 + kMaxSlots,
};

// What the interpreter has to do for an instruction beside the op itself. Decided once, on the host: on the device each
// decision costs as much as a few of the op's own instructions.
enum Step : uint8_t {
  kGather = 1,       // arguments have to be brought into local memory first
  kFetchA = 2,       // a is in local memory; otherwise it is the previous result
  kFetchB = 4,       // b is in local memory
  kNumberB = 8,      // b is a number
  kScaleShift = 16,  // the result is multiplied by scale, and shift added
  kKeep = 32,        // the result is also kept in a slot
};

// What the interpreter keeps in local memory: the program's slots, the input, and the arguments that were gathered.
constexpr int kInputLocal = kMaxSlots;
constexpr int kArgumentLocal = kInputLocal + 1;
constexpr int kLocals = kArgumentLocal + 2;

struct alignas(16) Instruction {
  uint8_t op;
  uint8_t a;
  uint8_t b;
  uint8_t c;        // a slot or kImmediate1: read element by element, which saves a fragment of registers
  uint8_t slot;     // the result is also kept in this slot, unless it is kNoSlot
  uint8_t a_local;  // from here on derived by complete, but for the immediates: where in local memory a and b wait
  uint8_t b_local;
  uint8_t steps;       // of Step
  float immediate[2];  // the op's parameters, or values for kImmediate0 and kImmediate1
  float number;        // b where it is a number
  float scale;
  float shift;
  int32_t is_eager;  // the op is computed by PyTorch's formula (ops.def), which only compiled kernels have
};
static_assert(sizeof(Instruction) == 32, "two 16-byte loads fetch an instruction");

constexpr bool is_immediate(int source) { return source == kImmediate0 || source == kImmediate1; }

constexpr bool is_slot(int source) { return source >= kSlot0 && source < kSlot0 + kMaxSlots; }

constexpr bool is_operand(int source) { return source >= kOperand0 && source < kOperand0 + kMaxOperands; }

inline float number_of(Instruction const& instruction, int immediate) {
  return instruction.immediate[immediate == kImmediate1 ? 1 : 0];
}

// The source that a binary instruction combines with the previous result; kPrevious where that is no other one.
constexpr uint8_t partner_of_previous(Instruction const& instruction) {
  if (instruction.a == kPrevious) return instruction.b;
  return instruction.b == kPrevious ? instruction.a : static_cast<uint8_t>(kPrevious);
}

struct Program {
  int32_t length;
  int32_t operand_count;
  int16_t keeps_input;  // derived by complete: the input is read after a result has replaced it
  int16_t adds_input;   // derived by complete: the chain ends by adding the input
  int32_t chain;        // derived by complete: the op of a chain of chains.def, or kNoChain
  Instruction instructions[kMaxInstructions + 1];  // the last is never run: the interpreter reads one ahead
};

// A tensor that a program reads beside its input. A stride of 0 broadcasts along that dimension.
struct Operand {
  void const* data;
  int64_t strides[3];  // outer, row, column, in elements
  DType dtype;
};

struct Operands {
  Operand items[kMaxOperands];
};

// Empty when the program is well formed; otherwise what is wrong with it, naming the instruction.
std::string find_fault(Program const& program);

// Derives what the interpreter wants to know beforehand, and folds a multiplication by a number and the addition of one
// into the instruction before them; to be done once for a well-formed program.
void complete(Program& program);

// Whether kernels interpret a complete program: it has instructions, and is no chain that they have compiled in.
constexpr bool is_interpreted(Program const& program) { return program.length > 0 && program.chain == kNoChain; }

// Whether only a kernel with the program compiled in computes it.
bool has_eager_formulas(Program const& program);

// The same program for kernels that have no chain compiled in, or are to have it without a call.
inline Program without_chain(Program program) {
  program.chain = kNoChain;
  return program;
}

// What interpreting a complete program takes, in units of one light op; 0 for the identity.
float cost_of(Program const& program);

// What a complete program takes that is compiled into the kernel, in units of CompiledTiming::per_op
// (plan/predictions). is_accurate: with the accurate primitives, which kernels of fp32 operands or results have.
float specialized_cost_of(Program const& program, bool is_accurate);

// What a complete program takes, in the same units, of a kernel that torch.compile generates.
float generated_cost_of(Program const& program);

// program(z) = scale * z, times operand `weight` where that is not negative.
struct Scaling {
  bool found;
  float scale;
  int weight;
};

// Finds complete programs that multiply the previous result by numbers and at most one operand, in any order. Not where
// the numbers' product is no normal fp32 number: it may overflow or vanish where the products with z do not.
Scaling find_scaling(Program const& program);

// An fp32 operand on the host: one number for all elements (stride 0) or one for each (stride 1).
struct HostOperand {
  float const* data;
  int64_t stride;
};

// output[i] is the program's value at input[i] (wrt = -1), or its derivative with respect to the input (wrt = 0) or
// operand wrt - 1. The program has to be well formed, and operands holds its operand_count of them.
void host_evaluate(Program const& program, float const* input, float* output, int64_t count,
                   HostOperand const* operands, int wrt);

}  // namespace cutfuse
