// embedding_bag: a bag a task, its sums in float for the half types. Bytes: every row that a bag names read once, the
// result written once.
#include "kernels/embedding_bag.h"

#include <algorithm>
#include <vector>

#include "base/dispatch.h"
#include "kernels/cpu/common/parallel_items.h"

namespace untorch::kernels::cpu {
namespace {

constexpr const char* kOp = "_embedding_bag";

// Where the bags start, and the last one's end. Checked, as are the indices.
std::vector<std::int64_t> bag_starts(const EmbeddingBag& params, bool last_offset) {
  const auto* const offsets = static_cast<const std::int64_t*>(params.offsets);
  const auto* const indices = static_cast<const std::int64_t*>(params.indices);
  const std::int64_t total = params.index_count;
  std::vector<std::int64_t> start(offsets, offsets + params.bags + (last_offset ? 1 : 0));
  if (!last_offset) start.push_back(total);
  if (params.bags > 0) check(start[0] == 0, kOp, ": argument 'offsets' must begin with 0, got ", start[0]);
  // What follows the given last offset belongs to the last bag, as in PyTorch.
  start.back() = std::max(start.back(), total);
  for (std::size_t i = 0; i + 1 < start.size(); ++i) {
    check(start[i] <= start[i + 1] && start[i] >= 0, kOp, ": argument 'offsets' must not decrease, got ", start[i],
          " before ", start[i + 1]);
  }
  check(start.back() <= total, kOp, ": argument 'offsets' ends at ", start.back(), ", beyond ", total, " indices");
  for (std::int64_t i = 0; i < total; ++i) {
    check(indices[i] >= 0 && indices[i] < params.rows, kOp, ": index ", indices[i], " is outside of the table's ",
          params.rows, " rows");
  }
  return start;
}

template <class T>
void reduce_bag(const EmbeddingBag& params, BagMode mode, std::int64_t bag, std::int64_t begin, std::int64_t end) {
  using C = compute_t<T>;
  const std::int64_t width = params.width;
  const T* const table = static_cast<const T*>(params.table);
  const T* const scales = static_cast<const T*>(params.scales);
  const auto* const indices = static_cast<const std::int64_t*>(params.indices);
  T* const out = static_cast<T*>(params.out);
  thread_local std::vector<C> sums;
  sums.assign(static_cast<std::size_t>(width), C(0));
  C* const to = sums.data();
  std::int64_t rows = 0;
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t index = indices[i];
    if (index == params.padding) continue;
    const T* const row = table + index * params.row_stride;
    const C scale = scales == nullptr ? C(1) : static_cast<C>(scales[i * params.scale_stride]);
    if (mode == BagMode::kMax) {
      std::int64_t* const winner = static_cast<std::int64_t*>(params.winners) + bag * width;
      for (std::int64_t j = 0; j < width; ++j) {
        const C value = static_cast<C>(row[j * params.column_stride]);
        if (rows == 0 || value > to[j]) {
          to[j] = value;
          winner[j] = index;
        }
      }
    } else if (params.column_stride == 1) {
      for (std::int64_t j = 0; j < width; ++j) to[j] += scale * static_cast<C>(row[j]);
    } else {
      for (std::int64_t j = 0; j < width; ++j) to[j] += scale * static_cast<C>(row[j * params.column_stride]);
    }
    ++rows;
  }
  static_cast<std::int64_t*>(params.bag_size)[bag] = rows;
  const C divisor = mode == BagMode::kMean && rows > 0 ? static_cast<C>(rows) : C(1);
  for (std::int64_t j = 0; j < width; ++j) out[bag * width + j] = T(to[j] / divisor);
}

}  // namespace

void embedding_bag(const EmbeddingBag& params, BagMode mode, DType dtype, bool last_offset) {
  const std::vector<std::int64_t> start = bag_starts(params, last_offset);
  const double work = static_cast<double>(params.index_count) * static_cast<double>(params.width);
  dispatch_floating(kOp, dtype, [&]<class T>() {
    for_each_item_grained(params.bags, 16, work > kParallelWork, [&](std::int64_t bag) {
      const auto b = static_cast<std::size_t>(bag);
      reduce_bag<T>(params, mode, bag, start[b], start[b + 1]);
    });
  });
  if (params.bag_of_index == nullptr) return;
  for (std::int64_t bag = 0; bag < params.bags; ++bag) {
    auto* const to = static_cast<std::int64_t*>(params.bag_of_index);
    const auto b = static_cast<std::size_t>(bag);
    std::fill(to + start[b], to + start[b + 1], bag);
  }
}

}  // namespace untorch::kernels::cpu
