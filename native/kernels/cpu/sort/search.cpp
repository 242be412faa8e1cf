// Binary search: a value a task, log2(n) dependent reads.
#include <cstdint>

#include "base/dispatch.h"
#include "kernels/search.h"

namespace untorch::kernels::cpu {
namespace {

// The first position whose value is ≥ (or, with right, >) `value`. A NaN goes to the end.
template <class T>
std::int64_t bound(const T* sorted, const std::int64_t* order, std::int64_t n, T value, bool right) {
  using Wide = compute_t<T>;
  std::int64_t low = 0, high = n;
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    const Wide there = static_cast<Wide>(sorted[order == nullptr ? middle : order[middle]]),
               wanted = static_cast<Wide>(value);
    const bool stop = right ? there > wanted : there >= wanted;
    if (stop) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

}  // namespace

std::optional<std::int64_t> outside(std::span<const std::int64_t> sorter, std::int64_t n) {
  for (const std::int64_t at : sorter) {
    if (at < 0 || at >= n) return at;
  }
  return std::nullopt;
}

void search(const SearchParams& params) {
  dispatch_real("searchsorted", params.dtype, [&]<class T>() {
    const T* base = static_cast<const T*>(params.sorted);
    const T* from = static_cast<const T*>(params.values);
#pragma omp parallel for if (params.total > 4096)
    for (std::int64_t i = 0; i < params.total; ++i) {
      const std::int64_t start = i / params.per_row * params.n;
      const std::int64_t at = bound(base + start, params.sorter == nullptr ? nullptr : params.sorter + start, params.n,
                                    from[i], params.right);
      if (params.out_int32) {
        static_cast<std::int32_t*>(params.out)[i] = static_cast<std::int32_t>(at);
      } else {
        static_cast<std::int64_t*>(params.out)[i] = at;
      }
    }
  });
}

}  // namespace untorch::kernels::cpu
