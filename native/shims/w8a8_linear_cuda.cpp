// w8a8_linear on CUDA: the algorithm, its operands and workspace, and its launch.
#include "shims/w8a8_linear.h"

#include <algorithm>

#include "cuda/blas.h"
#include "kernels/cuda/quantize/fp8_rows.h"
#include "kernels/cuda/w4a16/heuristic.h"
#include "kernels/cuda/w8a8/gemm_plan.h"
#include "kernels/cuda/w8a8/w8a8.h"
#include "kernels/gemm.h"
#include "shims/destination.h"
#include "shims/w4a16_cuda.h"

namespace untorch::shims {
namespace {

using kernels::cuda::W8Gemm;

constexpr std::int64_t kMaxSums = std::int64_t{64} << 20;  // accumulators that wait to be scaled

// Up to this M, FP8 is scaled apart, too: cuBLASLt's GEMMs with scales of rows are slow there. The environment
// overrides it, for benchmarks.
std::int64_t max_m_of_sums() {
  static const std::int64_t m = from_environment("UNTORCH_W8A8_SUMS_M", 16);
  return m;
}

// Up to this M, where there is a choice, few rows are split for WGMMA. The environment overrides it: the GEMV of other
// GPUs can be tested on one of sm_90.
std::int64_t max_m_of_split_gemm() {
  static const std::int64_t m = from_environment("UNTORCH_W8A8_SPLIT_M", kernels::cuda::kW8GemvMaxM);
  return m;
}

std::size_t bytes_of(std::int64_t count) { return static_cast<std::size_t>(count); }

bool is_fp8(const W8Gemm& p) { return p.weight_dtype == DType::kFloat8E4M3FN; }

// x in 8 bits, [rows, k], and the weight.
cuda::BlasGemm gemm_of(const W8Gemm& p, std::int64_t rows, const StorageRef& x) {
  cuda::BlasGemm gemm;
  gemm.m = rows, gemm.n = p.n, gemm.k = p.k;
  gemm.a = {x->data(), p.weight_dtype, false, p.k, 0};
  gemm.b = {p.weight, p.weight_dtype, true, p.k, 0};
  return gemm;
}

// Sums of all columns, some at a time, and their scaling: for int8, and for FP8 where cuBLASLt does not scale rows.
void gemm_and_scale(const char* op, const OnDevice& on, const W8Gemm& p, const cuda::BlasGemm& whole,
                    const float* row_scales, const Tensor& out) {
  const std::int64_t step = std::min(p.n, std::max<std::int64_t>(kMaxSums / p.m / 256 * 256, 256));
  const StorageRef sums = on.scratch(bytes_of(p.m * step) * 4);
  for (std::int64_t at = 0; at < p.n; at += step) {
    cuda::BlasGemm gemm = whole;
    gemm.n = std::min(step, p.n - at);
    gemm.b.data = static_cast<const std::byte*>(p.weight) + at * p.k;
    gemm.d = sums->data(), gemm.ldd = gemm.n;
    gemm.d_dtype = is_fp8(p) ? DType::kFloat32 : DType::kInt32;
    if (!cuda::blas_gemm(op, gemm, on.index(), on.stream())) {
      if (is_fp8(p)) {
        throw_error(ErrorKind::kUnsupported, op, ": cuBLAS ", cuda::try_blas(nullptr), " has no algorithm for FP8 [",
                    p.m, ", ", p.k, "] times [", p.k, ", ", gemm.n, "] on this GPU");
      }
      kernels::Int8Gemm own;
      own.m = p.m, own.n = gemm.n, own.k = p.k;
      own.a = whole.a.data, own.a_row = p.k, own.a_col = 1;
      own.b = gemm.b.data, own.b_row = 1, own.b_col = p.k;
      own.out = sums->data(), own.out_row = gemm.n, own.out_col = 1;
      on.launched(kernels::cuda::gemm_int8(own, on.stream()));
    }
    const std::size_t offset = bytes_of(at) * element_size(out.dtype());
    kernels::cuda::ScaledSums scaled;
    scaled.m = p.m, scaled.n = gemm.n;
    scaled.sums = sums->data(), scaled.integer_sums = !is_fp8(p), scaled.sums_row = gemm.n;
    scaled.row = row_scales, scaled.column = p.scales + at;
    if (p.bias != nullptr) scaled.bias = static_cast<const std::byte*>(p.bias) + offset;
    scaled.out = static_cast<std::byte*>(out.raw()) + offset;
    scaled.dtype = out.dtype(), scaled.out_row = p.n;
    on.launched(kernels::cuda::scale_rows_and_columns(scaled, on.stream()));
  }
}

void linear_of_few_rows(const OnDevice& on, W8Gemm& p) {
  if (p.m > max_m_of_split_gemm() || !kernels::cuda::has_w8_split_gemm_sm90(p)) {
    on.launched(kernels::cuda::w8_gemv(p, on.stream()));
    return;
  }
  const StorageRef x = on.scratch(
                       bytes_of(kernels::cuda::w8_pieces(p.weight_dtype) * kernels::cuda::kW8GemvMaxM * p.k)),
                   scales = on.scratch(kernels::cuda::kW8GemvMaxM * sizeof(float)),
                   workspace = on.scratch(kernels::cuda::w8_gemm_workspace(p));
  const kernels::cuda::SplitRows rows{static_cast<std::uint8_t*>(x->data()), static_cast<float*>(scales->data())};
  on.launched(kernels::cuda::w8_split_x(p, rows, on.stream()));
  p.workspace = static_cast<float*>(workspace->data());
  on.launched(kernels::cuda::w8_split_gemm_sm90(p, rows, on.stream()));
}

// By w8_gemm_sm90, of rows of 8 bits.
void multiply_sm90(const OnDevice& on, W8Gemm& p, const StorageRef& x, const float* row_scales) {
  const StorageRef workspace = on.scratch(kernels::cuda::w8_gemm_workspace(p));
  p.workspace = static_cast<float*>(workspace->data());
  on.launched(kernels::cuda::w8_gemm_sm90(p, x->data(), row_scales, on.stream()));
}

void linear_int8(const char* op, const OnDevice& on, W8Gemm& p, const Tensor& out) {
  const StorageRef x = on.scratch(bytes_of(p.m * p.k)), scales = on.scratch(bytes_of(p.m) * sizeof(float));
  kernels::cuda::W8Rows rows;
  rows.dtype = p.dtype, rows.m = p.m, rows.width = p.x_width, rows.x = p.x, rows.row = p.x_stride;
  rows.to = x->data(), rows.to_width = p.k;
  rows.scales = static_cast<float*>(scales->data()), rows.pdl = p.pdl;
  on.launched(kernels::cuda::quantize_rows_int8(rows, on.stream()));
  if (kernels::cuda::has_w8_gemm_sm90(p)) {
    multiply_sm90(on, p, x, rows.scales);
    return;
  }
  gemm_and_scale(op, on, p, gemm_of(p, p.m, x), rows.scales, out);
}

void linear_fp8(const char* op, const OnDevice& on, W8Gemm& p, const Tensor& out) {
  const StorageRef x = on.scratch(bytes_of(p.m * p.k)), scales = on.scratch(bytes_of(p.m) * sizeof(float));
  kernels::cuda::Fp8Rows rows;
  rows.dtype = p.dtype, rows.m = p.m, rows.width = p.x_width, rows.x = p.x, rows.row = p.x_stride;
  rows.to = x->data(), rows.to_width = p.k;
  rows.scales = static_cast<float*>(scales->data()), rows.pdl = p.pdl;
  on.launched(kernels::cuda::quantize_rows_fp8(rows, on.stream()));
  if (prefers_fp8_gemm_sm90(p)) {
    multiply_sm90(on, p, x, rows.scales);
    return;
  }
  const cuda::BlasGemm sums = gemm_of(p, p.m, x);
  cuda::BlasGemm gemm = sums;
  gemm.d = out.raw(), gemm.d_dtype = out.dtype(), gemm.ldd = p.n;
  gemm.scale_a = rows.scales, gemm.scale_b = p.scales, gemm.rowwise_scales = true;
  if (p.bias != nullptr) gemm.bias = p.bias, gemm.bias_dtype = out.dtype();
  // cuBLASLt adds no bias to float32.
  const bool in_epilogue = p.bias == nullptr || out.dtype() != DType::kFloat32;
  if (in_epilogue && p.m > max_m_of_sums() && cuda::blas_gemm(op, gemm, on.index(), on.stream())) return;
  if (kernels::cuda::has_w8_gemm_sm90(p)) {
    multiply_sm90(on, p, x, rows.scales);
    return;
  }
  gemm_and_scale(op, on, p, sums, rows.scales, out);
}

// False where there is no such GEMM.
bool linear_fp8_blocks(const char* op, const OnDevice& on, W8Gemm& p, const Tensor& out) {
  const bool has_ours = kernels::cuda::has_w8_gemm_sm90(p);
  const bool has_blas = p.bias == nullptr || out.dtype() != DType::kFloat32;  // cuBLASLt adds no bias to float32
  if (!has_ours && !has_blas) return false;
  const std::int64_t m = kernels::cuda::w8_part_scales_row(p.m);
  const std::int64_t parts = (p.k + kernels::cuda::kW8ScaleBlock - 1) / kernels::cuda::kW8ScaleBlock;
  const StorageRef x = on.scratch(bytes_of(m * p.k)), scales = on.scratch(bytes_of(parts * m) * sizeof(float));
  kernels::cuda::W8Rows rows;
  rows.dtype = p.dtype, rows.m = p.m, rows.width = p.x_width, rows.x = p.x, rows.row = p.x_stride;
  rows.to = x->data(), rows.to_width = p.k;
  rows.scales = static_cast<float*>(scales->data()), rows.scales_row = m, rows.pdl = p.pdl;
  on.launched(kernels::cuda::quantize_parts_fp8(rows, on.stream()));
  if (has_ours && (!has_blas || prefers_fp8_gemm_sm90(p))) {
    multiply_sm90(on, p, x, rows.scales);
    return true;
  }
  // Rows behind the last are computed from what was there, and dropped.
  const StorageRef padded = m == p.m ? StorageRef() : on.scratch(bytes_of(m * p.n) * element_size(out.dtype()));
  cuda::BlasGemm gemm = gemm_of(p, m, x);
  gemm.d = padded ? padded->data() : out.raw(), gemm.d_dtype = out.dtype(), gemm.ldd = p.n;
  gemm.scale_a = rows.scales, gemm.scale_b = p.scales, gemm.scales_of_128 = true;
  if (p.bias != nullptr) gemm.bias = p.bias, gemm.bias_dtype = out.dtype();
  if (!cuda::blas_gemm(op, gemm, on.index(), on.stream())) {
    if (has_ours) multiply_sm90(on, p, x, rows.scales);
    return has_ours;
  }
  if (padded) {
    const Tensor made(padded, 0, out.dtype(), out.sizes(), contiguous_strides(out.sizes()));
    copy(out, made);
  }
  return true;
}

}  // namespace

bool prefers_fp8_gemm_sm90(const W8Gemm& p) {
  // The environment overrides it, for benchmarks and tests.
  static const std::int64_t max_m = from_environment("UNTORCH_W8A8_FP8_M", kernels::cuda::kFp8GemmMaxM);
  // cuBLASLt leaves SMs idle where few outputs have many inputs.
  const bool is_deep = p.scales_row == 0 && p.k >= 2 * p.n;
  return p.m <= (is_deep ? 2 * max_m : max_m) && kernels::cuda::has_w8_gemm_sm90(p);
}

TensorPtr w8a8_linear_cuda(const char* op, const OnDevice& on, const Tensor& x, const Tensor& weight,
                           const Tensor& scale, const Tensor* bias, const W8A8Shape& shape, const Tensor* into) {
  check_w4a16_gpu(op, "8-bit", on);
  TensorPtr out = destination(op, into, shape.out_sizes, x.dtype(), on.device());
  if (shape.m == 0 || shape.n == 0) return out;
  const TensorPtr dense_bias = bias == nullptr ? nullptr : contiguous(*bias);
  if (shape.x_width == 0) {
    copy(*out, bias != nullptr ? *dense_bias : *Tensor::zeros(out->sizes(), out->dtype(), out->device()));
    return out;
  }
  W8Gemm p;
  p.dtype = x.dtype(), p.weight_dtype = weight.dtype();
  p.m = shape.m, p.n = shape.n, p.k = shape.k;
  describe_gpu(on, p);
  p.is_constant = weight.storage()->read_only();
  const W4A16Activations rows = w4a16_activations(on, x, shape.m, shape.k, shape.x_width, true);
  p.x = rows.tensor->raw(), p.x_stride = rows.stride, p.x_width = rows.width;
  p.bias = dense_bias == nullptr ? nullptr : dense_bias->raw();
  p.out = out->raw();
  const TensorPtr values = aligned_cuda(weight), scales = aligned_cuda(scale);
  p.weight = values->raw(), p.scales = scales->data<float>(), p.scales_row = shape.scales_row;
  const cuda::DeviceProperties& gpu = on.properties();
  if (p.m <= kernels::cuda::kW8GemvMaxM && p.k <= kernels::cuda::kW8GemvMaxK) {
    linear_of_few_rows(on, p);
  } else if (!is_fp8(p)) {
    linear_int8(op, on, p, *out);
  } else if (p.scales_row == 0 && gpu.major * 10 + gpu.minor >= 89) {
    linear_fp8(op, on, p, *out);
  } else if (p.scales_row == 0 || !p.has_wgmma || !linear_fp8_blocks(op, on, p, *out)) {
    const auto bytes = static_cast<std::int64_t>(element_size(out->dtype()));
    const std::int64_t chunk = kernels::cuda::dequantize_chunk_n(p, bytes, gpu.l2_bytes);
    gemm_dequantize_chunks(op, on, p, *out, dense_bias.get(), chunk, [&](std::int64_t n0, std::int64_t n, void* to) {
      return kernels::cuda::w8_dequantize(p, n0, n, to, on.stream());
    });
  }
  return out;
}

}  // namespace untorch::shims
