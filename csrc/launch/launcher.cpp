#include "launch/launcher.h"

#include <atomic>
#include <variant>

namespace cutfuse {

namespace {

std::atomic<Launcher*> in_use{nullptr};

constexpr int64_t kWord = 4;  // bytes of a flag, and of what counts arrivals

class FusedLaunches {
 public:
  FusedLaunches(LinearPlan const& plan, LinearBuffers const& buffers, Program const& program, Operands const& operands,
                SpecializedEpilogues const& epilogues, Stream stream)
      : request_(plan.request),
        buffers_(buffers),
        program_(program),
        operands_(operands),
        epilogues_(epilogues),
        stream_(stream) {}

  void operator()(SplitPass const& pass) const {
    MatrixLayout const& source = pass.is_weight ? request_.weight : request_.x;
    SplitProblem problem = {};
    problem.source = static_cast<float const*>(pass.is_weight ? buffers_.weight : buffers_.x);
    problem.rows = source.rows;
    problem.columns = source.columns;
    problem.row_stride = source.row_stride;
    problem.column_stride = source.columns > 1 ? source.column_stride : 1;
    problem.scheme = pass.scheme;
    problem.is_weight = pass.is_weight;
    problem.planes = planes_at(pass.planes);
    problem.cleared = {at<int32_t>(pass.cleared), words(pass.cleared)};
    problem.only_if = guard_at(pass.guard);
    problem.guarded = !pass.guard.empty();
    launcher().split(problem, stream_);
  }

  void operator()(AlignedCopy const& copy) const {
    bool const is_result = copy.matrix == CopiedMatrix::kResult;
    void const* const given = copy.matrix == CopiedMatrix::kX ? buffers_.x : buffers_.weight;
    DType const dtype = is_result ? request_.output : request_.input;
    PointwiseProblem problem = {};
    problem.extents = {1, copy.lines, copy.length};
    problem.x = {is_result ? at<void>(copy.aligned) : given, {0, copy.from_pitch, 1}, dtype};
    problem.program.chain = kNoChain;
    problem.out = is_result ? buffers_.result : at<void>(copy.aligned);
    problem.out_dtype = dtype;
    problem.out_pitch = copy.to_pitch;
    launcher().pointwise(problem, stream_);
  }

  void operator()(FusedProduct const& product) {
    GemmLaunch launch = {};
    launch.specialized = next_epilogue();
    launch.problem = product.problem;
    launch.program = program_;
    launch.operands = operands_;
    launch.swizzle = product.kernel.swizzle;
    launch.raster_along_m = product.kernel.raster_along_m;
    set_operands(product, launch.buffers);
    launch.buffers.bias = buffers_.bias;
    launch.buffers.partials = at<float>(product.partials);
    void* const stored = product.result.bytes == 0 ? buffers_.result : at<void>(product.result);
    launch.buffers.d = launch.buffers.partials == nullptr ? stored : nullptr;
    launch.buffers.pre_activation = buffers_.pre_activation;
    launch.buffers.slices = {product.kernel.slices, at<float>(product.sums), at<int32_t>(product.arrivals)};
    launch.buffers.guard = guard_at(product.guard);
    launch.buffers.run = product.when;
    launcher().gemm(config_of(product.kernel), launch, stream_);
  }

  void operator()(FoldPartials const& fold) const {
    launcher().fold({at<float>(fold.partials), fold.tiles, request_.x.rows, request_.reduction, request_.weight.rows,
                     buffers_.result, request_.output, fold.batch_invariant},
                    stream_);
  }

  // Not of a fused plan.
  void operator()(CublasProduct const&) const {}
  void operator()(PointwisePass const&) const {}
  void operator()(ReductionPass const&) const {}

 private:
  LoadedKernel* next_epilogue() {
    return specialize::loaded(epilogues_.empty() ? nullptr : epilogues_[products_++], program_);
  }

  template <class T>
  T* at(Piece const& piece) const {
    if (piece.bytes == 0) return nullptr;
    void* const memory = piece.memory == Memory::kWorkspace ? buffers_.workspace : buffers_.weight_planes;
    return reinterpret_cast<T*>(static_cast<char*>(memory) + piece.offset);
  }

  static int32_t words(Piece const& piece) { return static_cast<int32_t>(piece.bytes / kWord); }

  Planes planes_at(PlanesPieces const& pieces) const {
    return {at<void>(pieces.values), at<float>(pieces.scales), at<uint32_t>(pieces.flags)};
  }

  SplitGuard guard_at(std::vector<Piece> const& pieces) const {
    SplitGuard guard = {};
    for (size_t k = 0; k < pieces.size(); ++k) {
      guard.flags[k] = at<uint32_t>(pieces[k]);
      guard.counts[k] = words(pieces[k]);
    }
    return guard;
  }

  void set_operands(FusedProduct const& product, GemmBuffers& buffers) const {
    if (!is_over_planes(product.problem.product)) {
      buffers.a = product.x.values.bytes == 0 ? buffers_.x : at<void>(product.x.values);
      buffers.b = product.weight.values.bytes == 0 ? buffers_.weight : at<void>(product.weight.values);
      buffers.joined = buffers_.joined;
      return;
    }
    buffers.planes_a = planes_at(product.x);
    if (product.weight.values.bytes > 0) {
      buffers.planes_b = planes_at(product.weight);
      return;
    }
    buffers.converted_b = {static_cast<float const*>(buffers_.weight), product.problem.ldb, request_.weight.columns,
                           at<uint32_t>(product.weight_flags), words(product.weight_flags)};
  }

  LinearRequest const& request_;
  LinearBuffers const& buffers_;
  Program const& program_;
  Operands const& operands_;
  SpecializedEpilogues const& epilogues_;
  Stream const stream_;
  size_t products_ = 0;  // launched so far
};

// z as the pointwise and reduction kernels take it: outer, row and column strides.
Operand product_of(LinearRequest const& request, void const* z) {
  return {z, {0, request.weight.rows, 1}, request.input};
}

PointwiseProblem pointwise_of(LinearRequest const& request, void const* z, void* result, Program const& program,
                              Operands const& operands) {
  PointwiseProblem problem = {};
  problem.extents = {1, request.x.rows, request.weight.rows};
  problem.x = product_of(request, z);
  problem.program = program;
  problem.operands = operands;
  problem.out = result;
  problem.out_dtype = request.output;
  return problem;
}

// The reduction kernels' strides are of (outer, reduced, inner): one place to the left of (outer, row, column).
void turn_left(Operand& operand) {
  operand.strides[0] = operand.strides[1];
  operand.strides[1] = operand.strides[2];
  operand.strides[2] = 0;
}

ReduceProblem reduce_of(LinearRequest const& request, void const* z, void* result, void* workspace,
                        Program const& program, Operands const& operands) {
  ReduceProblem problem = {};
  problem.extents = {request.x.rows, request.weight.rows, 1};
  problem.x = product_of(request, z);
  turn_left(problem.x);
  problem.program = program;
  problem.operands = operands;
  for (Operand& operand : problem.operands.items) turn_left(operand);
  problem.reduction = request.reduction;
  problem.out = result;
  problem.out_dtype = request.output;
  problem.workspace = static_cast<float*>(workspace);
  return problem;
}

}  // namespace

Launcher& launcher() {
  Launcher* const other = in_use.load(std::memory_order_acquire);
  return other == nullptr ? kernels() : *other;
}

void use_launcher(Launcher* other) { in_use.store(other, std::memory_order_release); }

std::vector<specialize::Specialization*> find_epilogues(LinearPlan const& plan, int device, Program const& program,
                                                        Operands const& operands) {
  LinearRequest const& request = plan.request;
  std::vector<specialize::Specialization*> found;
  for (Launch const& launch : plan.launches) {
    if (auto const* const product = std::get_if<FusedProduct>(&launch)) {
      if (!request.specialized_cost) return {};
      found.push_back(specialize::find_epilogue(plan, *product, device, program, operands));
    } else if (std::holds_alternative<PointwisePass>(launch)) {
      PointwiseProblem const problem = pointwise_of(request, nullptr, nullptr, program, operands);
      found.push_back(specialize::find_specialization(problem, device));
    } else if (std::holds_alternative<ReductionPass>(launch)) {
      ReduceProblem const problem = reduce_of(request, nullptr, nullptr, nullptr, program, operands);
      found.push_back(specialize::find_specialization(problem, device));
    } else {
      continue;
    }
    if (found.back() == nullptr) return {};
  }
  return found;
}

void launch_fused(LinearPlan const& plan, LinearBuffers const& buffers, Program const& program,
                  Operands const& operands, SpecializedEpilogues const& epilogues, Stream stream) {
  FusedLaunches launches(plan, buffers, program, operands, epilogues, stream);
  for (Launch const& launch : plan.launches) std::visit(launches, launch);
}

void launch_after_product(LinearPlan const& plan, void const* z, void* result, void* workspace, Program const& program,
                          Operands const& operands, SpecializedEpilogues const& epilogues, Stream stream) {
  for (Launch const& launch : plan.launches) {
    if (std::holds_alternative<PointwisePass>(launch)) {
      PointwiseProblem problem = pointwise_of(plan.request, z, result, program, operands);
      problem.specialized = specialize::loaded(epilogues.empty() ? nullptr : epilogues[0], program);
      launcher().pointwise(problem, stream);
    } else if (std::holds_alternative<ReductionPass>(launch)) {
      ReduceProblem problem = reduce_of(plan.request, z, result, workspace, program, operands);
      problem.specialized = specialize::loaded(epilogues.empty() ? nullptr : epilogues[0], program);
      launcher().reduce(problem, stream);
    }
  }
}

}  // namespace cutfuse
