// The iteration space of an elementwise kernel over N strided operands: dimensions of size 1 dropped, neighbours that
// are one run of memory in every operand merged, the smallest strides of the first operand innermost.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

namespace untorch {

inline constexpr int kMaxDims = 12;

template <int N>
struct Strided {
  int ndim = 0;  // at least 1 when numel > 0; dimension 0 is the innermost
  std::int64_t numel = 1;
  std::int64_t sizes[kMaxDims] = {};
  std::int64_t strides[N][kMaxDims] = {};  // elements

  // True when every operand is one dense run in the same order.
  bool contiguous() const {
    for (int n = 0; n < N; ++n) {
      if (ndim != 1 || strides[n][0] != 1) return false;
    }
    return true;
  }
};

// sizes: the result's shape, outermost first; strides[n]: operand n's strides for it (0 where it broadcasts).
// False when more than kMaxDims dimensions remain.
template <int N>
bool make_strided(std::span<const std::int64_t> sizes, const std::span<const std::int64_t> (&strides)[N],
                  Strided<N>& out) {
  struct Dim {
    std::int64_t size;
    std::int64_t stride[N];
  };
  Dim dims[64];
  int count = 0;
  out = {};
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    out.numel *= sizes[d];
    if (sizes[d] == 1) continue;
    if (count == 64) return false;
    dims[count].size = sizes[d];
    for (int n = 0; n < N; ++n) dims[count].stride[n] = strides[n][d];
    ++count;
  }
  std::stable_sort(dims, dims + count, [](const Dim& a, const Dim& b) { return a.stride[0] > b.stride[0]; });
  for (int d = count - 1; d >= 0; --d) {
    bool merges = out.ndim > 0;
    for (int n = 0; n < N && merges; ++n) {
      merges = dims[d].stride[n] == out.strides[n][out.ndim - 1] * out.sizes[out.ndim - 1];
    }
    if (merges) {
      out.sizes[out.ndim - 1] *= dims[d].size;
      continue;
    }
    if (out.ndim == kMaxDims) return false;
    out.sizes[out.ndim] = dims[d].size;
    for (int n = 0; n < N; ++n) out.strides[n][out.ndim] = dims[d].stride[n];
    ++out.ndim;
  }
  if (out.ndim == 0) {
    out.ndim = 1;
    out.sizes[0] = 1;
    for (int n = 0; n < N; ++n) out.strides[n][0] = 1;
  }
  return true;
}

#ifdef __CUDACC__
// The operands' element offsets of the iteration space's element `linear`.
template <int N>
__device__ __forceinline__ void offsets(const Strided<N>& space, std::int64_t linear, std::int64_t (&out)[N]) {
#pragma unroll
  for (int n = 0; n < N; ++n) out[n] = 0;
  if (space.numel <= 0x7fffffff) {  // 32-bit division is several times quicker
    auto rest = static_cast<std::uint32_t>(linear);
    for (int d = 0; d < space.ndim - 1; ++d) {
      const auto size = static_cast<std::uint32_t>(space.sizes[d]);
      const std::uint32_t quotient = rest / size, index = rest - quotient * size;
      rest = quotient;
#pragma unroll
      for (int n = 0; n < N; ++n) out[n] += index * space.strides[n][d];
    }
#pragma unroll
    for (int n = 0; n < N; ++n) out[n] += rest * space.strides[n][space.ndim - 1];
  } else {
    std::int64_t rest = linear;
    for (int d = 0; d < space.ndim - 1; ++d) {
      const std::int64_t quotient = rest / space.sizes[d], index = rest - quotient * space.sizes[d];
      rest = quotient;
#pragma unroll
      for (int n = 0; n < N; ++n) out[n] += index * space.strides[n][d];
    }
#pragma unroll
    for (int n = 0; n < N; ++n) out[n] += rest * space.strides[n][space.ndim - 1];
  }
}
#endif

}  // namespace untorch
