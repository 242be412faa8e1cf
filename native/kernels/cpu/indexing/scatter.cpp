// Scattering along one dimension, with and without a reduction: a row of the index a task, in order. Bytes: index and
// source read once, one element of the result (read and) written for each.
#include "kernels/scatter.h"

#include <algorithm>
#include <array>
#include <vector>

#include "kernels/cpu/common/map.h"
#include "kernels/cpu/common/reduce_op.h"

namespace untorch::kernels::cpu {
namespace {

// Divides what a mean added up, in place: how often a place was met is counted row by row.
template <class T>
void divide_means(const ScatterParams& params, std::int64_t extent, bool include_self) {
  const Lanes<3>& lanes = params.lanes;
  std::vector<std::int64_t> counts(static_cast<std::size_t>(extent), 0);
  const StridedLoop<3> loop(lanes.rows);
  const auto step = loop.inner();
  loop.run_serial([&](const std::array<std::int64_t, 3>& start, std::int64_t rows) {
    for (std::int64_t r = 0; r < rows; ++r) {
      T* to = static_cast<T*>(params.out) + start[0] + r * step[0];
      const std::int64_t* where = params.index + start[2] + r * step[2];
      for (std::int64_t i = 0; i < lanes.n; ++i) ++counts[static_cast<std::size_t>(where[i * lanes.step[2]])];
      for (std::int64_t i = 0; i < lanes.n; ++i) {
        const std::int64_t place = where[i * lanes.step[2]];
        std::int64_t& count = counts[static_cast<std::size_t>(place)];
        if (count == 0) continue;  // divided already
        T& target = to[place * lanes.step[0]];
        target = divide_by_count(target, count + (include_self ? 1 : 0));
        count = 0;
      }
    }
  });
}

}  // namespace

IndexRange index_range(std::span<const std::int64_t> indices) {
  IndexRange out;
  for (const std::int64_t index : indices) {
    out.low = std::min(out.low, index);
    out.high = std::max(out.high, index);
  }
  return out;
}

void scatter(const ScatterParams& params) {
  const Lanes<3>& lanes = params.lanes;
  dispatch_width("scatter", params.dtype, [&]<class T>() {
    T* out = static_cast<T*>(params.out);
    const T* source = static_cast<const T*>(params.source);
    for_each_lane(lanes, lanes.n, [&](const std::array<std::int64_t, 3>& at) {
      const std::int64_t so = lanes.step[0], ss = lanes.step[1], si = lanes.step[2];
      for (std::int64_t i = 0; i < lanes.n; ++i) {
        out[at[0] + params.index[at[2] + i * si] * so] = source[at[1] + i * ss];
      }
    });
  });
}

void scatter_reduce(const ScatterParams& params, std::int64_t extent, ReduceOp op, bool include_self) {
  const Lanes<3>& lanes = params.lanes;
  dispatch_real("scatter_reduce", params.dtype, [&]<class T>() {
    const T* source = static_cast<const T*>(params.source);
    for_each_lane(lanes, lanes.n * 2, [&](const std::array<std::int64_t, 3>& at) {
      const std::int64_t n = lanes.n, so = lanes.step[0], ss = lanes.step[1], si = lanes.step[2];
      T* to = static_cast<T*>(params.out) + at[0];
      const std::int64_t* where = params.index + at[2];
      if (!include_self) {
        for (std::int64_t i = 0; i < n; ++i) to[where[i * si] * so] = reduce_identity<T>(op);
      }
      for (std::int64_t i = 0; i < n; ++i) {
        T& target = to[where[i * si] * so];
        target = combine(op, target, source[at[1] + i * ss]);
      }
    });
    if (op == ReduceOp::kMean) divide_means<T>(params, extent, include_self);
  });
}

}  // namespace untorch::kernels::cpu
