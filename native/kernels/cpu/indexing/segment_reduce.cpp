// Segment reductions: one thread; the data read once and the result written once, a column of a segment at a time.
#include "kernels/segment_reduce.h"

#include <limits>

#include "base/error.h"
#include "kernels/cpu/common/reduce_op.h"

namespace untorch::kernels::cpu {

std::vector<std::int64_t> segment_starts(const SegmentParams& params) {
  constexpr const char* op = "segment_reduce";
  const std::int64_t segments = params.segments, row = segments + (params.offsets ? 1 : 0), extent = params.extent;
  std::vector<std::int64_t> starts;
  starts.reserve(static_cast<std::size_t>(params.outer * (segments + 1)));
  for (std::int64_t o = 0; o < params.outer; ++o) {
    const std::int64_t* const cuts = params.cuts + o * row;
    std::int64_t at = params.offsets ? cuts[0] : 0;
    starts.push_back(at);
    for (std::int64_t s = 0; s < segments; ++s) {
      const std::int64_t next = params.offsets ? cuts[s + 1] : at + cuts[s];
      check(at >= 0 && next >= at && next <= extent, op, ": segment ", s, " runs from ", at, " to ", next,
            ", expected within 0 to ", extent);
      starts.push_back(at = next);
    }
    check(params.offsets || at == extent, op, ": 'lengths' sum to ", at, ", expected ", extent);
  }
  return starts;
}

void segment_reduce(const SegmentParams& params, const std::vector<std::int64_t>& starts) {
  const std::int64_t segments = params.segments, inner = params.inner, extent = params.extent;
  const ReduceOp reduce = params.reduce;
  dispatch_floating("segment_reduce", params.dtype, [&]<class T>() {
    const T* from = static_cast<const T*>(params.data);
    T* to = static_cast<T*>(params.out);
    for (std::int64_t o = 0; o < params.outer; ++o) {
      for (std::int64_t s = 0; s < segments; ++s) {
        const std::int64_t begin = starts[static_cast<std::size_t>(o * (segments + 1) + s)],
                           end = starts[static_cast<std::size_t>(o * (segments + 1) + s + 1)];
        for (std::int64_t i = 0; i < inner; ++i) {
          T value = params.has_initial ? static_cast<T>(static_cast<compute_t<T>>(params.initial))
                                       : reduce_identity<T>(reduce);
          for (std::int64_t j = begin; j < end; ++j) value = combine(reduce, value, from[(o * extent + j) * inner + i]);
          if (reduce == ReduceOp::kMean && end > begin) value = divide_by_count(value, end - begin);
          if (reduce == ReduceOp::kMean && end == begin && !params.has_initial) {
            value = static_cast<T>(std::numeric_limits<compute_t<T>>::quiet_NaN());
          }
          to[(o * segments + s) * inner + i] = value;
        }
      }
    }
  });
}

}  // namespace untorch::kernels::cpu
