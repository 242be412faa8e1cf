// embedding_bag: gather and segmented reduction in one kernel, a thread for each element of the result.
//
//   result [bags, width]: neighbouring threads on neighbouring columns of one bag (coalesced rows of the table); four
//   rows are loaded before they are added up, since a bag is a chain of dependent loads otherwise
//
// Roofline: memory-bound; every row that a bag names read once, the indices once for each column (from L1), the result
// written once. Halves add up in float, in the order of the indices, so that the result has the same bits every time.
#include "kernels/embedding_bag.h"

#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/common/divide.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <class T, class I>
__global__ void __launch_bounds__(kThreads) reduce_bags(EmbeddingBag params, BagMode mode, FaultWord* word) {
  using C = Compute<T>;
  const T* const table = static_cast<const T*>(params.table);
  const T* const scales = static_cast<const T*>(params.scales);
  const I* const indices = static_cast<const I*>(params.indices);
  const I* const starts = static_cast<const I*>(params.offsets);
  // A thread for a bag without columns, so that the other results are there for a table of no columns.
  const std::int64_t columns = params.width > 0 ? params.width : 1;
  const std::int64_t total = params.bags * columns, step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < total; i += step) {
    const std::int64_t bag = divided(i, columns, total), column = i - bag * columns;
    const bool first = column == 0, real = column < params.width;
    // The first bag starts at 0 whatever its offset says, the last one takes what is left; as in PyTorch.
    std::int64_t begin = bag == 0 ? 0 : static_cast<std::int64_t>(starts[bag]);
    std::int64_t end = bag + 1 < params.bags ? static_cast<std::int64_t>(starts[bag + 1]) : params.index_count;
    if (begin < 0 || end > params.index_count || begin > end) {
      if (first) report(word, DeviceFault::kEmbeddingBagOffset, begin < 0 || begin > params.index_count ? begin : end);
      begin = end = 0;
    }
    C sum = 0;
    std::int64_t used = 0, winner = -1;
    for (std::int64_t at = begin; at < end; at += 4) {
      C values[4];
      std::int64_t rows[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        rows[k] = -1;
        values[k] = 0;
        if (at + k >= end) continue;
        const auto row = static_cast<std::int64_t>(indices[at + k]);
        if (first) static_cast<I*>(params.bag_of_index)[at + k] = static_cast<I>(bag);
        if (row < 0 || row >= params.rows) {
          if (first) report(word, DeviceFault::kEmbeddingBagIndex, row);
          continue;
        }
        if (row == params.padding) continue;
        rows[k] = row;
        if (real) values[k] = widen(table[row * params.row_stride + column * params.column_stride]);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (rows[k] < 0) continue;
        if (mode == BagMode::kMax) {
          if (used == 0 || values[k] > sum) {
            sum = values[k];
            winner = rows[k];
          }
        } else {
          sum += scales == nullptr ? values[k] : widen(scales[(at + k) * params.scale_stride]) * values[k];
        }
        ++used;
      }
    }
    if (first) static_cast<I*>(params.bag_size)[bag] = static_cast<I>(used);
    if (!real) continue;
    if (mode == BagMode::kMean && used > 0) sum /= static_cast<C>(used);
    static_cast<T*>(params.out)[i] = narrow<T>(sum);
    if (mode == BagMode::kMax) static_cast<I*>(params.winners)[i] = static_cast<I>(winner);
  }
}

}  // namespace

int embedding_bag(const EmbeddingBag& params, BagMode mode, DType dtype, FaultWord* word, Stream stream) {
  if (params.bags == 0) return 0;
  const std::int64_t total = params.bags * (params.width > 0 ? params.width : 1);
  return dispatch_floating(dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if (params.wide) {
      reduce_bags<T, std::int64_t><<<blocks_for(total, kThreads), kThreads, 0, stream>>>(params, mode, word);
    } else {
      reduce_bags<T, std::int32_t><<<blocks_for(total, kThreads), kThreads, 0, stream>>>(params, mode, word);
    }
    return cudaGetLastError();
  });
}

}  // namespace untorch::kernels::cuda
