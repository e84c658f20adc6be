// What the two kinds of fused plans share: fp32 products at their own accuracy, and all others.
#pragma once

#include <string>
#include <vector>

#include "plan/linear_plan.h"

namespace cutfuse {

// Of a request that plan_linear has checked.
LinearPlan plan_direct_product(LinearRequest const& request, std::string const& only);
LinearPlan plan_fp32_product(LinearRequest const& request, std::string const& only);

// A plan by cuBLAS, because no fused kernel is an alternative.
LinearPlan plan_without_kernels(LinearRequest const& request, std::string reason);

// Puts cuBLAS behind the fused alternatives and chooses: the one with the least to compare, a fused one where they are
// equal.
void choose(LinearPlan& plan, Alternative cublas, std::string const& only);

// cuBLAS's launches, where it was chosen.
void add_cublas_launches(LinearPlan& plan, LinearRequest const& request);

bool reduces(LinearRequest const& request);

// Bytes that the kernel's partial states of a row reduction take; 0 where it stores the matrix.
int64_t partial_bytes(LinearRequest const& request, GemmConfig const& config);

FoldPartials fold(LinearRequest const& request, GemmConfig const& config, Piece const& partials);

}  // namespace cutfuse
