// Reductions of the segments that an axis is cut into.
#pragma once

#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

enum class SegmentReduce : int { kSum, kProd, kMean, kAMax, kAMin };

// data: [outer, extent, inner], out: [outer, segments, inner], dense. Segment s of row o runs from cuts[o][s] to
// cuts[o][s + 1] (`offsets`), or from the end of the one before it to ends[o][s].
struct SegmentJob {
  const void* data = nullptr;
  void* out = nullptr;
  DType dtype = DType::kFloat32;
  const std::int64_t* cuts = nullptr;
  bool offsets = false;
  std::int64_t outer = 1, extent = 0, segments = 0, inner = 1;
  SegmentReduce reduce = SegmentReduce::kSum;
  bool has_initial = false;
  double initial = 0;
};

int segment_reduce(const SegmentJob& job, Stream stream);
// *wrong = 1 when a segment is not within the axis, ends before it starts, or the ends leave part of the axis out.
int check_segments(const SegmentJob& job, std::int64_t* wrong, Stream stream);

}  // namespace untorch::kernels::cuda
