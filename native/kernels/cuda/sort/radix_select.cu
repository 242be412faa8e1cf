// Radix select: the element of one rank, or the k first, without sorting the row. Each pass builds a histogram of the
// next (at most) 11 bits of the keys that agree with the known prefix of the wanted key; the last CTA of a row finds
// the digit where the count passes the rank. Then the elements before the wanted key, and as many of those equal to it
// as are needed, lowest positions first, are compacted in order of position and sorted in one CTA.
//
//   grid: (slices of a row, rows);  state a row: prefix, rank;  2048 counters a row in global memory
//
// Roofline: memory-bound. Bytes: the rows once for each pass (1, 2, 3 or 6 by element size) and twice more; only k
// elements are written. Counters are integers, so the result is the same every time.
#include <cub/block/block_scan.cuh>

#include "kernels/cuda/sort/sort_parts.h"
#include "kernels/sort.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kDigitBits = 11, kDigits = 1 << kDigitBits, kDigitsPerThread = kDigits / kThreads;
// Rows selected at once: bounds the scratch memory.
constexpr std::int64_t kRowsAtOnce = 1024;
constexpr std::int64_t kCtasWanted = 512, kSliceMin = 4096;

struct RowState {
  std::uint64_t prefix;  // the digits of the wanted key that are known
  std::uint64_t known;   // where they are
  std::int64_t rank;     // of the wanted element among those that agree with the prefix
  std::uint32_t finished;
  std::uint32_t nans;
};

struct SliceCount {
  std::uint32_t before, equal;  // elements before the wanted key, and equal to it
};

// What the kernels share: `rows` of them from first_row on, `slices` CTAs a row.
struct Work {
  SelectParams params;
  KeyRule rule;
  std::int64_t first_row, slice;
  RowState* states;
  std::uint32_t* histogram;
  SliceCount* counts;
  void* keys;  // kFirst: the selected keys and positions, `rank` a row
  std::uint32_t* order;
};

struct Slice {
  std::int64_t begin, end, input;
};

__device__ __forceinline__ Slice slice_of(const Work& work, std::int64_t (&at)[3]) {
  offsets(work.params.sort.lanes.rows, work.first_row + blockIdx.y, at);
  const std::int64_t n = work.params.sort.lanes.n, begin = blockIdx.x * work.slice, end = begin + work.slice;
  return {begin < n ? begin : n, end < n ? end : n, at[2]};
}

template <class Key>
__device__ __forceinline__ Key key_at(const Work& work, const Slice& slice, std::int64_t i) {
  return load_key<Key>(work.params.sort.input, slice.input + i * work.params.sort.lanes.step[2], work.rule);
}

// NaN has the largest key in ascending order; medians are taken in that order.
template <class Key>
__global__ void __launch_bounds__(kThreads) count_nans(Work work) {
  std::int64_t at[3];
  const Slice slice = slice_of(work, at);
  int mine = 0;
  for (std::int64_t i = slice.begin + threadIdx.x; i < slice.end; i += kThreads) {
    mine += key_at<Key>(work, slice, i) == static_cast<Key>(work.rule.mask);
  }
  for (int lane = 16; lane > 0; lane /= 2) mine += __shfl_xor_sync(0xffffffff, mine, lane);
  if (threadIdx.x % 32 == 0 && mine != 0) atomicAdd(&work.states[blockIdx.y].nans, static_cast<std::uint32_t>(mine));
}

__global__ void __launch_bounds__(kThreads) set_ranks(Work work, int rows) {
  const int row = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (row >= rows) return;
  RowState& state = work.states[row];
  const std::int64_t n = work.params.sort.lanes.n, nans = state.nans;
  switch (work.params.what) {
    case Select::kFirst:
      state.rank = work.params.rank - 1;
      break;
    case Select::kRank:
      state.rank = work.params.rank;
      break;
    case Select::kMedian:
      state.rank = nans != 0 ? n - nans : (n - 1) / 2;
      break;
    case Select::kNanMedian:
      state.rank = nans == n ? 0 : (n - nans - 1) / 2;
      break;
  }
}

template <class Key>
__global__ void __launch_bounds__(kThreads) find_digit(Work work, int shift, int width) {
  using Scan = cub::BlockScan<std::uint32_t, kThreads>;
  __shared__ std::uint32_t counters[kDigits];
  __shared__ typename Scan::TempStorage storage;
  __shared__ bool last;
  std::int64_t at[3];
  const Slice slice = slice_of(work, at);
  RowState& state = work.states[blockIdx.y];
  const auto prefix = static_cast<Key>(state.prefix), known = static_cast<Key>(state.known);
  const std::uint32_t digit_mask = (1u << width) - 1;
  for (int d = static_cast<int>(threadIdx.x); d < kDigits; d += kThreads) counters[d] = 0;
  __syncthreads();
  constexpr int kAhead = 4;  // reads in flight before the counters are touched
  for (std::int64_t i = slice.begin + threadIdx.x; i < slice.end; i += kAhead * kThreads) {
    Key keys[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      keys[j] = i + j * kThreads < slice.end ? key_at<Key>(work, slice, i + j * kThreads) : static_cast<Key>(0);
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (i + j * kThreads < slice.end && (keys[j] & known) == prefix) {
        atomicAdd(&counters[static_cast<std::uint32_t>(keys[j] >> shift) & digit_mask], 1u);
      }
    }
  }
  __syncthreads();
  std::uint32_t* const total = work.histogram + static_cast<std::int64_t>(blockIdx.y) * kDigits;
  for (int d = static_cast<int>(threadIdx.x); d < kDigits; d += kThreads) {
    if (counters[d] != 0) atomicAdd(total + d, counters[d]);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(&state.finished, 1u) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();

  // Every other CTA has read the state and added its counts.
  const std::int64_t rank = state.rank;
  std::uint32_t mine[kDigitsPerThread], sum = 0, before = 0;
  const int first = static_cast<int>(threadIdx.x) * kDigitsPerThread;
#pragma unroll
  for (int j = 0; j < kDigitsPerThread; ++j) {
    mine[j] = __ldcg(total + first + j);
    sum += mine[j];
  }
  Scan(storage).ExclusiveSum(sum, before);
  // All threads have read the rank before one of them replaces it: the scan has barriers.
  if (rank >= before && rank < static_cast<std::int64_t>(before) + sum) {
    std::int64_t rest = rank - before;
    int digit = first;
#pragma unroll
    for (int j = 0; j < kDigitsPerThread; ++j) {
      if (digit != first + j) continue;
      if (rest >= mine[j]) {
        rest -= mine[j];
        ++digit;
      }
    }
    state.prefix |= static_cast<std::uint64_t>(digit) << shift;
    state.known |= static_cast<std::uint64_t>(digit_mask) << shift;
    state.rank = rest;
  }
  if (threadIdx.x == 0) state.finished = 0;
  for (int d = static_cast<int>(threadIdx.x); d < kDigits; d += kThreads) total[d] = 0;
}

template <class Key>
__global__ void __launch_bounds__(kThreads) count_slices(Work work) {
  __shared__ SliceCount warps[kWarps];
  std::int64_t at[3];
  const Slice slice = slice_of(work, at);
  const auto wanted = static_cast<Key>(work.states[blockIdx.y].prefix);
  std::uint32_t before = 0, equal = 0;
  for (std::int64_t i = slice.begin + threadIdx.x; i < slice.end; i += kThreads) {
    const Key key = key_at<Key>(work, slice, i);
    before += key < wanted;
    equal += key == wanted;
  }
  for (int lane = 16; lane > 0; lane /= 2) {
    before += __shfl_xor_sync(0xffffffff, before, lane);
    equal += __shfl_xor_sync(0xffffffff, equal, lane);
  }
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = {before, equal};
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kWarps; ++w) {
    before += warps[w].before;
    equal += warps[w].equal;
  }
  work.counts[static_cast<std::int64_t>(blockIdx.y) * gridDim.x + blockIdx.x] = {before, equal};
}

template <class Key>
__global__ void __launch_bounds__(kThreads) write_selected(Work work) {
  __shared__ SliceCount warps[kWarps];
  std::int64_t at[3];
  const Slice slice = slice_of(work, at);
  const RowState state = work.states[blockIdx.y];
  const auto wanted = static_cast<Key>(state.prefix);
  const std::int64_t needed = state.rank + 1;  // of those equal to the wanted key
  const bool one = work.params.what != Select::kFirst;
  const SliceCount* const counts = work.counts + static_cast<std::int64_t>(blockIdx.y) * gridDim.x;
  std::int64_t before = 0, equal = 0;  // in earlier slices, then in earlier elements
  for (unsigned b = 0; b < blockIdx.x; ++b) {
    before += counts[b].before;
    equal += counts[b].equal;
  }
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, lower = (1u << lane) - 1;
  for (std::int64_t start = slice.begin; start < slice.end; start += kThreads) {
    const std::int64_t i = start + threadIdx.x;
    const bool inside = i < slice.end;
    const Key key = inside ? key_at<Key>(work, slice, i) : static_cast<Key>(0);
    const bool is_before = inside && key < wanted, is_equal = inside && key == wanted;
    // Most steps hold nothing.
    if (!__syncthreads_or(is_before || is_equal)) continue;
    const unsigned votes_before = __ballot_sync(0xffffffff, is_before),
                   votes_equal = __ballot_sync(0xffffffff, is_equal);
    if (lane == 0) {
      warps[warp] = {static_cast<std::uint32_t>(__popc(votes_before)), static_cast<std::uint32_t>(__popc(votes_equal))};
    }
    __syncthreads();
    std::int64_t my_before = before + __popc(votes_before & lower), my_equal = equal + __popc(votes_equal & lower);
    for (unsigned w = 0; w < kWarps; ++w) {
      if (w < warp) {
        my_before += warps[w].before;
        my_equal += warps[w].equal;
      }
      before += warps[w].before;
      equal += warps[w].equal;
    }
    const SortParams& params = work.params.sort;
    if (one) {
      if (is_equal && my_equal == needed - 1) {
        move_element(params.values, at[0], params.input, at[2] + i * params.lanes.step[2], work.rule.bits / 8);
        if (params.indices != nullptr) params.indices[at[1]] = i;
      }
    } else if (is_before || (is_equal && my_equal < needed)) {
      const std::int64_t to = static_cast<std::int64_t>(blockIdx.y) * work.params.rank + my_before +
                              (my_equal < needed ? my_equal : needed);
      static_cast<Key*>(work.keys)[to] = key;
      work.order[to] = static_cast<std::uint32_t>(i);
    }
    __syncthreads();
  }
}

struct Plan {
  KeyRule rule;
  std::int64_t rows_at_once, slices, slice;
  std::size_t states, histogram, counts, keys, order, bytes;  // where each lies, and how much there is
};

int make_plan(const SelectParams& params, Plan& plan) {
  const Lanes<3>& lanes = params.sort.lanes;
  if (!key_rule(params.sort.dtype, params.sort.descending, plan.rule) || lanes.n > kSortMax) return kNoKernel;
  if (params.what == Select::kFirst && params.rank > kSelectMax) return kNoKernel;
  plan.rows_at_once = lanes.rows.numel < kRowsAtOnce ? lanes.rows.numel : kRowsAtOnce;
  if (plan.rows_at_once < 1) plan.rows_at_once = 1;
  const std::int64_t by_rows = (kCtasWanted + plan.rows_at_once - 1) / plan.rows_at_once,
                     by_length = (lanes.n + kSliceMin - 1) / kSliceMin;
  plan.slices = by_rows < by_length ? by_rows : by_length;
  if (plan.slices < 1) plan.slices = 1;
  plan.slice = (lanes.n + plan.slices - 1) / plan.slices;
  std::size_t used = 0;
  const auto take = [&](std::int64_t bytes) {
    const std::size_t at = used;
    used += (static_cast<std::size_t>(bytes) + 255) / 256 * 256;
    return at;
  };
  const std::int64_t kept = params.what == Select::kFirst ? params.rank : 0;
  plan.states = take(plan.rows_at_once * static_cast<std::int64_t>(sizeof(RowState)));
  plan.histogram = take(plan.rows_at_once * kDigits * 4);
  plan.counts = take(plan.rows_at_once * plan.slices * static_cast<std::int64_t>(sizeof(SliceCount)));
  plan.keys = take(plan.rows_at_once * kept * (plan.rule.bits == 64 ? 8 : 4));
  plan.order = take(plan.rows_at_once * kept * 4);
  plan.bytes = used;
  return 0;
}

template <class Key>
int run(Work work, const Plan& plan, std::byte* scratch, int rows, Stream stream) {
  const SelectParams& params = work.params;
  const dim3 grid(static_cast<unsigned>(plan.slices), static_cast<unsigned>(rows));
  // States and histograms lie at the start, one after the other.
  int code = cudaMemsetAsync(scratch, 0, plan.counts, stream);
  if (code != 0) return code;
  if (params.what == Select::kMedian || params.what == Select::kNanMedian) {
    if (plan.rule.kind == KeyRule::kFloating) count_nans<Key><<<grid, kThreads, 0, stream>>>(work);
  }
  set_ranks<<<blocks_for(rows, kThreads), kThreads, 0, stream>>>(work, rows);
  for (int high = plan.rule.bits; high > 0; high -= kDigitBits) {
    const int shift = high > kDigitBits ? high - kDigitBits : 0;
    find_digit<Key><<<grid, kThreads, 0, stream>>>(work, shift, high - shift);
  }
  count_slices<Key><<<grid, kThreads, 0, stream>>>(work);
  write_selected<Key><<<grid, kThreads, 0, stream>>>(work);
  if ((code = cudaGetLastError()) != 0 || params.what != Select::kFirst) return code;
  SortParams chosen = params.sort;
  chosen.lanes.n = chosen.take = params.rank;
  chosen.first = 0;
  if constexpr (sizeof(Key) == 8) {
    return sort_cta64(chosen, plan.rule, work.first_row, rows, static_cast<Key*>(work.keys), work.order, stream);
  } else {
    return sort_cta32(chosen, plan.rule, work.first_row, rows, static_cast<Key*>(work.keys), work.order, stream);
  }
}

}  // namespace

int select_scratch(const SelectParams& params, std::size_t& bytes) {
  Plan plan;
  bytes = 0;
  if (const int code = make_plan(params, plan); code != 0) return code;
  bytes = plan.bytes;
  return 0;
}

int select(const SelectParams& params, void* scratch, Stream stream) {
  Plan plan;
  if (const int code = make_plan(params, plan); code != 0) return code;
  const std::int64_t rows = params.sort.lanes.rows.numel;
  if (rows == 0 || params.sort.lanes.n == 0 || (params.what == Select::kFirst && params.rank == 0)) return 0;
  auto* const base = static_cast<std::byte*>(scratch);
  Work work{params,
            plan.rule,
            0,
            plan.slice,
            reinterpret_cast<RowState*>(base + plan.states),
            reinterpret_cast<std::uint32_t*>(base + plan.histogram),
            reinterpret_cast<SliceCount*>(base + plan.counts),
            base + plan.keys,
            reinterpret_cast<std::uint32_t*>(base + plan.order)};
  for (; work.first_row < rows; work.first_row += plan.rows_at_once) {
    const std::int64_t left = rows - work.first_row;
    const int here = static_cast<int>(left < plan.rows_at_once ? left : plan.rows_at_once);
    const int code = plan.rule.bits == 64 ? run<std::uint64_t>(work, plan, base, here, stream)
                                          : run<std::uint32_t>(work, plan, base, here, stream);
    if (code != 0) return code;
  }
  return 0;
}

}  // namespace untorch::kernels::cuda
