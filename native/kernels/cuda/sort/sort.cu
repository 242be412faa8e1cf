// Segmented radix sort. Rows of up to kCtaSortMax elements: one CTA each (cta_sort.cuh). Longer ones: a kernel writes
// keys and positions, CUB's device-wide radix sort orders the pairs, a kernel gathers the ranks that are kept.
//
//   key of 64 bits:  [ row | key of the dtype ]   many long rows are sorted as one where both fit;
//                                                 rows of 64-bit keys are sorted by key, then stably by row
//
// Roofline: memory-bound. Bytes of a long row of 4-byte elements: the input twice, 8 (key and position) read and
// written for each pass of eight bits, the results.
#include "kernels/cuda/sort/sort_parts.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256;
// From here on a row keeps the GPU busy by itself, and narrower keys are quicker than one sort for all rows.
constexpr std::int64_t kAlone = std::int64_t{1} << 18;
// Elements sorted at once: bounds the scratch memory at 24 bytes each.
constexpr std::int64_t kChunk = std::int64_t{1} << 25;

int bits_for(std::int64_t values) {
  int bits = 0;
  while ((std::int64_t{1} << bits) < values) ++bits;
  return bits;
}

// keys[i] = the key of element i of the chunk, its row above it; order[i] = i.
template <class Element, class Key>
__global__ void __launch_bounds__(kThreads) make_keys(SortParams params, KeyRule rule, std::int64_t first_row,
                                                      std::uint32_t total, Key* keys, std::uint32_t* order) {
  const auto n = static_cast<std::uint32_t>(params.lanes.n);
  const std::uint32_t step = gridDim.x * kThreads;
  for (std::uint64_t at = blockIdx.x * kThreads + threadIdx.x; at < total; at += step) {
    const auto linear = static_cast<std::uint32_t>(at);
    const std::uint32_t row = linear / n, i = linear - row * n;
    std::int64_t start[3];
    offsets(params.lanes.rows, first_row + row, start);
    Key key = load_key<Element>(params.input, start[2] + i * params.lanes.step[2], rule);
    if (row != 0 && sizeof(Element) < 8) key |= static_cast<Key>(static_cast<std::uint64_t>(row) << rule.bits);
    keys[linear] = key;
    order[linear] = linear;
  }
}

__global__ void __launch_bounds__(kThreads)
    row_keys(std::uint32_t total, std::uint32_t n, const std::uint32_t* order, std::uint32_t* keys) {
  const std::uint32_t step = gridDim.x * kThreads;
  for (std::uint64_t at = blockIdx.x * kThreads + threadIdx.x; at < total; at += step) keys[at] = order[at] / n;
}

__global__ void __launch_bounds__(kThreads)
    take_ranks(SortParams params, int bytes, std::int64_t first_row, std::uint32_t total, const std::uint32_t* order) {
  const auto n = static_cast<std::uint32_t>(params.lanes.n), take = static_cast<std::uint32_t>(params.take);
  const std::uint32_t step = gridDim.x * kThreads;
  for (std::uint64_t at = blockIdx.x * kThreads + threadIdx.x; at < total; at += step) {
    const auto linear = static_cast<std::uint32_t>(at);
    const std::uint32_t row = linear / take, to = linear - row * take;
    std::int64_t start[3];
    offsets(params.lanes.rows, first_row + row, start);
    const std::int64_t i = order[row * n + static_cast<std::uint32_t>(params.first) + to] - row * n;
    move_element(params.values, start[0] + to * params.lanes.step[0], params.input, start[2] + i * params.lanes.step[2],
                 bytes);
    params.indices[start[1] + to * params.lanes.step[1]] = i;
  }
}

unsigned ctas(std::int64_t n) {
  const unsigned wanted = blocks_for(n, kThreads);
  return wanted > 65535 ? 65535 : wanted;
}

// Where the buffers of a chunk lie in the scratch memory.
struct Buffers {
  std::byte* base;
  std::size_t used = 0;
  explicit Buffers(void* scratch) : base(static_cast<std::byte*>(scratch)) {}
  template <class T>
  T* take(std::size_t count) {
    std::byte* const at = base == nullptr ? nullptr : base + used;
    used += (count * sizeof(T) + 255) / 256 * 256;
    return reinterpret_cast<T*>(at);
  }
};

int sort_long(const SortParams& params, const KeyRule& rule, void* scratch, std::size_t& scratch_bytes, Stream stream) {
  const std::int64_t n = params.lanes.n, rows = params.lanes.rows.numel;
  const std::int64_t most = n >= kAlone ? 1 : kChunk / n, rows_at_once = most < rows ? most : rows;
  const auto capacity = static_cast<std::size_t>(rows_at_once * n);
  const int row_bits = bits_for(rows_at_once), bits = rule.bits + row_bits;
  const bool two_sorts = bits > 64, wide = bits > 32;

  Buffers buffers(scratch);
  std::uint64_t* const wide_keys[2] = {buffers.take<std::uint64_t>(wide ? capacity : 0),
                                       buffers.take<std::uint64_t>(wide ? capacity : 0)};
  std::uint32_t* narrow_keys[2] = {buffers.take<std::uint32_t>(wide ? 0 : capacity),
                                   buffers.take<std::uint32_t>(wide ? 0 : capacity)};
  std::uint32_t* const order[2] = {buffers.take<std::uint32_t>(capacity), buffers.take<std::uint32_t>(capacity)};
  if (two_sorts) {  // the wide keys are done with when the rows are sorted
    narrow_keys[0] = reinterpret_cast<std::uint32_t*>(wide_keys[0]);
    narrow_keys[1] = reinterpret_cast<std::uint32_t*>(wide_keys[1]);
  }
  const int key_bits = two_sorts ? rule.bits : bits;
  std::uint32_t* const turned[2] = {order[1], order[0]};

  const auto sort_pairs = [&](void* temp, std::size_t& bytes, int total, int& current) {
    return wide ? radix_sort64(temp, bytes, wide_keys, order, current, total, key_bits, stream)
                : radix_sort32(temp, bytes, narrow_keys, order, current, total, key_bits, stream);
  };
  const auto sort_by_row = [&](void* temp, std::size_t& bytes, int total, int from, int& current) {
    return radix_sort32(temp, bytes, narrow_keys, from == 0 ? order : turned, current, total, row_bits, stream);
  };

  std::size_t temp_bytes = 0, second = 0;
  int current = 0;
  int code = sort_pairs(nullptr, temp_bytes, static_cast<int>(capacity), current);
  if (code == 0 && two_sorts) code = sort_by_row(nullptr, second, static_cast<int>(capacity), 0, current);
  if (code != 0) return code;
  if (second > temp_bytes) temp_bytes = second;
  auto* const temp = buffers.take<std::byte>(temp_bytes);
  if (scratch == nullptr) {
    scratch_bytes = buffers.used;
    return 0;
  }

  for (std::int64_t row = 0; row < rows; row += rows_at_once) {
    const std::int64_t here = rows - row < rows_at_once ? rows - row : rows_at_once;
    const auto total = static_cast<std::uint32_t>(here * n);
    if (rule.bits == 64) {
      make_keys<std::uint64_t, std::uint64_t>
          <<<ctas(total), kThreads, 0, stream>>>(params, rule, row, total, wide_keys[0], order[0]);
    } else if (wide) {
      make_keys<std::uint32_t, std::uint64_t>
          <<<ctas(total), kThreads, 0, stream>>>(params, rule, row, total, wide_keys[0], order[0]);
    } else {
      make_keys<std::uint32_t, std::uint32_t>
          <<<ctas(total), kThreads, 0, stream>>>(params, rule, row, total, narrow_keys[0], order[0]);
    }
    if ((code = cudaGetLastError()) != 0) return code;
    if ((code = sort_pairs(temp, temp_bytes, static_cast<int>(total), current)) != 0) return code;
    if (two_sorts) {
      row_keys<<<ctas(total), kThreads, 0, stream>>>(total, static_cast<std::uint32_t>(n), order[current],
                                                     narrow_keys[0]);
      if ((code = cudaGetLastError()) != 0) return code;
      const int from = current;
      if ((code = sort_by_row(temp, temp_bytes, static_cast<int>(total), from, current)) != 0) return code;
      current ^= from;  // buffer 0 of that sort was `from`
    }
    const auto kept = static_cast<std::uint32_t>(here * params.take);
    take_ranks<<<ctas(kept), kThreads, 0, stream>>>(params, rule.bits / 8, row, kept, order[current]);
    if ((code = cudaGetLastError()) != 0) return code;
  }
  return 0;
}

// A CTA a row. A run of equal values ends where the next value differs; its start is found by bisection, since the
// row is sorted. The longest run wins, the first of several.
template <class Key>
__global__ void __launch_bounds__(kThreads)
    mode_rows(Strided<2> rows, KeyRule rule, void* values, std::int64_t* indices, const void* sorted,
              const std::int64_t* order, std::int64_t n) {
  __shared__ std::uint64_t best[kThreads];
  for (std::int64_t row = blockIdx.x; row < rows.numel; row += gridDim.x) {
    const std::int64_t start = row * n;
    std::uint64_t mine = 0;  // the run's length above the complement of its end
    for (std::int64_t i = threadIdx.x; i < n; i += kThreads) {
      const Key key = load_key<Key>(sorted, start + i, rule);
      if (i + 1 < n && load_key<Key>(sorted, start + i + 1, rule) == key) continue;
      std::int64_t low = 0, high = i;
      while (low < high) {
        const std::int64_t middle = low + (high - low) / 2;
        if (load_key<Key>(sorted, start + middle, rule) < key)
          low = middle + 1;
        else
          high = middle;
      }
      const std::uint64_t run = static_cast<std::uint64_t>(i - low + 1) << 32 | (0xffffffffu - i);
      if (run > mine) mine = run;
    }
    best[threadIdx.x] = mine;
    __syncthreads();
    for (int half = kThreads / 2; half > 0; half /= 2) {
      if (static_cast<int>(threadIdx.x) < half && best[threadIdx.x + half] > best[threadIdx.x]) {
        best[threadIdx.x] = best[threadIdx.x + half];
      }
      __syncthreads();
    }
    if (threadIdx.x == 0) {
      const std::int64_t end = 0xffffffffu - static_cast<std::uint32_t>(best[0]);
      std::int64_t at[2];
      offsets(rows, row, at);
      move_element(values, at[0], sorted, start + end, rule.bits / 8);
      indices[at[1]] = order[start + end];
    }
    __syncthreads();
  }
}

bool is_short(const SortParams& params) {
  return params.lanes.n <= kCtaSortMax || params.lanes.rows.numel == 0 || params.take == 0;
}

}  // namespace

int sort_scratch(const SortParams& params, std::size_t& bytes) {
  KeyRule rule;
  bytes = 0;
  if (!key_rule(params.dtype, params.descending, rule) || params.lanes.n > kSortMax) return kNoKernel;
  return is_short(params) ? 0 : sort_long(params, rule, nullptr, bytes, nullptr);
}

int sort(const SortParams& params, void* scratch, Stream stream) {
  KeyRule rule;
  if (!key_rule(params.dtype, params.descending, rule) || params.lanes.n > kSortMax) return kNoKernel;
  if (is_short(params)) {
    const std::int64_t rows = params.lanes.rows.numel;
    return rule.bits == 64 ? sort_cta64(params, rule, 0, rows, nullptr, nullptr, stream)
                           : sort_cta32(params, rule, 0, rows, nullptr, nullptr, stream);
  }
  std::size_t bytes = 0;
  return sort_long(params, rule, scratch, bytes, stream);
}

int mode(const Strided<2>& rows, void* values, std::int64_t* indices, const void* sorted, const std::int64_t* order,
         std::int64_t n, DType dtype, Stream stream) {
  KeyRule rule;
  if (!key_rule(dtype, false, rule) || n > kSortMax) return kNoKernel;
  if (rows.numel == 0 || n == 0) return 0;
  const unsigned grid = blocks_for(rows.numel, 1);
  if (rule.bits == 64) {
    mode_rows<std::uint64_t><<<grid, kThreads, 0, stream>>>(rows, rule, values, indices, sorted, order, n);
  } else {
    mode_rows<std::uint32_t><<<grid, kThreads, 0, stream>>>(rows, rule, values, indices, sorted, order, n);
  }
  return cudaGetLastError();
}

}  // namespace untorch::kernels::cuda
