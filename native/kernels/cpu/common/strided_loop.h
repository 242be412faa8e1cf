// A loop nest over N operands of one shape with any strides (0 for a broadcast dimension), run in parallel when big.
#pragma once

#include <omp.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <vector>

#include "base/strided.h"

namespace untorch::kernels {

// Below this many elements a parallel region costs more than it gives.
inline constexpr std::int64_t kParallelElements = 32768;

template <std::size_t N>
class StridedLoop {
 public:
  using Offsets = std::array<std::int64_t, N>;

  // Strides in elements of each operand, aligned with `sizes`.
  StridedLoop(std::span<const std::int64_t> sizes, const std::array<std::span<const std::int64_t>, N>& strides,
              bool keep_order = false) {
    for (std::size_t d = 0; d < sizes.size(); ++d) {
      total_ *= sizes[d];
      if (sizes[d] == 1) continue;
      Dim dim{sizes[d], {}};
      for (std::size_t k = 0; k < N; ++k) dim.strides[k] = strides[k][d];
      dims_.push_back(dim);
    }
    if (!keep_order) {
      // The first operand is usually the output: walk it in memory order.
      std::stable_sort(dims_.begin(), dims_.end(),
                       [](const Dim& a, const Dim& b) { return a.strides[0] > b.strides[0]; });
    }
    merge();
    if (dims_.empty()) dims_.push_back({1, {}});
  }
  explicit StridedLoop(const Strided<static_cast<int>(N)>& space) : total_(space.numel) {
    for (int d = space.ndim; d-- > 0;) {
      Dim dim{space.sizes[d], {}};
      for (std::size_t k = 0; k < N; ++k) dim.strides[k] = space.strides[k][d];
      dims_.push_back(dim);
    }
  }

  std::int64_t total() const noexcept { return total_; }
  // Strides of the innermost dimension, the one a row runs along.
  const Offsets& inner() const noexcept { return dims_.back().strides; }

  // row(offsets, n): n elements from these offsets on, `inner()` apart. `cost` scales the work. The first exception of
  // a row is rethrown after the parallel region.
  template <class Row>
  void run(Row&& row, std::int64_t cost = 1) const {
    if (total_ == 0) return;
    if (total_ * cost < kParallelElements || omp_in_parallel() != 0) {
      range(0, total_, row);
      return;
    }
    std::exception_ptr failure;
#pragma omp parallel
    {
      const std::int64_t threads = omp_get_num_threads(), id = omp_get_thread_num();
      const std::int64_t chunk = (total_ + threads - 1) / threads;
      const std::int64_t begin = std::min(total_, id * chunk), end = std::min(total_, begin + chunk);
      try {
        if (begin < end) range(begin, end, row);
      } catch (...) {
#pragma omp critical(untorch_loop_failure)
        if (!failure) failure = std::current_exception();
      }
    }
    if (failure) std::rethrow_exception(failure);
  }
  // The same in one thread and in order.
  template <class Row>
  void run_serial(Row&& row) const {
    if (total_ != 0) range(0, total_, row);
  }

 private:
  struct Dim {
    std::int64_t size;
    Offsets strides;
  };

  void merge() {
    std::vector<Dim> merged;
    for (const Dim& dim : dims_) {
      bool fits = !merged.empty();
      for (std::size_t k = 0; fits && k < N; ++k) fits = merged.back().strides[k] == dim.strides[k] * dim.size;
      if (fits) {
        merged.back().size *= dim.size;
        merged.back().strides = dim.strides;
      } else {
        merged.push_back(dim);
      }
    }
    dims_ = std::move(merged);
  }

  template <class Row>
  void range(std::int64_t begin, std::int64_t end, Row& row) const {
    const std::size_t depth = dims_.size();
    std::vector<std::int64_t> index(depth, 0);
    Offsets offsets{};
    std::int64_t rest = begin;
    for (std::size_t d = depth; d-- > 0;) {
      index[d] = rest % dims_[d].size;
      rest /= dims_[d].size;
      for (std::size_t k = 0; k < N; ++k) offsets[k] += index[d] * dims_[d].strides[k];
    }
    const Dim& last = dims_[depth - 1];
    while (begin < end) {
      const std::int64_t n = std::min(end - begin, last.size - index[depth - 1]);
      row(static_cast<const Offsets&>(offsets), n);
      begin += n;
      if (begin >= end) return;
      // Back to the start of this row, then on to the next.
      for (std::size_t k = 0; k < N; ++k) offsets[k] -= index[depth - 1] * last.strides[k];
      index[depth - 1] = 0;
      for (std::size_t d = depth - 1; d-- > 0;) {
        for (std::size_t k = 0; k < N; ++k) offsets[k] += dims_[d].strides[k];
        if (++index[d] < dims_[d].size) break;
        for (std::size_t k = 0; k < N; ++k) offsets[k] -= dims_[d].strides[k] * dims_[d].size;
        index[d] = 0;
      }
    }
  }

  std::int64_t total_ = 1;
  std::vector<Dim> dims_;
};

}  // namespace untorch::kernels
