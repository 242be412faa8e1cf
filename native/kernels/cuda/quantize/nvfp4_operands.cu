// Dynamic quantization of activations to NVFP4, and NVFP4 weights in cuBLASLt's layout: operands of a W4A4 GEMM.
//
// A thread has the 16 values of a block scale. Bytes: 2 an element read (4 of float32; rows twice, the second time from
// L1), 0.5625 written; of weights 0.5625 read and written. Never run on a GPU with FP4 tensor cores.
#include "kernels/cuda/quantize/nvfp4_operands.h"
#include "kernels/cuda/quantize/row_absmax.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kBlock = 16;

template <class T>
__global__ void __launch_bounds__(kThreads) quantize_rows_kernel(Nvfp4Rows p, std::int64_t rows) {
  const std::int64_t blocks = p.k / kBlock;
  auto* const codes = static_cast<std::uint64_t*>(p.codes);
  auto* const block_scales = static_cast<std::uint8_t*>(p.block_scales);
  for (std::int64_t m = blockIdx.x; m < rows; m += gridDim.x) {
    const T* const from = static_cast<const T*>(p.x) + m * p.row;
    const bool in_bounds = m < p.m;  // uniform over the CTA
    float by = 0.0f;
    if (in_bounds) {
      const RowAbsMax found = row_absmax(from, p.width);
      by = kE2m1Max * kE4m3Max / found.absmax;
      if (threadIdx.x == 0) {
        p.scales[m] = found.finite ? found.absmax / (kE2m1Max * kE4m3Max) : __uint_as_float(0x7fc00000u);
      }
    }
    for (std::int64_t block = threadIdx.x; block < blocks; block += kThreads) {
      std::uint32_t scale = 0;
      if (in_bounds) {
        float values[kBlock] = {};
        const std::int64_t k = block * kBlock;
        if (k < p.width) load_step(from + k, values);
        if (k + kStep < p.width) load_step(from + k + kStep, values + kStep);
        codes[m * blocks + block] = quantize_nvfp4_block(values, by, scale);
      }
      block_scales[nvfp4_scale_offset(m, block, p.k)] = static_cast<std::uint8_t>(scale);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    repack_weight_kernel(Nvfp4Gemm p, std::int64_t n0, std::int64_t n, std::int64_t rows, std::int64_t k,
                         std::uint64_t* __restrict__ codes, std::uint8_t* __restrict__ block_scales) {
  const std::int64_t blocks = k / kBlock, own = p.k / kBlock, step = std::int64_t{gridDim.x} * kThreads;
  const auto* const from = static_cast<const std::uint8_t*>(p.block_scales);
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < rows * blocks; i += step) {
    const std::int64_t column = i / blocks, block = i - column * blocks;
    std::uint32_t scale = 0;
    if (column < n) {
      std::uint64_t word = 0;
      if (block < own) {
        scale = from[(n0 + column) * own + block];
        word = nvfp4_block_codes(p, n0 + column, block) ^ ((scale & 0x80u) != 0 ? 0x8888888888888888ull : 0);
      }
      codes[i] = word;
    }
    block_scales[nvfp4_scale_offset(column, block, k)] = static_cast<std::uint8_t>(scale & 0x7fu);
  }
}

// 2 · E2M1, an integer.
__device__ __forceinline__ float doubled_e2m1(std::uint64_t codes, int i) {
  const auto code = static_cast<unsigned>(codes >> 4 * i) & 15u, size = code & 7u;
  const float value = static_cast<float>(size < 4 ? size : size < 6 ? 2 * size - 4 : 4 * size - 16);
  return code > 7u ? -value : value;
}

__device__ __forceinline__ float scale_value(const void* scales, std::int64_t at) {
  const std::uint32_t bits = static_cast<const std::uint8_t*>(scales)[at];
  return bits == 0x7fu ? __uint_as_float(0x7fc00000u) : e4m3_value(bits);
}

__global__ void __launch_bounds__(kThreads) reference_gemm_kernel(Nvfp4ReferenceGemm p) {
  const std::int64_t blocks = p.k / kBlock, step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < p.m * p.n; i += step) {
    const std::int64_t m = i / p.n, n = i - m * p.n;
    float sum = 0.0f;
    for (std::int64_t block = 0; block < blocks; ++block) {
      const std::uint64_t a = static_cast<const std::uint64_t*>(p.a)[m * blocks + block];
      const std::uint64_t b = static_cast<const std::uint64_t*>(p.b)[n * blocks + block];
      float part = 0.0f;
      for (int k = 0; k < kBlock; ++k) part += doubled_e2m1(a, k) * doubled_e2m1(b, k);
      sum += 0.25f * part * scale_value(p.a_scales, nvfp4_scale_offset(m, block, p.k)) *
             scale_value(p.b_scales, nvfp4_scale_offset(n, block, p.k));
    }
    p.sums[m * p.sums_row + n] = sum;
  }
}

std::int64_t padded_rows(std::int64_t rows) {
  return (rows + kNvfp4ScaleTileRows - 1) / kNvfp4ScaleTileRows * kNvfp4ScaleTileRows;
}

}  // namespace

int quantize_rows_nvfp4(const Nvfp4Rows& p, Stream stream) {
  const std::int64_t rows = padded_rows(p.m);
  if (rows == 0) return 0;
  return dispatch_floating(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if constexpr (std::is_same_v<T, double>) {
      return kNoKernel;
    } else {
      quantize_rows_kernel<T><<<blocks_for(rows, 1), kThreads, 0, stream>>>(p, rows);
      return cudaGetLastError();
    }
  });
}

int make_nvfp4_operand(const Nvfp4Gemm& p, std::int64_t n0, std::int64_t n, std::int64_t k, void* codes,
                       void* block_scales, Stream stream) {
  const std::int64_t rows = padded_rows(n), count = rows * (k / kBlock);
  if (count == 0) return 0;
  repack_weight_kernel<<<blocks_for(count, kThreads), kThreads, 0, stream>>>(
      p, n0, n, rows, k, static_cast<std::uint64_t*>(codes), static_cast<std::uint8_t*>(block_scales));
  return cudaGetLastError();
}

int nvfp4_reference_gemm(const Nvfp4ReferenceGemm& p, Stream stream) {
  if (p.m == 0 || p.n == 0) return 0;
  reference_gemm_kernel<<<blocks_for(p.m * p.n, kThreads), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace untorch::kernels::cuda
