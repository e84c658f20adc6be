// A GEMM kernel's PTX with what is known of every launch in the place of what the kernel would ask for.
#pragma once

#include <string>
#include <string_view>

#include "reduce/reduction.h"

namespace cutfuse::specialize {

struct GemmVariant {
  bool stores_pre_activation = true;       // whether a launch may ask for it
  Reduction reduction = Reduction::kNone;  // that a kernel which reduces rows computes; none: any of them
};

// Throws std::invalid_argument where the text is not such a kernel's.
std::string gemm_text(std::string_view ptx, GemmVariant const& variant);

}  // namespace cutfuse::specialize
