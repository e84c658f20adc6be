#include "epilogue/program.h"

#include <algorithm>
#include <cmath>

#include "epilogue/interpreter.h"
#include "epilogue/ops.h"

namespace cutfuse {

namespace {

std::string describe(Program const& program, int index) {
  return "instruction " + std::to_string(index) + " (" + kOps[program.instructions[index].op].name + ")";
}

// What is wrong with one source, given the slots written so far (a bit each).
std::string find_source_fault(Program const& program, OpInfo const& op, char name, int source, unsigned written) {
  std::string const argument = std::string("argument ") + name + " ";
  if (is_operand(source)) {
    int const operand = source - kOperand0;
    if (operand < program.operand_count) return "";
    return argument + "reads operand " + std::to_string(operand) + ", but the program has " +
           std::to_string(program.operand_count) + " operands";
  }
  if (is_slot(source)) {
    int const slot = source - kSlot0;
    if (written >> slot & 1u) return "";
    return argument + "reads slot " + std::to_string(slot) + " before any instruction has written it";
  }
  if (is_immediate(source)) {
    if (op.parameter_count == 0) return "";
    return argument + "is an immediate, but the op keeps its " + std::to_string(op.parameter_count) +
           " parameters there; load the number with copy first";
  }
  if (source == kPrevious || source == kInput) return "";
  return argument + "has unknown source " + std::to_string(source);
}

std::string find_instruction_fault(Program const& program, int index, unsigned written) {
  Instruction const& instruction = program.instructions[index];
  OpInfo const& op = kOps[instruction.op];
  std::string fault = find_source_fault(program, op, 'a', instruction.a, written);
  if (fault.empty() && op.arity >= 2) fault = find_source_fault(program, op, 'b', instruction.b, written);
  if (fault.empty() && op.arity >= 3) {
    if (!is_slot(instruction.c) && instruction.c != kImmediate1) {
      return "argument c has source " + std::to_string(instruction.c) + ", but has to be a slot or immediate 1";
    }
    fault = find_source_fault(program, op, 'c', instruction.c, written);
  }
  if (fault.empty() && instruction.slot >= kMaxSlots && instruction.slot != kNoSlot) {
    return "writes slot " + std::to_string(instruction.slot) + ", but there are " + std::to_string(kMaxSlots);
  }
  return fault;
}

uint8_t local_of(int source, int argument) {
  if (is_slot(source)) return static_cast<uint8_t>(source - kSlot0);
  return static_cast<uint8_t>(source == kInput ? kInputLocal : kArgumentLocal + argument);
}

// Adding -0 changes nothing; adding 0 makes 0 of -0.
bool has_shift(Instruction const& instruction) { return instruction.shift != 0.0f || !std::signbit(instruction.shift); }

void plan_steps(Instruction& instruction, bool has_b) {
  int steps = instruction.slot != kNoSlot ? kKeep : 0;
  if (instruction.a != kPrevious) steps |= kFetchA;
  if (is_operand(instruction.a) || is_immediate(instruction.a)) steps |= kGather;
  if (has_b && is_immediate(instruction.b)) {
    steps |= kNumberB;
    instruction.number = number_of(instruction, instruction.b);
  } else if (has_b) {
    steps |= kFetchB;
    if (is_operand(instruction.b) || instruction.b == kPrevious) steps |= kGather;
  }
  if (instruction.scale != 1.0f || has_shift(instruction)) steps |= kScaleShift;
  instruction.steps = static_cast<uint8_t>(steps);
  instruction.a_local = local_of(instruction.a, 0);
  instruction.b_local = local_of(instruction.b, 1);
}

// Folds `next` into `instruction` if it multiplies its result by a number or adds one to it, which are then one fused
// multiply-add: x * scale + -0 and x * 1 + shift are exact, and sign and NaN come out as without the folding.
bool fold_number(Instruction& instruction, Instruction const& next) {
  uint8_t const partner = partner_of_previous(next);
  if (instruction.slot != kNoSlot || has_shift(instruction) || !is_immediate(partner)) return false;
  float const number = number_of(next, partner);
  if (next.op == static_cast<uint8_t>(OpCode::kMul) && instruction.scale == 1.0f) {
    instruction.scale = number;
  } else if (next.op == static_cast<uint8_t>(OpCode::kAdd)) {
    instruction.shift = number;
  } else if (next.op == static_cast<uint8_t>(OpCode::kSub) && next.a == kPrevious) {
    instruction.shift = -number;
  } else {
    return false;
  }
  instruction.slot = next.slot;
  return true;
}

bool is_chain_op(int op) {
  switch (static_cast<OpCode>(op)) {
#define CUTFUSE_CHAIN(Camel) case OpCode::k##Camel:
#include "epilogue/chains.def"
    return true;
    default:
      return false;
  }
}

// A first instruction op(z) * scale + shift, and perhaps a second one that adds z.
void find_chain(Program& program) {
  program.chain = kNoChain;
  program.adds_input = 0;
  Instruction const& first = program.instructions[0];
  if (program.length < 1 || program.length > 2 || !is_chain_op(first.op) || first.a != kPrevious) return;
  if (has_eager_formulas(program)) return;
  if (program.length == 2) {
    Instruction const& last = program.instructions[1];
    if (last.op != static_cast<uint8_t>(OpCode::kAdd) || partner_of_previous(last) != kInput) return;
    if ((last.steps & kScaleShift) != 0) return;
    program.adds_input = 1;
  }
  program.chain = first.op;
}

constexpr Scaling kNoScaling = {false, 1.0f, -1};

bool multiply(Scaling& scaling, float number) {
  scaling.scale *= number;
  return std::isnormal(scaling.scale);
}

// Takes an instruction in, if it multiplies the previous result. A shift by +0 is none to a sum, which starts from it.
bool take(Scaling& scaling, Instruction const& instruction) {
  if (static_cast<OpCode>(instruction.op) != OpCode::kMul || instruction.slot != kNoSlot) return false;
  if (instruction.shift != 0.0f || !multiply(scaling, instruction.scale)) return false;
  uint8_t const factor = partner_of_previous(instruction);
  if (is_immediate(factor)) return multiply(scaling, number_of(instruction, factor));
  if (!is_operand(factor) || scaling.weight >= 0) return false;
  scaling.weight = factor - kOperand0;
  return true;
}

// More than a pass of a heavy op, so that the host takes the paths of the device.
constexpr int kWidth = 2 * interpreter::kHeavyPass;

struct LoadHostOperand {
  HostOperand const* operands;
  int64_t begin;
  int count;

  Fragment<kWidth> operator()(int index) const { return load(operands[index]); }

  // Elements beyond count repeat the last one.
  Fragment<kWidth> load(HostOperand const& operand) const {
    Fragment<kWidth> fragment;
    for (int i = 0; i < kWidth; ++i) {
      fragment.values[i] = operand.data[(begin + std::min(i, count - 1)) * operand.stride];
    }
    return fragment;
  }
};

}  // namespace

std::string find_fault(Program const& program) {
  if (program.length < 0 || program.length > kMaxInstructions) {
    return "a program has at most " + std::to_string(kMaxInstructions) + " instructions, got " +
           std::to_string(program.length);
  }
  if (program.operand_count < 0 || program.operand_count > kMaxOperands) {
    return "a program has at most " + std::to_string(kMaxOperands) + " operands, got " +
           std::to_string(program.operand_count);
  }
  unsigned written = 0;
  for (int index = 0; index < program.length; ++index) {
    Instruction const& instruction = program.instructions[index];
    if (instruction.op >= kOpCount) {
      return "instruction " + std::to_string(index) + " has unknown op code " + std::to_string(instruction.op) +
             "; there are " + std::to_string(kOpCount);
    }
    std::string const fault = find_instruction_fault(program, index, written);
    if (!fault.empty()) return describe(program, index) + ": " + fault;
    if (instruction.slot != kNoSlot) written |= 1u << instruction.slot;
  }
  return "";
}

void complete(Program& program) {
  int length = 0;
  for (int index = 0; index < program.length; ++index) {
    Instruction instruction = program.instructions[index];
    instruction.scale = 1.0f;
    instruction.shift = -0.0f;
    if (kOps[instruction.op].arity < 2) instruction.b = kInput;  // not read
    if (length > 0 && fold_number(program.instructions[length - 1], instruction)) continue;
    program.instructions[length++] = instruction;
  }
  program.length = length;
  program.keeps_input = 0;
  for (int index = 0; index < length; ++index) {
    Instruction& instruction = program.instructions[index];
    bool const has_b = kOps[instruction.op].arity >= 2;
    if (index == 0) {  // for the first instruction the input is the previous result
      if (instruction.a == kInput) instruction.a = kPrevious;
      if (has_b && instruction.b == kInput) instruction.b = kPrevious;
    }
    plan_steps(instruction, has_b);
    if (instruction.a == kInput || (has_b && instruction.b == kInput)) program.keeps_input = 1;
  }
  find_chain(program);
}

bool has_eager_formulas(Program const& program) {
  return std::any_of(program.instructions, program.instructions + program.length,
                     [](Instruction const& instruction) { return instruction.is_eager != 0; });
}

float cost_of(Program const& program) {
  // Cycles on an H200 for 16 elements a thread: 310 for a light op, 700 for a sigmoid, 1000 for a tanh.
  constexpr float kLightCost = 1.0f;
  constexpr float kOtherCost = 2.5f;
  constexpr float kChainCost = 0.5f;  // of a chain of chains.def, which the interpreter has compiled in
  if (program.chain != kNoChain) return kChainCost;
  float cost = 0.0f;
  for (int index = 0; index < program.length; ++index) {
    cost += kOps[program.instructions[index].op].cost == Cost::kLight ? kLightCost : kOtherCost;
  }
  return cost;
}

float specialized_cost_of(Program const& program, bool is_accurate) {
  // From nine chains behind products of 30 shapes in bf16 and five in tf32 on an H200, which their kernels have in
  // their own text. Of an operand: what it takes beside its bytes.
  constexpr float kInstructionCost = 0.0234f;
  constexpr float kSpecialCost = 0.238f;
  constexpr float kOperandCost = 0.2f;
  float cost = kOperandCost * static_cast<float>(program.operand_count);
  for (int index = 0; index < program.length; ++index) {
    OpInfo const& info = kOps[program.instructions[index].op];
    bool const is_eager = program.instructions[index].is_eager != 0;
    auto const [instructions, special] = is_accurate || is_eager ? info.accurate : info.fast;
    cost += kInstructionCost * static_cast<float>(instructions) + kSpecialCost * static_cast<float>(special);
  }
  return cost;
}

float generated_cost_of(Program const& program) {
  // Triton computes the accurate functions, and both branches of libdevice's erf: gelu of 38.7 million elements takes
  // 58.6 us on an H200, and of 4.8 million 9.4 us.
  constexpr float kErfCost = 0.48f;
  float cost = specialized_cost_of(program, true);
  for (int index = 0; index < program.length; ++index) {
    auto const op = static_cast<OpCode>(program.instructions[index].op);
    if (op == OpCode::kGelu || op == OpCode::kErf) cost += kErfCost;
  }
  return cost;
}

Scaling find_scaling(Program const& program) {
  Scaling scaling = {true, 1.0f, -1};
  for (int index = 0; index < program.length; ++index) {
    if (!take(scaling, program.instructions[index])) return kNoScaling;
  }
  return scaling;
}

void host_evaluate(Program const& program, float const* input, float* output, int64_t count,
                   HostOperand const* operands, int wrt) {
  for (int64_t begin = 0; begin < count; begin += kWidth) {
    int const valid = static_cast<int>(std::min<int64_t>(kWidth, count - begin));
    LoadHostOperand const load = {operands, begin, valid};
    Fragment<kWidth> const z = load.load({input, 1});
    Fragment<kWidth> const result =
        wrt < 0 ? interpret(program, z, load) : differentiate(program, z, wrt, load).tangent;
    std::copy_n(result.values, valid, output + begin);
  }
}

}  // namespace cutfuse
