#include "epilogue/host_evaluate.h"

#include <algorithm>

#include "epilogue/interpreter.h"

namespace cutfuse {
namespace {

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
