// The strided kernels' index arithmetic.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "reduce/reduce_plan.h"

namespace cutfuse {

// What one thread reads. Its vector in super-row k begins at element start + k * super_row of the outer slice's span,
// where elements are numbered as if rows lay side by side. Super-rows [full_begin, full_end) hold a whole vector.
struct StridedThread {
  int64_t start;  // negative when the first vector begins before a slice that is not 16-byte aligned
  int64_t super_row;
  int64_t length;
  int64_t full_begin;
  int64_t full_end;
};

// column: which of the super-row's threads. past_boundary: how far the outer slice begins past a 16-byte boundary, in
// elements; 0 unless the slice is one contiguous span.
CUTFUSE_HOST_DEVICE StridedThread strided_thread(ReduceExtents const& extents, ReducePlan const& plan, int64_t column,
                                                 int past_boundary) {
  StridedThread thread = {};
  thread.start = column * plan.vector - past_boundary;
  thread.super_row = plan.rows_per_super_row * extents.inner;
  thread.length = extents.reduced * extents.inner;
  thread.full_begin = thread.start < 0 ? 1 : 0;
  int64_t const room = thread.length - plan.vector - thread.start;
  thread.full_end = room < 0 ? 0 : room / thread.super_row + 1;
  return thread;
}

// Where element j of a thread's vectors goes: which row of its super-row, and which column.
struct StridedElement {
  int row;
  int64_t column;
};

CUTFUSE_HOST_DEVICE StridedElement strided_element(ReduceExtents const& extents, StridedThread const& thread, int j) {
  int64_t const element = thread.start + j;
  int64_t const wrapped = element < 0 ? element + thread.super_row : element;
  int64_t const row = wrapped / extents.inner;
  return {static_cast<int>(row), wrapped - row * extents.inner};
}

}  // namespace cutfuse
