// Sorting and selecting along one lane of n values with a stride. NaN counts as the largest value, as in PyTorch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <type_traits>
#include <vector>

#include "base/dispatch.h"

namespace untorch::kernels {

template <class T>
inline bool is_nan(T value) {
  if constexpr (std::is_integral_v<T>) {
    return false;
  } else {
    return std::isnan(static_cast<compute_t<T>>(value));
  }
}

// a before b in ascending order; NaNs are equal to each other and after everything else.
template <class T>
inline bool less_nan_last(T a, T b) {
  return (!is_nan(a) && is_nan(b)) || static_cast<compute_t<T>>(a) < static_cast<compute_t<T>>(b);
}

template <class T>
struct Keyed {
  T value;
  std::int64_t index;
};

template <class T>
void load_lane(std::vector<Keyed<T>>& keyed, const T* lane, std::int64_t stride, std::int64_t n) {
  keyed.resize(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) keyed[static_cast<std::size_t>(i)] = {lane[i * stride], i};
}

// Equal values keep their order in both directions.
template <class T>
void sort_lane(std::vector<Keyed<T>>& keyed, bool descending) {
  if (descending) {
    std::stable_sort(keyed.begin(), keyed.end(),
                     [](const Keyed<T>& a, const Keyed<T>& b) { return less_nan_last(b.value, a.value); });
  } else {
    std::stable_sort(keyed.begin(), keyed.end(),
                     [](const Keyed<T>& a, const Keyed<T>& b) { return less_nan_last(a.value, b.value); });
  }
}

// Puts the k largest (or smallest) first, in order; ties by position, so the result is the same everywhere.
template <class T>
void select_top(std::vector<Keyed<T>>& keyed, std::int64_t k, bool largest) {
  const auto middle = keyed.begin() + k;
  const auto before = [largest](const Keyed<T>& a, const Keyed<T>& b) {
    const bool first = largest ? less_nan_last(b.value, a.value) : less_nan_last(a.value, b.value);
    const bool second = largest ? less_nan_last(a.value, b.value) : less_nan_last(b.value, a.value);
    return first || (!second && a.index < b.index);
  };
  // A heap of k wins while k is small against n; otherwise split first, then sort the part that is kept.
  if (k * 64 <= static_cast<std::int64_t>(keyed.size())) {
    std::partial_sort(keyed.begin(), middle, keyed.end(), before);
  } else {
    if (middle != keyed.end()) std::nth_element(keyed.begin(), middle, keyed.end(), before);
    std::sort(keyed.begin(), middle, before);
  }
}

// The element of rank k (from 0) in ascending order; ties by position.
template <class T>
Keyed<T> select_rank(std::vector<Keyed<T>>& keyed, std::int64_t k) {
  const auto middle = keyed.begin() + k;
  std::nth_element(keyed.begin(), middle, keyed.end(), [](const Keyed<T>& a, const Keyed<T>& b) {
    if (less_nan_last(a.value, b.value)) return true;
    return !less_nan_last(b.value, a.value) && a.index < b.index;
  });
  return *middle;
}

// The lower median; a NaN anywhere makes it that NaN, unless NaNs are skipped (a lane of NaNs only gives NaN).
template <class T>
Keyed<T> median_of(std::vector<Keyed<T>>& keyed, bool skip_nan) {
  const auto n = static_cast<std::int64_t>(keyed.size());
  std::int64_t nans = 0;
  for (const Keyed<T>& item : keyed) {
    if (!is_nan(item.value)) continue;
    if (!skip_nan) return item;
    ++nans;
  }
  // All NaN: the first one.
  return nans == n ? keyed.front() : select_rank(keyed, (n - nans - 1) / 2);
}

// The most frequent value, the smallest of several, and the last position where it stands.
template <class T>
Keyed<T> mode_of(std::vector<Keyed<T>>& keyed) {
  sort_lane(keyed, false);
  Keyed<T> best = keyed.front();
  std::int64_t best_count = 0, count = 0;
  for (std::size_t i = 0; i < keyed.size(); ++i) {
    ++count;
    const bool ends = i + 1 == keyed.size() || less_nan_last(keyed[i].value, keyed[i + 1].value);
    if (!ends) continue;
    if (count > best_count) {
      best = keyed[i];
      best_count = count;
    }
    count = 0;
  }
  return best;
}

}  // namespace untorch::kernels
