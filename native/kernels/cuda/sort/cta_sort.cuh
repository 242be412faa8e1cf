// Segmented radix sort of short rows, one CTA a row (cub::BlockRadixSort): keys and positions stay in registers and
// shared memory, four bits a pass and only as many passes as the dtype has bits.
//
//   row (n <= 4096) -> registers, blocked: thread t holds elements t*kItems ... t*kItems + kItems - 1 (stable)
//                   -> registers, striped: rank j*kThreads + t (coalesced stores)
//
// Roofline: memory-bound; every element read once and written once, with its position (8 bytes).
#pragma once

#include <cub/block/block_radix_sort.cuh>

#include "kernels/cuda/sort/sort_parts.h"

namespace untorch::kernels::cuda {
namespace {

template <class Key>
struct CtaSortParams {
  SortParams sort;
  KeyRule rule;
  std::int64_t first_row, rows;
  const Key* keys;
  const std::uint32_t* order;
};

template <class Key, int kThreads, int kItems>
__global__ void __launch_bounds__(kThreads) sort_rows(CtaSortParams<Key> in) {
  using Sort = cub::BlockRadixSort<Key, kThreads, kItems, std::uint32_t>;
  __shared__ typename Sort::TempStorage storage;
  const SortParams& params = in.sort;
  const int n = static_cast<int>(params.lanes.n);
  const int first = static_cast<int>(params.first), take = static_cast<int>(params.take);
  for (std::int64_t row = blockIdx.x; row < in.rows; row += gridDim.x) {
    std::int64_t at[3];
    offsets(params.lanes.rows, in.first_row + row, at);
    Key keys[kItems];
    std::uint32_t order[kItems];
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int i = static_cast<int>(threadIdx.x) * kItems + j;
      // Beyond the row: the largest key, and after everything that has it, since the sort is stable.
      keys[j] = static_cast<Key>(in.rule.mask);
      order[j] = 0;
      if (i < n) {
        if (in.keys != nullptr) {
          keys[j] = in.keys[row * n + i];
          order[j] = in.order[row * n + i];
        } else {
          keys[j] = load_key<Key>(params.input, at[2] + i * params.lanes.step[2], in.rule);
          order[j] = static_cast<std::uint32_t>(i);
        }
      }
    }
    Sort(storage).SortBlockedToStriped(keys, order, 0, in.rule.bits);
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int rank = j * kThreads + static_cast<int>(threadIdx.x), to = rank - first;
      if (rank >= n || to < 0 || to >= take) continue;
      const std::int64_t from = at[2] + order[j] * params.lanes.step[2];
      move_element(params.values, at[0] + to * params.lanes.step[0], params.input, from, in.rule.bits / 8);
      params.indices[at[1] + to * params.lanes.step[1]] = order[j];
    }
    __syncthreads();
  }
}

template <class Key, int kThreads, int kItems>
int launch_rows(const CtaSortParams<Key>& params, Stream stream) {
  sort_rows<Key, kThreads, kItems><<<blocks_for(params.rows, 1), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

template <class Key>
int sort_cta(const SortParams& params, const KeyRule& rule, std::int64_t first_row, std::int64_t rows, const Key* keys,
             const std::uint32_t* order, Stream stream) {
  const std::int64_t n = params.lanes.n;
  if (rows == 0 || n == 0 || params.take == 0) return 0;
  const CtaSortParams<Key> in{params, rule, first_row, rows, keys, order};
  if (n <= 128) return launch_rows<Key, 32, 4>(in, stream);
  if (n <= 1024) return launch_rows<Key, 128, 8>(in, stream);
  if (n <= kCtaSortMax) return launch_rows<Key, 512, 8>(in, stream);
  return kNoKernel;
}

}  // namespace
}  // namespace untorch::kernels::cuda
