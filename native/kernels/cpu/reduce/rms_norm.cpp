// RMSNorm, a row at a time: one pass for the sum of squares in eight accumulators, one for the result. Bytes: x is read
// twice, the second time from the cache, and out written once.
#include "kernels/rms_norm.h"

#include <cmath>

#include "base/dispatch.h"
#include "kernels/cpu/common/parallel_items.h"

namespace untorch::kernels::cpu {

void rms_norm(const RmsNorm& p) {
  dispatch_floating("rms_norm", p.dtype, [&]<class T>() {
    using C = compute_t<T>;
    const auto* const x = static_cast<const T*>(p.x);
    const auto* const weight = static_cast<const C*>(p.weight);
    auto* const out = static_cast<T*>(p.out);
    auto* const reciprocal = static_cast<C*>(p.reciprocal);
    const std::int64_t width = p.width;
    const double work = static_cast<double>(p.rows) * static_cast<double>(width);
    for_each_item_grained(p.rows, 16, work > kParallelWork, [&](std::int64_t row) {
      const T* from = x + row * width;
      T* to = out + row * width;
      // Eight sums, so that the additions overlap and vectorise; their order does not depend on the threads.
      C sums[8] = {};
      std::int64_t i = 0;
      for (; i + 8 <= width; i += 8) {
        for (std::int64_t k = 0; k < 8; ++k) sums[k] += static_cast<C>(from[i + k]) * static_cast<C>(from[i + k]);
      }
      for (; i < width; ++i) sums[0] += static_cast<C>(from[i]) * static_cast<C>(from[i]);
      const C sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
      const C scale = C(1) / std::sqrt(sum / static_cast<C>(width) + static_cast<C>(p.eps));
      reciprocal[row] = scale;
      for (i = 0; i < width; ++i) {
        const C value = static_cast<C>(from[i]) * scale;
        to[i] = T(weight == nullptr ? value : value * static_cast<C>(weight[i]));
      }
    });
  });
}

}  // namespace untorch::kernels::cpu
