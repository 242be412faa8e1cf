// The sort of a row in one block: radix sort in shared memory, four bits a pass and only as many passes as the dtype
// has bits. Bytes: every element read once and written once, with its position. Threads hold neighbouring elements,
// which keeps the sort stable, and write ranks that neighbouring threads share a line of.
#pragma once

#include <cub/block/block_radix_sort.cuh>

#include "kernels/cuda/sort/sort_parts.h"

namespace untorch::kernels::cuda {
namespace {

template <class Key>
struct BlockJob {
  SortJob job;
  KeyRule rule;
  std::int64_t first_row, rows;
  const Key* keys;
  const std::uint32_t* order;
};

template <class Key, int kThreads, int kItems>
__global__ void __launch_bounds__(kThreads) sort_rows(BlockJob<Key> in) {
  using Sort = cub::BlockRadixSort<Key, kThreads, kItems, std::uint32_t>;
  __shared__ typename Sort::TempStorage storage;
  const SortJob& job = in.job;
  const int n = static_cast<int>(job.lanes.n);
  const int first = static_cast<int>(job.first), take = static_cast<int>(job.take);
  for (std::int64_t row = blockIdx.x; row < in.rows; row += gridDim.x) {
    std::int64_t at[3];
    offsets(job.lanes.rows, in.first_row + row, at);
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
          keys[j] = load_key<Key>(job.input, at[2] + i * job.lanes.step[2], in.rule);
          order[j] = static_cast<std::uint32_t>(i);
        }
      }
    }
    Sort(storage).SortBlockedToStriped(keys, order, 0, in.rule.bits);
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int rank = j * kThreads + static_cast<int>(threadIdx.x), to = rank - first;
      if (rank >= n || to < 0 || to >= take) continue;
      const std::int64_t from = at[2] + order[j] * job.lanes.step[2];
      move_element(job.values, at[0] + to * job.lanes.step[0], job.input, from, in.rule.bits / 8);
      job.indices[at[1] + to * job.lanes.step[1]] = order[j];
    }
    __syncthreads();
  }
}

template <class Key, int kThreads, int kItems>
int launch_rows(const BlockJob<Key>& job, Stream stream) {
  sort_rows<Key, kThreads, kItems><<<blocks_for(job.rows, 1), kThreads, 0, stream>>>(job);
  return cudaGetLastError();
}

template <class Key>
int sort_block(const SortJob& job, const KeyRule& rule, std::int64_t first_row, std::int64_t rows, const Key* keys,
               const std::uint32_t* order, Stream stream) {
  const std::int64_t n = job.lanes.n;
  if (rows == 0 || n == 0 || job.take == 0) return 0;
  const BlockJob<Key> in{job, rule, first_row, rows, keys, order};
  if (n <= 128) return launch_rows<Key, 32, 4>(in, stream);
  if (n <= 1024) return launch_rows<Key, 128, 8>(in, stream);
  if (n <= kBlockSortMax) return launch_rows<Key, 512, 8>(in, stream);
  return kNoKernel;
}

}  // namespace
}  // namespace untorch::kernels::cuda
