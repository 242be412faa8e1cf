// Stream compaction in row-major order: count, scan of the counts, scatter.
//
//   elements  | slice 0 | slice 1 | ...   a CTA counts its slice; one CTA scans at most 1024 counts;
//   starts    0         c0        c0+c1   a CTA writes its slice from its start on, 1024 elements a step,
//                                         positions within a step by warp votes (ballot and popc)
//
// Roofline: memory-bound; the flags twice, and what is kept.
#include "kernels/compact.h"
#include "kernels/cuda/common/integers.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kItems = 4, kStep = kThreads * kItems;
constexpr std::int64_t kSlicesMax = 1024;

std::int64_t slices_for(std::int64_t numel) {
  const std::int64_t steps = (numel + kStep - 1) / kStep;
  return steps < 1 ? 1 : steps > kSlicesMax ? kSlicesMax : steps;
}

// Which bits make an element other than zero: -0 is zero.
struct FlagRule {
  int bytes;
  std::uint64_t mask;
};

bool flag_rule(DType dtype, FlagRule& rule) {
  constexpr auto all = ~std::uint64_t{0};
  switch (dtype) {
    case DType::kBool:
    case DType::kUInt8:
    case DType::kInt8:
      rule = {1, all};
      return true;
    case DType::kInt16:
    case DType::kUInt16:
      rule = {2, all};
      return true;
    case DType::kInt32:
    case DType::kUInt32:
      rule = {4, all};
      return true;
    case DType::kInt64:
    case DType::kUInt64:
      rule = {8, all};
      return true;
    case DType::kFloat8E4M3FN:
    case DType::kFloat8E5M2:
      rule = {1, 0x7f};
      return true;
    case DType::kFloat16:
    case DType::kBFloat16:
      rule = {2, 0x7fff};
      return true;
    case DType::kFloat32:
      rule = {4, 0x7fffffff};
      return true;
    case DType::kFloat64:
      rule = {8, 0x7fffffffffffffff};
      return true;
    case DType::kComplex64:
      rule = {8, 0x7fffffff7fffffff};
      return true;
    case DType::kComplex128:
      rule = {16, 0x7fffffffffffffff};
      return true;
    default:
      return false;
  }
}

__device__ __forceinline__ bool is_set(const void* flags, std::int64_t i, const FlagRule& rule) {
  std::uint64_t bits;
  switch (rule.bytes) {
    case 1:
      bits = static_cast<const std::uint8_t*>(flags)[i];
      break;
    case 2:
      bits = static_cast<const std::uint16_t*>(flags)[i];
      break;
    case 4:
      bits = static_cast<const std::uint32_t*>(flags)[i];
      break;
    case 8:
      bits = static_cast<const std::uint64_t*>(flags)[i];
      break;
    default: {
      const auto* pair = static_cast<const std::uint64_t*>(flags) + 2 * i;
      bits = pair[0] | pair[1];
    }
  }
  return (bits & rule.mask) != 0;
}

__global__ void __launch_bounds__(kThreads)
    count_slices(CompactParams params, FlagRule rule, std::int64_t slice, std::int64_t* counts) {
  __shared__ int warps[kWarps];
  const std::int64_t begin = blockIdx.x * slice, limit = begin + slice,
                     end = limit < params.space.numel ? limit : params.space.numel;
  std::int64_t mine = 0;
  for (std::int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    std::int64_t at[3];
    offsets(params.space, i, at);
    mine += is_set(params.flags, at[1], rule);
  }
  // A slice has fewer than 2^31 elements in any memory there is.
  int sum = static_cast<int>(mine);
  for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lane);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kWarps; ++w) sum += warps[w];
  counts[blockIdx.x] = sum;
}

// In place; the total goes behind the last.
__global__ void __launch_bounds__(kSlicesMax) make_starts(std::int64_t* counts, int slices) {
  __shared__ std::int64_t warps[32];
  const int i = static_cast<int>(threadIdx.x), lane = i % 32, warp = i / 32;
  const std::int64_t mine = i < slices ? counts[i] : 0;
  std::int64_t sum = mine;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const std::int64_t earlier = __shfl_up_sync(0xffffffff, sum, by);
    if (lane >= by) sum += earlier;
  }
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  std::int64_t before = 0;
#pragma unroll 1
  for (int w = 0; w < warp; ++w) before += warps[w];
  if (i < slices) counts[i] = before + sum - mine;
  if (i == kSlicesMax - 1) counts[slices] = before + sum;
}

// write(p, i, at) for every element i that is set: p is its place among them, `at` its offsets.
template <class Write>
__device__ __forceinline__ void for_each_set(const CompactParams& params, const FlagRule& rule, std::int64_t slice,
                                             const std::int64_t* starts, Write&& write) {
  __shared__ int warps[2][kItems][kWarps];
  const std::int64_t begin = blockIdx.x * slice, limit = begin + slice,
                     end = limit < params.space.numel ? limit : params.space.numel;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, lower = (1u << lane) - 1;
  std::int64_t start = starts[blockIdx.x];
  if (start == starts[blockIdx.x + 1]) return;  // the whole CTA
  int turn = 0;                                 // two sets of counts in turn: one barrier a step
  for (std::int64_t step = begin; step < end; step += kStep, turn ^= 1) {
    std::int64_t at[kItems][3];
    bool set[kItems];
    unsigned votes[kItems];
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const std::int64_t i = step + j * kThreads + threadIdx.x;
      set[j] = false;
      if (i < end) {
        offsets(params.space, i, at[j]);
        set[j] = is_set(params.flags, at[j][1], rule);
      }
      votes[j] = __ballot_sync(0xffffffff, set[j]);
      if (lane == 0) warps[turn][j][warp] = __popc(votes[j]);
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      std::int64_t mine = start + __popc(votes[j] & lower);
      for (unsigned w = 0; w < kWarps; ++w) {
        if (w < warp) mine += warps[turn][j][w];
        start += warps[turn][j][w];
      }
      if (set[j]) write(mine, step + j * kThreads + threadIdx.x, at[j]);
    }
  }
}

struct Shape {
  int ndim;
  std::int64_t sizes[64];
};

__global__ void __launch_bounds__(kThreads)
    write_coordinates(CompactParams params, FlagRule rule, std::int64_t slice, const std::int64_t* starts, Shape shape,
                      std::int64_t* out, std::int64_t row_step, std::int64_t dim_step, std::int64_t limit) {
  for_each_set(params, rule, slice, starts, [&](std::int64_t p, std::int64_t i, const std::int64_t(&)[3]) {
    if (p >= limit) return;
    std::int64_t rest = i;
    for (int d = shape.ndim - 1; d >= 0; --d) {
      const std::int64_t quotient = d == 0 ? 0 : rest / shape.sizes[d];
      out[p * row_step + d * dim_step] = rest - quotient * shape.sizes[d];
      rest = quotient;
    }
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads) write_values(CompactParams params, FlagRule rule, std::int64_t slice,
                                                         const std::int64_t* starts, T* out, const T* values) {
  for_each_set(params, rule, slice, starts,
               [&](std::int64_t p, std::int64_t, const std::int64_t(&at)[3]) { out[p] = values[at[2]]; });
}

__global__ void __launch_bounds__(kThreads)
    fill_rest(const std::int64_t* count, int ndim, std::int64_t* out, std::int64_t row_step, std::int64_t dim_step,
              std::int64_t limit, std::int64_t value) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t p = *count + std::int64_t{blockIdx.x} * kThreads + threadIdx.x; p < limit; p += step) {
    for (int d = 0; d < ndim; ++d) out[p * row_step + d * dim_step] = value;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    expand(const std::int64_t* ends, std::int64_t rows, T* out, std::int64_t total) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < total; i += step) {
    std::int64_t low = 0, high = rows;  // the first row that ends after i
    while (low < high) {
      const std::int64_t middle = low + (high - low) / 2;
      if (ends[middle] > i)
        high = middle;
      else
        low = middle + 1;
    }
    out[i] = static_cast<T>(low);
  }
}

__global__ void __launch_bounds__(kThreads)
    note_negative(const void* values, DType dtype, std::int64_t n, std::int64_t stride, std::int64_t* flag) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += step) {
    if (static_cast<std::int64_t>(load_integer(values, i * stride, dtype)) < 0) *flag = 1;
  }
}

std::int64_t slice_of(std::int64_t numel) {
  const std::int64_t slices = slices_for(numel), even = (numel + slices - 1) / slices;
  return (even + kStep - 1) / kStep * kStep;
}

}  // namespace

std::int64_t compact_entries(std::int64_t numel) { return slices_for(numel) + 1; }

int compact_count(const CompactParams& params, std::int64_t* starts, Stream stream) {
  FlagRule rule;
  if (!flag_rule(params.flag_dtype, rule)) return kNoKernel;
  const std::int64_t slices = slices_for(params.space.numel);
  count_slices<<<static_cast<unsigned>(slices), kThreads, 0, stream>>>(params, rule, slice_of(params.space.numel),
                                                                       starts);
  make_starts<<<1, kSlicesMax, 0, stream>>>(starts, static_cast<int>(slices));
  return cudaGetLastError();
}

int compact_coordinates(const CompactParams& params, const std::int64_t* starts, int ndim, const std::int64_t* sizes,
                        std::int64_t* out, std::int64_t row_step, std::int64_t dim_step, std::int64_t limit,
                        Stream stream) {
  FlagRule rule;
  Shape shape{ndim, {}};
  if (!flag_rule(params.flag_dtype, rule) || ndim > 64) return kNoKernel;
  if (params.space.numel == 0 || ndim == 0 || limit == 0) return 0;
  for (int d = 0; d < ndim; ++d) shape.sizes[d] = sizes[d];
  write_coordinates<<<static_cast<unsigned>(slices_for(params.space.numel)), kThreads, 0, stream>>>(
      params, rule, slice_of(params.space.numel), starts, shape, out, row_step, dim_step, limit);
  return cudaGetLastError();
}

int compact_fill_rest(const std::int64_t* count, int ndim, std::int64_t* out, std::int64_t row_step,
                      std::int64_t dim_step, std::int64_t limit, std::int64_t value, Stream stream) {
  if (limit == 0 || ndim == 0) return 0;
  fill_rest<<<blocks_for(limit, kThreads), kThreads, 0, stream>>>(count, ndim, out, row_step, dim_step, limit, value);
  return cudaGetLastError();
}

int compact_values(const CompactParams& params, const std::int64_t* starts, void* out, const void* values,
                   int element_bytes, Stream stream) {
  FlagRule rule;
  if (!flag_rule(params.flag_dtype, rule)) return kNoKernel;
  if (params.space.numel == 0) return 0;
  return dispatch_bytes(element_bytes, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    write_values<<<static_cast<unsigned>(slices_for(params.space.numel)), kThreads, 0, stream>>>(
        params, rule, slice_of(params.space.numel), starts, static_cast<T*>(out), static_cast<const T*>(values));
    return cudaGetLastError();
  });
}

int expand_rows(const std::int64_t* ends, std::int64_t rows, void* out, bool out_int32, std::int64_t total,
                Stream stream) {
  if (total == 0) return 0;
  const unsigned grid = blocks_for(total, kThreads);
  if (out_int32) {
    expand<<<grid, kThreads, 0, stream>>>(ends, rows, static_cast<std::int32_t*>(out), total);
  } else {
    expand<<<grid, kThreads, 0, stream>>>(ends, rows, static_cast<std::int64_t*>(out), total);
  }
  return cudaGetLastError();
}

int find_negative(const void* values, DType dtype, std::int64_t n, std::int64_t step, std::int64_t* flag,
                  Stream stream) {
  if (n == 0) return 0;
  note_negative<<<blocks_for(n, kThreads), kThreads, 0, stream>>>(values, dtype, n, step, flag);
  return cudaGetLastError();
}

}  // namespace untorch::kernels::cuda
