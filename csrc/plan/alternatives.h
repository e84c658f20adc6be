// What the two kinds of fused plans share: fp32 products at their own accuracy, and all others.
#pragma once

#include <string>
#include <vector>

#include "plan/gemm_configs.h"
#include "plan/linear_plan.h"

namespace cutfuse {

// The part of another way's time that products over planes have to be predicted to take: the predictions are within 6%
// of 52 measured problems.
constexpr double kPlaneAdvantage = 0.95;

// Why cuBLAS is no alternative where a product is to be batch-invariant.
constexpr char const* kChosenByRows = "cuBLAS chooses by the number of rows in which order it adds";

// Of a request that plan_linear has checked.
LinearPlan plan_plain_product(LinearRequest const& request, std::string const& only);
LinearPlan plan_fp32_product(LinearRequest const& request, std::string const& only);

// A plan by cuBLAS, because no fused kernel is an alternative.
LinearPlan plan_without_kernels(LinearRequest const& request, std::string reason);

// Puts cuBLAS behind the fused alternatives and chooses: the one with the least to compare, a fused one where they are
// equal.
void choose(LinearPlan& plan, Alternative cublas, std::string const& only);

// By one kernel, and so many copies that it needs.
Alternative alternative_of(LinearRequest const& request, GemmCandidate const& kernel, int copies = 0,
                           double copies_microseconds = 0.0);

// By cuBLAS, and one more kernel where the product is not all.
Alternative cublas_alternative(LinearRequest const& request, std::string const& product, double microseconds,
                               bool is_bare, std::string rejection);

// The launches of one kernel, and of the copies before and behind it, which have no memory yet.
void add_product_launches(LinearPlan& plan, LinearRequest const& request, GemmProblem const& problem,
                          GemmCandidate const& kernel, std::vector<AlignedCopy> const& copies = {});

// cuBLAS's launches, where it was chosen.
void add_cublas_launches(LinearPlan& plan, LinearRequest const& request);

bool reduces(LinearRequest const& request);

// Bytes that the kernel's partial states of a row reduction take; 0 where it stores the matrix.
int64_t partial_bytes(LinearRequest const& request, GemmConfig const& config);

FoldPartials fold(LinearRequest const& request, GemmConfig const& config, Piece const& partials);

// How the operands of a linear layer lie in memory, as kernels that read them where they are see it.

// Why no kernel reads the operands, by their strides; empty where some do.
std::string why_lines_are_not_read(LinearRequest const& request);

// The product of operands whose lines are read.
GemmProblem problem_of(LinearRequest const& request, Product product);

// Strides in elements, as messages give them.
std::string strides_of(MatrixLayout const& matrix);

}  // namespace cutfuse
