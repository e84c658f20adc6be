#include "plan/plane_products.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "common/division.h"
#include "plan/predictions.h"
#include "split/split_plan.h"

namespace cutfuse {

namespace {

// What launching the product that does not run takes, in microseconds.
constexpr double kGuardMicroseconds = 5.0;

bool is_transposed(MatrixLayout const& matrix) { return matrix.columns > 1 && matrix.column_stride != 1; }

int64_t whole_blocks(int64_t columns) { return round_up(columns, kSplitBlock); }

// Elements from row to row; 0 where the copy engine does not take the weight as it lies in memory.
int64_t pitch_for_copies(MatrixLayout const& weight) {
  if (!weight.aligned || is_transposed(weight)) return 0;
  if (weight.rows == 1) return whole_blocks(weight.columns);
  int64_t const bytes = weight.row_stride * static_cast<int64_t>(sizeof(float));
  return weight.row_stride >= weight.columns && bytes % kOperandAlignment == 0 ? weight.row_stride : 0;
}

PlanesShape x_planes(LinearRequest const& request, SplitScheme scheme) {
  return planes_shape(request.x.rows, request.x.columns, scheme, is_transposed(request.x), false);
}

PlanesShape weight_planes(LinearRequest const& request, SplitScheme scheme) {
  return planes_shape(request.weight.rows, request.weight.columns, scheme, is_transposed(request.weight), true);
}

Product product_for(SplitScheme scheme, WeightSource source) {
  if (source == WeightSource::kOnTheWay) {
    return scheme == SplitScheme::kSplit3 ? Product::kConvert3 : Product::kConvert6;
  }
  return scheme == SplitScheme::kSplit3 ? Product::kSplit3 : Product::kSplit6;
}

GemmCandidate best_candidate(GemmProblem const& problem) {
  std::vector<GemmCandidate> const all = rank_gemm_configs(problem);
  auto const found =
      std::find_if(all.begin(), all.end(), [](GemmCandidate const& candidate) { return candidate.computes; });
  if (found == all.end()) throw std::logic_error("no kernel of the table multiplies planes: " + describe(problem));
  return *found;
}

PlaneProduct plan_product(LinearRequest const& request, SplitScheme scheme, WeightSource source) {
  MatrixLayout const& weight = request.weight;
  int64_t const pitch = whole_blocks(request.x.columns);
  bool const as_it_lies = source == WeightSource::kOnTheWay;
  PlaneProduct product = {};
  product.scheme = scheme;
  product.source = source;
  product.problem = {request.x.rows,
                     weight.rows,
                     pitch,
                     pitch,
                     as_it_lies ? pitch_for_copies(weight) : pitch,
                     DType::kFloat32,
                     DType::kFloat32,
                     request.reduction,
                     request.device.multiprocessors,
                     request.fused_cost(),
                     product_for(scheme, source),
                     request.specialized_cost.has_value(),
                     request.stores_pre_activation};
  product.problem.batch_invariant = request.batch_invariant;
  product.problem.times = request.device.times;
  product.kernel = best_candidate(product.problem);
  product.microseconds = predict_split_microseconds(request.x.rows, request.x.columns) + product.kernel.microseconds;
  if (source == WeightSource::kPass) {
    product.microseconds += predict_split_microseconds(weight.rows, weight.columns);
  }
  return product;
}

// Of all launches, of which the device runs some.
double host_microseconds(LinearRequest const& request, PlaneProducts const& products) {
  HostTimes const host_time = host_times(request);
  int further = reduces(request) ? 0 : -1;
  for (PlaneProduct const& product : products) further += product.source == WeightSource::kPass ? 3 : 2;
  return host_time.fused + further * host_time.further;
}

// How many output tiles need memory for the sums of K's slices and for the count of slices that have arrived; 0 where K
// is not sliced.
int64_t sliced_tiles(PlaneProduct const& product) {
  GemmConfig const& config = product.config();
  int64_t const all = ceil_divide(product.problem.m, config.tile_m) * ceil_divide(product.problem.n, config.tile_n);
  return product.kernel.slices > 1 ? all : 0;
}

// Pieces that a product leaves to the one that runs in its place, and to the guard between them.
struct LastingPieces {
  Piece x_flags;
  Piece weight_flags;
  Piece arrivals;
};

class PlaneLaunches {
 public:
  PlaneLaunches(LinearRequest const& request, PlaneProducts const& products) : request_(request), products_(products) {}

  void add_to(LinearPlan& plan) {
    for (PlaneProduct const& product : products_) lasting_.push_back(lay_lasting(product));
    partials_ = workspace_.add(partial_bytes(request_, products_.front().config()));
    int64_t const lasting_end = workspace_.end();
    for (size_t index = 0; index < products_.size(); ++index) {
      workspace_.go_back(lasting_end);  // at most one of the products runs
      add_product(index);
    }
    if (reduces(request_)) launches_.emplace_back(fold(request_, products_.front().config(), partials_));
    plan.launches = std::move(launches_);
    plan.workspace_bytes = workspace_.bytes();
    plan.reads_weight_planes = products_.front().source == WeightSource::kExisting;
    plan.copies_bias = request_.bias && (request_.bias->stride != 1 || !request_.bias->aligned);
  }

 private:
  LastingPieces lay_lasting(PlaneProduct const& product) {
    constexpr int64_t kWord = sizeof(int32_t);
    LastingPieces pieces = {};
    pieces.x_flags = workspace_.add(x_planes(request_, product.scheme).flag_bytes);
    switch (product.source) {
      case WeightSource::kPass:
        pieces.weight_flags = workspace_.add(weight_planes(request_, product.scheme).flag_bytes);
        break;
      case WeightSource::kOnTheWay:  // a word for each block of the product's grid
        pieces.weight_flags = workspace_.add(request_.device.multiprocessors * kWord);
        break;
      case WeightSource::kExisting:
        pieces.weight_flags = lay_weight_planes(weight_planes(request_, product.scheme)).pieces.flags;
        break;
    }
    pieces.arrivals = workspace_.add(sliced_tiles(product) * kWord);
    return pieces;
  }

  SplitPass split(bool is_weight, PlaneProduct const& product, Piece const& flags) {
    PlanesShape const shape = is_weight ? weight_planes(request_, product.scheme) : x_planes(request_, product.scheme);
    SplitPass pass = {};
    pass.is_weight = is_weight;
    pass.scheme = product.scheme;
    pass.planes.values = workspace_.add(shape.value_bytes);
    pass.planes.scales = workspace_.add(shape.scale_bytes);
    pass.planes.flags = flags;
    return pass;
  }

  // The guard is what the first product's operands were found to be: what it reads is known before it runs; what it
  // finds of a weight that it splits on the way, after.
  void add_product(size_t index) {
    PlaneProduct const& product = products_[index];
    LastingPieces const& lasting = lasting_[index];
    bool const is_first = index == 0;
    std::vector<Piece> const tripped = {lasting_.front().x_flags, lasting_.front().weight_flags};

    FusedProduct fused = {};
    fused.problem = product.problem;
    fused.kernel = product.kernel;
    fused.arrivals = lasting.arrivals;
    fused.partials = partials_;
    fused.when = is_first ? (products_.size() > 1 ? SplitRun::kIfClear : SplitRun::kAlways) : SplitRun::kIfTripped;
    fused.guard = tripped;
    if (is_first && product.source == WeightSource::kOnTheWay) fused.guard.pop_back();

    SplitPass x = split(false, product, lasting.x_flags);
    x.cleared = lasting.arrivals;
    fused.x = x.planes;
    add_pass(std::move(x), is_first, tripped);
    if (product.source == WeightSource::kPass) {
      SplitPass weight = split(true, product, lasting.weight_flags);
      fused.weight = weight.planes;
      add_pass(std::move(weight), is_first, tripped);
    } else if (product.source == WeightSource::kExisting) {
      fused.weight = lay_weight_planes(weight_planes(request_, product.scheme)).pieces;
    } else {
      fused.weight_flags = lasting.weight_flags;
    }
    fused.sums = workspace_.add(sum_bytes(product));
    launches_.emplace_back(std::move(fused));
  }

  void add_pass(SplitPass pass, bool is_first, std::vector<Piece> const& tripped) {
    pass.when = is_first ? SplitRun::kAlways : SplitRun::kIfTripped;
    if (!is_first) pass.guard = tripped;
    launches_.emplace_back(std::move(pass));
  }

  // Of the slices of K.
  static int64_t sum_bytes(PlaneProduct const& product) {
    int64_t const elements = static_cast<int64_t>(product.config().tile_m) * product.config().tile_n;
    return sliced_tiles(product) * product.kernel.slices * elements * static_cast<int64_t>(sizeof(float));
  }

  LinearRequest const& request_;
  PlaneProducts const& products_;
  MemoryLayout workspace_{Memory::kWorkspace};
  std::vector<LastingPieces> lasting_;
  Piece partials_ = {};
  std::vector<Launch> launches_;
};

}  // namespace

std::vector<PlaneProducts> plane_ways(LinearRequest const& request) {
  bool const guarded = request.precision == Precision::kGuarded;
  SplitScheme const scheme = first_scheme(request.precision);
  bool const can_copy = pitch_for_copies(request.weight) > 0;
  std::vector<WeightSource> sources = {request.weight_has_planes ? WeightSource::kExisting : WeightSource::kPass};
  if (can_copy) sources.push_back(WeightSource::kOnTheWay);
  std::vector<PlaneProducts> ways;
  for (WeightSource const source : sources) {
    PlaneProducts products = {plan_product(request, scheme, source)};
    // What seldom runs is not worth the memory of the weight's planes on every call.
    WeightSource const other = can_copy ? WeightSource::kOnTheWay : WeightSource::kPass;
    if (guarded) products.push_back(plan_product(request, SplitScheme::kSplit6, other));
    ways.push_back(std::move(products));
  }
  return ways;
}

Alternative describe(LinearRequest const& request, PlaneProducts const& products) {
  PlaneProduct const& first = products.front();
  double const guard = products.size() > 1 ? kGuardMicroseconds : 0.0;
  Alternative found = {first.config().name, first.microseconds + guard, 0.0, first.kernel.slices, {}};
  double const host = host_microseconds(request, products);
  found.compared = compared(found.microseconds / kPlaneAdvantage, host, request);
  for (PlaneProduct const& product : products) {
    if (product.kernel.rejection.empty()) continue;
    found.rejection = product.kernel.rejection;
    found.microseconds = 0.0;
    break;
  }
  return found;
}

void add_plane_launches(LinearPlan& plan, LinearRequest const& request, PlaneProducts const& products) {
  PlaneLaunches(request, products).add_to(plan);
}

}  // namespace cutfuse
