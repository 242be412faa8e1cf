// Sorting, selection by rank and the mode: a row a task. A row's elements are copied beside their positions first
// (16 bytes each for 8-byte dtypes), then go through the standard library's stable sort, partial sort or nth_element.
#include "kernels/sort.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/cpu/common/map.h"
#include "kernels/cpu/common/order.h"

namespace untorch::kernels::cpu {
namespace {

template <class T>
struct Keyed {
  T value;
  std::int64_t index;
};

template <class T>
void load_row(std::vector<Keyed<T>>& keyed, const T* row, std::int64_t stride, std::int64_t n) {
  keyed.resize(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) keyed[static_cast<std::size_t>(i)] = {row[i * stride], i};
}

// Equal values keep their order in both directions.
template <class T>
void sort_row(std::vector<Keyed<T>>& keyed, bool descending) {
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

// The lower median; a NaN anywhere makes it that NaN, unless NaNs are skipped (a row of NaNs only gives NaN).
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
  sort_row(keyed, false);
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

// Roughly n·log2(n), for deciding whether to go parallel.
std::int64_t sort_cost(std::int64_t n) {
  std::int64_t log = 1;
  while ((std::int64_t{1} << log) < n) ++log;
  return n * log;
}

// body(keyed, values, indices) for every row: its elements with their positions, and where its results go.
template <class Body>
void for_each_row(const char* op, const SortParams& params, Body&& body) {
  const Lanes<3>& lanes = params.lanes;
  const bool single = lanes.rows.numel == 1;  // nothing to share between threads
  dispatch_real(op, params.dtype, [&]<class T>() {
    const T* input = static_cast<const T*>(params.input);
    T* values = static_cast<T*>(params.values);
    for_each_lane(lanes, single ? 1 : sort_cost(lanes.n), [&](const std::array<std::int64_t, 3>& at) {
      static thread_local std::vector<Keyed<T>> kept;
      std::vector<Keyed<T>> own;  // a single row may be all of a large tensor: its memory is not kept
      std::vector<Keyed<T>>& keyed = single ? own : kept;
      load_row(keyed, input + at[2], lanes.step[2], lanes.n);
      body(keyed, values + at[0], params.indices == nullptr ? nullptr : params.indices + at[1]);
    });
  });
}

template <class T>
void store(const SortParams& params, const std::vector<Keyed<T>>& keyed, std::int64_t count, T* values,
           std::int64_t* indices) {
  const std::int64_t value_step = params.lanes.step[0], index_step = params.lanes.step[1];
  for (std::int64_t i = 0; i < count; ++i) {
    values[i * value_step] = keyed[static_cast<std::size_t>(i)].value;
    indices[i * index_step] = keyed[static_cast<std::size_t>(i)].index;
  }
}

template <class T>
void store_one(const Keyed<T>& chosen, T* value, std::int64_t* index) {
  *value = chosen.value;
  if (index != nullptr) *index = chosen.index;
}

}  // namespace

void sort(const SortParams& params) {
  for_each_row("sort", params, [&]<class T>(std::vector<Keyed<T>>& keyed, T* values, std::int64_t* indices) {
    sort_row(keyed, params.descending);
    store(params, keyed, params.lanes.n, values, indices);
  });
}

// A loop for each kind: the comparisons are inlined into it.
void select(const SelectParams& params) {
  const auto one = [&](auto&& pick) {
    for_each_row("select", params.sort, [&]<class T>(std::vector<Keyed<T>>& keyed, T* values, std::int64_t* indices) {
      store_one(pick(keyed), values, indices);
    });
  };
  switch (params.what) {
    case Select::kFirst:
      return for_each_row("select", params.sort,
                          [&]<class T>(std::vector<Keyed<T>>& keyed, T* values, std::int64_t* indices) {
                            select_top(keyed, params.rank, params.sort.descending);
                            store(params.sort, keyed, params.rank, values, indices);
                          });
    case Select::kRank:
      return one([&](auto& keyed) { return select_rank(keyed, params.rank); });
    case Select::kMedian:
      return one([](auto& keyed) { return median_of(keyed, false); });
    case Select::kNanMedian:
      return one([](auto& keyed) { return median_of(keyed, true); });
  }
}

void mode(const SortParams& params) {
  for_each_row("mode", params, []<class T>(std::vector<Keyed<T>>& keyed, T* values, std::int64_t* indices) {
    store_one(mode_of(keyed), values, indices);
  });
}

}  // namespace untorch::kernels::cpu
