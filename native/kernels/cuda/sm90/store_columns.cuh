// The epilogue of GEMMs that have the weight as WGMMA's A operand: accumulators, 64 columns of the result a warpgroup,
// through shared memory to rows of 128 bytes (16-bit results).
#pragma once

#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/common/half_pair.cuh"
#include "kernels/cuda/mma/cp_async_ldmatrix.cuh"
#include "kernels/cuda/sm90/warps.cuh"

namespace untorch::kernels::cuda {

inline constexpr int kStoreRows = 32;                     // of a part
inline constexpr int kStoreBytes = 2 * kStoreRows * 128;  // of shared memory: two parts, of a warpgroup

// A warpgroup's 64 columns of M rows. out: the first element; rows and columns: how many are the result's. pair(i): the
// results of accumulators 2i and 2i + 1, packed. InChunks: `columns` is a multiple of 8. `part` counts parts of all
// calls; barrier: a named barrier of this warpgroup, whose threads are numbered from 0.
template <class T, int M, bool InChunks = false, class Pair>
__device__ __forceinline__ void store_columns(T* out, std::int64_t out_row, int rows, int columns, std::uint32_t memory,
                                              int barrier, int& part, Pair&& pair) {
  constexpr int kRows = M < kStoreRows ? M : kStoreRows;
  const int thread = static_cast<int>(threadIdx.x) % 128, warp = thread / 32, lane = thread % 32;
  // Lane 8i + r has the address of row r of matrix i: rows 0 to 7 and 8 to 15, columns 0 to 7 and 8 to 15.
  const int to_row = lane / 16 * 8 + lane % 8, to_chunk = warp * 2 + lane / 8 % 2;
#pragma unroll
  for (int first = 0; first < M; first += kRows) {
    const std::uint32_t buffer = memory + (part & 1) * (kStoreRows * 128);
#pragma unroll
    for (int j = 0; j < kRows; j += 16) {
      const int i = (first + j) / 4;
      const std::uint32_t pairs[4] = {pair(i), pair(i + 1), pair(i + 2), pair(i + 3)};
      const int row = j + to_row;
      stmatrix_x4_trans(buffer + row * 128 + (to_chunk ^ (row & 7)) * 16, pairs);
    }
    named_barrier_sync(barrier, 128);
#pragma unroll
    for (int i = 0; i < kRows * 8; i += 128) {
      const int row = (i + thread) / 8, chunk = thread % 8;
      const uint4 eight = SharedWords{buffer + row * 128 + (chunk ^ (row & 7)) * 16}.four(0);
      if (first + row < rows) {
        T* const at = out + (first + row) * out_row + chunk * 8;
        if (chunk * 8 + 8 <= columns) {
          *reinterpret_cast<uint4*>(at) = eight;
        } else if constexpr (!InChunks) {
          T values[8];
          memcpy(values, &eight, 16);
          for (int c = 0; c < columns - chunk * 8; ++c) at[c] = values[c];
        }
      }
    }
    ++part;  // the barrier of the next part says that this buffer has been read
  }
}

}  // namespace untorch::kernels::cuda
