// int4_linear on CUDA: the algorithm (int4_heuristic.h), its operands and workspace, and its launch.
#include "kernels/cuda/w4a16/int4_heuristic.h"
#include "shims/destination.h"
#include "shims/int4_linear.h"
#include "shims/w4a16_cuda.h"

namespace untorch::shims {
namespace {

using kernels::cuda::Int4Algorithm;
using kernels::cuda::Int4Gemm;

// The environment overrides thresholds, for benchmarks.
const kernels::cuda::Int4Thresholds& thresholds() {
  static const kernels::cuda::Int4Thresholds made = [] {
    kernels::cuda::Int4Thresholds out;
    if (const std::int64_t m = from_environment("UNTORCH_INT4_GEMV_M", -1); m >= 0) out.gemv_max_m.set(m);
    if (const std::int64_t m = from_environment("UNTORCH_INT4_SM90_M", -1); m >= 0) out.sm90_max_m.set(m);
    out.sm90_tile_m = from_environment("UNTORCH_INT4_TILE_M", out.sm90_tile_m);
    out.sm80_max_m_beside_sm90 = from_environment("UNTORCH_INT4_SM80_M", out.sm80_max_m_beside_sm90);
    out.sm80_max_m = from_environment("UNTORCH_INT4_SM80_M", out.sm80_max_m);
    return out;
  }();
  return made;
}

}  // namespace

TensorPtr int4_linear_cuda(const char* op, const OnDevice& on, const Tensor& x, const Tensor& weight,
                           const Tensor& scales, const Tensor* bias, const Int4Shape& shape, const Tensor* into) {
  check_w4a16_gpu(op, "int4", on);
  TensorPtr out = destination(op, into, shape.out_sizes, x.dtype(), on.device());
  if (out->numel() == 0) return out;
  Int4Gemm p;
  p.dtype = x.dtype();
  p.m = shape.m, p.n = shape.n, p.k = shape.k;
  p.inner_k_tiles = shape.inner_k_tiles, p.group = shape.group;
  describe_gpu(on, p);
  p.is_constant = weight.storage()->read_only() && scales.storage()->read_only();
  p.tile_m = static_cast<int>(thresholds().sm90_tile_m);
  const Tensor* const dequantized = dequantized_weight(weight, x.dtype(), shape.n, shape.k, scales);
  const Int4Algorithm algorithm = kernels::cuda::choose_int4_algorithm(p, thresholds(), dequantized != nullptr);
  const bool disjoint_rows = algorithm != Int4Algorithm::kGemv && algorithm != Int4Algorithm::kGemmSm80;
  const W4A16Activations rows = w4a16_activations(on, x, shape.m, shape.k, shape.x_width, disjoint_rows);
  p.x = rows.tensor->raw(), p.x_stride = rows.stride, p.x_width = rows.width;
  const TensorPtr dense_bias = bias == nullptr ? nullptr : contiguous(*bias);
  p.bias = dense_bias == nullptr ? nullptr : dense_bias->raw();
  p.out = out->raw();
  if (algorithm == Int4Algorithm::kDequantized) {
    gemm_dequantized(op, on, p, *out, dense_bias.get(), *dequantized);
    return out;
  }
  const TensorPtr aligned_weight = aligned_cuda(weight), aligned_scales = aligned_cuda(*to_dtype(scales, x.dtype()));
  p.weight = aligned_weight->raw(), p.scales = aligned_scales->raw();
  StorageRef workspace;
  const auto allocate_workspace = [&](std::size_t bytes) {
    if (bytes == 0) return;
    workspace = on.scratch(bytes);
    p.workspace = static_cast<float*>(workspace->data());
  };
  switch (algorithm) {
    case Int4Algorithm::kGemv:
      on.launched(kernels::cuda::int4_gemv(p, on.stream()));
      break;
    case Int4Algorithm::kGemmSm80:
      allocate_workspace(kernels::cuda::int4_gemm_sm80_workspace(p));
      on.launched(kernels::cuda::int4_gemm_sm80(p, on.stream()));
      break;
    case Int4Algorithm::kGemmSm90:
      allocate_workspace(kernels::cuda::int4_gemm_sm90_workspace(p));
      on.launched(kernels::cuda::int4_gemm_sm90(p, on.stream()));
      break;
    case Int4Algorithm::kDequantizeChunks:
    case Int4Algorithm::kDequantized: {
      const auto bytes = static_cast<std::int64_t>(element_size(x.dtype()));
      const std::int64_t chunk = kernels::cuda::dequantize_chunk_n(p, bytes, on.properties().l2_bytes);
      gemm_dequantize_chunks(op, on, p, *out, dense_bias.get(), chunk, [&](std::int64_t n0, std::int64_t n, void* to) {
        return kernels::cuda::int4_dequantize(p, n0, n, to, on.stream());
      });
      break;
    }
  }
  return out;
}

TensorPtr dequantize_int4_cuda(const char* op, const OnDevice& on, const Tensor& weight, const Tensor& scales,
                               const Int4Shape& shape, DType dtype) {
  check_w4a16_gpu(op, "int4", on);
  TensorPtr out = empty_dequantized(op, on, dtype, shape.n, shape.k);
  if (out->numel() == 0) return out;
  const TensorPtr aligned_weight = aligned_cuda(weight), aligned_scales = aligned_cuda(*to_dtype(scales, dtype));
  Int4Gemm p;
  p.dtype = dtype;
  p.n = shape.n, p.k = shape.k;
  p.inner_k_tiles = shape.inner_k_tiles, p.group = shape.group;
  p.weight = aligned_weight->raw(), p.scales = aligned_scales->raw();
  on.launched(kernels::cuda::int4_dequantize(p, 0, p.n, out->raw(), on.stream()));
  return out;
}

}  // namespace untorch::shims
