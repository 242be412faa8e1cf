// nvfp4_linear at large M with quantized activations, on CUDA: W8A8 in FP8, and W4A4 in NVFP4, by cuBLASLt.
#include "shims/nvfp4_prefill_cuda.h"

#include <algorithm>

#include "cuda/blas.h"
#include "kernels/cuda/quantize/fp8_rows.h"
#include "kernels/cuda/quantize/nvfp4_operands.h"
#include "kernels/cuda/w4a16/heuristic.h"
#include "kernels/cuda/w4a16/nvfp4_heuristic.h"
#include "kernels/gemm.h"

namespace untorch::shims {
namespace {

constexpr std::int64_t kStep = 16;  // elements: cuBLASLt wants sizes of FP8 GEMMs to be multiples of it
constexpr std::int64_t kMaxSums = std::int64_t{64} << 20;  // float32 accumulators that wait to be scaled
// FLOP/s of an SM: twice and four times those of 16-bit operands.
constexpr double kFp8FlopsPerSm = 12e12, kFp4FlopsPerSm = 24e12;

std::int64_t rounded_up(std::int64_t size) { return (size + kStep - 1) / kStep * kStep; }

// At most `columns`, and so many that there is room for their accumulators.
std::int64_t columns_of_sums(std::int64_t m, std::int64_t columns) {
  return std::min(columns, std::max<std::int64_t>(kMaxSums / m / 256 * 256, 256));
}

// The scaling of the accumulators of columns [n0, n0 + n); the caller sets row and column scales.
kernels::cuda::ScaledSums scaled_sums(const kernels::cuda::Nvfp4Gemm& p, const Tensor& out, std::int64_t n0,
                                      std::int64_t n, const StorageRef& sums) {
  kernels::cuda::ScaledSums scaled;
  scaled.m = p.m, scaled.n = n;
  scaled.sums = static_cast<const float*>(sums->data()), scaled.sums_row = rounded_up(n);
  const std::size_t offset = static_cast<std::size_t>(n0) * element_size(out.dtype());
  if (p.bias != nullptr) scaled.bias = static_cast<const std::byte*>(p.bias) + offset;
  scaled.out = static_cast<std::byte*>(out.raw()) + offset;
  scaled.dtype = out.dtype(), scaled.out_row = p.n;
  return scaled;
}

// N is padded to a multiple of 16: the padding columns have accumulators, too.
void gemm_to_sums(const char* op, const OnDevice& on, cuda::BlasGemm gemm, const StorageRef& sums,
                  const char* instead) {
  gemm.n = rounded_up(gemm.n);
  gemm.d = sums->data(), gemm.d_dtype = DType::kFloat32, gemm.ldd = gemm.n;
  if (!cuda::blas_gemm(op, gemm, on.index(), on.stream())) {
    throw_error(ErrorKind::kUnsupported, op, ": cuBLAS ", cuda::try_blas(nullptr), " has no algorithm for ",
                dtype_name(gemm.a.dtype), " [", gemm.m, ", ", gemm.k, "] times [", gemm.k, ", ", gemm.n,
                "] on this GPU: quantise with prefill=", instead);
  }
}

// Where cuBLASLt has no GEMM with row-wise scales for this GPU, these sizes or this dtype.
void gemm_and_scale(const char* op, const OnDevice& on, const cuda::BlasGemm& gemm, const kernels::cuda::Nvfp4Gemm& p,
                    const Tensor& out, std::int64_t n0, const StorageRef& sums) {
  const std::int64_t step = columns_of_sums(p.m, gemm.n);
  cuda::BlasGemm part = gemm;
  part.scale_a = part.scale_b = nullptr, part.rowwise_scales = false, part.bias = nullptr;
  for (std::int64_t at = 0; at < gemm.n; at += step) {
    part.n = std::min(step, gemm.n - at);
    part.b.data = static_cast<const std::byte*>(gemm.b.data) + at * gemm.b.ld;
    kernels::cuda::ScaledSums scaled = scaled_sums(p, out, n0 + at, part.n, sums);
    scaled.row = gemm.scale_a, scaled.column = gemm.scale_b + at;
    gemm_to_sums(op, on, part, sums, "'exact'");
    on.launched(kernels::cuda::scale_rows_and_columns(scaled, on.stream()));
  }
}

}  // namespace

void check_prefill_gpu(const char* op, kernels::Nvfp4Prefill prefill, const OnDevice& on) {
  const cuda::DeviceProperties& gpu = on.properties();
  if (const char* const obstacle = kernels::cuda::prefill_obstacle(prefill, gpu.major, gpu.minor)) {
    throw_error(ErrorKind::kUnsupported, op, ": ", obstacle, "; ", device_name(on.device()), ", ", gpu.name, ", is ",
                gpu.architecture());
  }
}

void nvfp4_linear_fp8(const char* op, const OnDevice& on, const kernels::cuda::Nvfp4Gemm& p, const Tensor& out,
                      bool fast_accumulation) {
  const std::int64_t width = rounded_up(p.x_width);
  const std::int64_t columns_at = (p.m + 63) / 64 * 64;  // column scales lie behind the rows', aligned
  const std::int64_t chunk = kernels::cuda::dequantize_chunk_n(p, 1, on.properties().l2_bytes, kFp8FlopsPerSm);
  const StorageRef x = on.scratch(static_cast<std::size_t>(p.m * width)),
                   weight = on.scratch(static_cast<std::size_t>(rounded_up(chunk) * p.k)),
                   factors = on.scratch(static_cast<std::size_t>(columns_at + p.n) * sizeof(float));
  auto* const row_scales = static_cast<float*>(factors->data());
  kernels::cuda::Fp8Rows rows;
  rows.dtype = p.dtype;
  rows.m = p.m, rows.width = p.x_width;
  rows.x = p.x, rows.row = p.x_stride;
  rows.to = x->data(), rows.to_width = width;
  rows.scales = row_scales;
  rows.factors = p.global_scales, rows.one_factor = !p.row_scales;
  rows.by = static_cast<float>(1 << kernels::cuda::kNvfp4Fp8Shift);
  rows.columns = row_scales + columns_at, rows.n = p.n;
  on.launched(kernels::cuda::quantize_rows_fp8(rows, on.stream()));
  // Sizes that are no multiple of 16 need the separate scaling, and so does float32, to which cuBLASLt adds no bias.
  const bool scales_in_epilogue = p.n % kStep == 0 && out.dtype() != DType::kFloat32;
  const std::size_t bytes = element_size(out.dtype());
  StorageRef sums;
  for (std::int64_t n0 = 0; n0 < p.n; n0 += chunk) {
    const std::int64_t columns = std::min(chunk, p.n - n0);
    on.launched(kernels::cuda::nvfp4_dequantize_fp8(p, n0, columns, weight->data(), on.stream()));
    const std::size_t offset = static_cast<std::size_t>(n0) * bytes;
    cuda::BlasGemm gemm;
    gemm.m = p.m, gemm.n = columns, gemm.k = width;
    gemm.a = {x->data(), DType::kFloat8E4M3FN, false, width, 0};
    gemm.b = {weight->data(), DType::kFloat8E4M3FN, true, p.k, 0};
    gemm.d = static_cast<std::byte*>(out.raw()) + offset;
    gemm.d_dtype = out.dtype(), gemm.ldd = p.n;
    gemm.scale_a = rows.scales, gemm.scale_b = rows.columns + n0, gemm.rowwise_scales = true;
    gemm.fast_accumulation = fast_accumulation;
    if (p.bias != nullptr) {
      gemm.bias = static_cast<const std::byte*>(p.bias) + offset, gemm.bias_dtype = out.dtype();
    }
    if (scales_in_epilogue && cuda::blas_gemm(op, gemm, on.index(), on.stream())) continue;
    if (!sums) {
      sums = on.scratch(static_cast<std::size_t>(p.m * rounded_up(columns_of_sums(p.m, chunk))) * sizeof(float));
    }
    gemm_and_scale(op, on, gemm, p, out, n0, sums);
  }
}

void nvfp4_linear_fp4(const char* op, const OnDevice& on, const kernels::cuda::Nvfp4Gemm& p, const Tensor& out,
                      bool emulated) {
  using namespace kernels::cuda;
  const auto bytes_of = [](std::int64_t count) { return static_cast<std::size_t>(count); };
  const auto padded = [](std::int64_t rows) {
    return (rows + kNvfp4ScaleTileRows - 1) / kNvfp4ScaleTileRows * kNvfp4ScaleTileRows;
  };
  // x's K, not the weight's: where x is narrower, the weight's further columns are not needed.
  const std::int64_t k = (p.x_width + kNvfp4KMultiple - 1) / kNvfp4KMultiple * kNvfp4KMultiple;
  const std::int64_t chunk = columns_of_sums(p.m, dequantize_chunk_n(p, 1, on.properties().l2_bytes, kFp4FlopsPerSm));
  const StorageRef x = on.scratch(bytes_of(p.m * k / 2)), x_scales = on.scratch(bytes_of(padded(p.m) * k / 16)),
                   row_scales = on.scratch(bytes_of(p.m) * sizeof(float)),
                   weight = on.scratch(bytes_of(rounded_up(chunk) * k / 2)),
                   weight_scales = on.scratch(bytes_of(padded(chunk) * k / 16)),
                   sums = on.scratch(bytes_of(p.m * rounded_up(chunk)) * sizeof(float));
  Nvfp4Rows rows;
  rows.dtype = p.dtype;
  rows.m = p.m, rows.width = p.x_width;
  rows.x = p.x, rows.row = p.x_stride;
  rows.k = k, rows.codes = x->data(), rows.block_scales = x_scales->data();
  rows.scales = static_cast<float*>(row_scales->data());
  on.launched(quantize_rows_nvfp4(rows, on.stream()));
  for (std::int64_t n0 = 0; n0 < p.n; n0 += chunk) {
    const std::int64_t columns = std::min(chunk, p.n - n0);
    on.launched(make_nvfp4_operand(p, n0, columns, k, weight->data(), weight_scales->data(), on.stream()));
    ScaledSums scaled = scaled_sums(p, out, n0, columns, sums);
    scaled.row = rows.scales, scaled.column = p.global_scales + (p.row_scales ? n0 : 0);
    scaled.one_column = !p.row_scales;
    if (emulated) {
      Nvfp4ReferenceGemm gemm;
      gemm.m = p.m, gemm.n = columns, gemm.k = k;
      gemm.a = x->data(), gemm.a_scales = x_scales->data();
      gemm.b = weight->data(), gemm.b_scales = weight_scales->data();
      gemm.sums = static_cast<float*>(sums->data()), gemm.sums_row = scaled.sums_row;
      on.launched(nvfp4_reference_gemm(gemm, on.stream()));
    } else {
      cuda::BlasGemm gemm;
      gemm.m = p.m, gemm.n = columns, gemm.k = k;
      gemm.a = {x->data(), DType::kFloat4E2M1FNx2, false, k, 0};
      gemm.b = {weight->data(), DType::kFloat4E2M1FNx2, true, k, 0};
      gemm.block_scale_a = x_scales->data(), gemm.block_scale_b = weight_scales->data();
      gemm_to_sums(op, on, gemm, sums, "'fp8' or 'exact', or install cuBLAS of CUDA 12.8 or newer");
    }
    on.launched(scale_rows_and_columns(scaled, on.stream()));
  }
}

}  // namespace untorch::shims
