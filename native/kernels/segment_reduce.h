// Reductions of the segments that an axis is cut into.
#pragma once

#include <vector>

#include "kernels/launcher.h"
#include "kernels/reduce_op.h"

namespace untorch::kernels {

// data: [outer, extent, inner], out: [outer, segments, inner], dense and of a floating dtype. Segment s of row o runs
// from cuts[o][s] to cuts[o][s + 1] (`offsets`); or from the end of the one before it, and cuts[o][s] is its length
// (CPU) or its end (CUDA).
struct SegmentParams {
  const void* data = nullptr;
  void* out = nullptr;
  DType dtype = DType::kFloat32;
  const std::int64_t* cuts = nullptr;
  bool offsets = false;
  std::int64_t outer = 1, extent = 0, segments = 0, inner = 1;
  ReduceOp reduce = ReduceOp::kSum;
  bool has_initial = false;
  double initial = 0;
};

namespace cpu {
// Where the segments start, and the last one's end: `segments` + 1 a row. Throws when a segment is not within the axis,
// ends before it starts, or lengths leave part of the axis out.
std::vector<std::int64_t> segment_starts(const SegmentParams& params);
void segment_reduce(const SegmentParams& params, const std::vector<std::int64_t>& starts);
}  // namespace cpu

namespace cuda {
int segment_reduce(const SegmentParams& params, Stream stream);
// *wrong = 1 when a segment is not within the axis, ends before it starts, or the ends leave part of the axis out.
int check_segments(const SegmentParams& params, std::int64_t* wrong, Stream stream);
}  // namespace cuda

}  // namespace untorch::kernels
