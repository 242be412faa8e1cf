// nvfp4_linear on CUDA: the algorithm (nvfp4_heuristic.h), its operands and workspace, and its launch.
#include "kernels/cuda/w4a16/nvfp4_heuristic.h"
#include "shims/destination.h"
#include "shims/nvfp4_linear.h"
#include "shims/nvfp4_prefill_cuda.h"
#include "shims/w4a16_cuda.h"

namespace untorch::shims {
namespace {

using kernels::Nvfp4Prefill;
using kernels::cuda::Nvfp4Algorithm;
using kernels::cuda::Nvfp4Gemm;

// The environment overrides thresholds, for benchmarks.
const kernels::cuda::Nvfp4Thresholds& thresholds() {
  static const kernels::cuda::Nvfp4Thresholds made = [] {
    kernels::cuda::Nvfp4Thresholds out;
    if (const std::int64_t m = from_environment("UNTORCH_NVFP4_GEMV_M", -1); m >= 0) out.gemv_max_m.set(m);
    if (const std::int64_t m = from_environment("UNTORCH_NVFP4_SM90_M", -1); m >= 0) out.sm90_max_m.set(m);
    out.sm90_tile_m = from_environment("UNTORCH_NVFP4_TILE_M", out.sm90_tile_m);
    out.sm80_max_m_beside_sm90 = from_environment("UNTORCH_NVFP4_SM80_M", out.sm80_max_m_beside_sm90);
    out.sm80_max_m = from_environment("UNTORCH_NVFP4_SM80_M", out.sm80_max_m);
    out.fp8_above_m = from_environment("UNTORCH_NVFP4_FP8_M", out.fp8_above_m);
    out.fp4_above_m = from_environment("UNTORCH_NVFP4_FP4_M", out.fp4_above_m);
    out.fp8_fast_accumulation = from_environment("UNTORCH_NVFP4_FP8_FAST_ACCUMULATION", 0) != 0;
    out.fp4_emulated = from_environment("UNTORCH_NVFP4_FP4_EMULATED", 0) != 0;
    return out;
  }();
  return made;
}

void launch(const char* op, const OnDevice& on, Nvfp4Gemm p, Nvfp4Algorithm algorithm, const Tensor& out,
            const Tensor* bias) {
  StorageRef workspace;
  const auto allocate_workspace = [&](std::size_t bytes) {
    if (bytes == 0) return;
    workspace = on.scratch(bytes);
    p.workspace = static_cast<float*>(workspace->data());
  };
  switch (algorithm) {
    case Nvfp4Algorithm::kGemv:
      on.launched(kernels::cuda::nvfp4_gemv(p, on.stream()));
      break;
    case Nvfp4Algorithm::kGemmSm80:
      allocate_workspace(kernels::cuda::nvfp4_gemm_sm80_workspace(p));
      on.launched(kernels::cuda::nvfp4_gemm_sm80(p, on.stream()));
      break;
    case Nvfp4Algorithm::kGemmSm90:
      allocate_workspace(kernels::cuda::nvfp4_gemm_sm90_workspace(p));
      on.launched(kernels::cuda::nvfp4_gemm_sm90(p, on.stream()));
      break;
    case Nvfp4Algorithm::kFp8:
      nvfp4_linear_fp8(op, on, p, out, thresholds().fp8_fast_accumulation);
      break;
    case Nvfp4Algorithm::kFp4:
      nvfp4_linear_fp4(op, on, p, out, thresholds().fp4_emulated);
      break;
    case Nvfp4Algorithm::kDequantizeChunks:
    case Nvfp4Algorithm::kDequantized: {
      const auto bytes = static_cast<std::int64_t>(element_size(out.dtype()));
      const std::int64_t chunk = kernels::cuda::dequantize_chunk_n(p, bytes, on.properties().l2_bytes);
      gemm_dequantize_chunks(op, on, p, out, bias, chunk, [&](std::int64_t n0, std::int64_t n, void* to) {
        return kernels::cuda::nvfp4_dequantize(p, n0, n, to, on.stream());
      });
      break;
    }
  }
}

// K = 0: cuBLAS has no such GEMM, and the weight may have no bytes either.
TensorPtr bias_alone(TensorPtr out, const Tensor* bias) {
  copy(*out, bias != nullptr ? *bias : *Tensor::zeros(out->sizes(), out->dtype(), out->device()));
  return out;
}

}  // namespace

TensorPtr nvfp4_linear_cuda(const char* op, const OnDevice& on, const Tensor& x, const Tensor& weight,
                            const Tensor& block_scale, const Tensor& global_scale, const Tensor* bias,
                            const Nvfp4Shape& shape, Nvfp4Prefill prefill, const Tensor* into) {
  check_w4a16_gpu(op, "NVFP4", on);
  if (!(thresholds().fp4_emulated && prefill == Nvfp4Prefill::kFp4)) check_prefill_gpu(op, prefill, on);
  TensorPtr out = destination(op, into, shape.out_sizes, x.dtype(), on.device());
  if (shape.m == 0 || shape.n == 0) return out;
  if (shape.x_width == 0) return bias_alone(std::move(out), bias);
  Nvfp4Gemm p;
  p.dtype = x.dtype();
  p.m = shape.m, p.n = shape.n, p.k = shape.k;
  p.inner_k_tiles = shape.inner_k_tiles;
  describe_gpu(on, p);
  p.is_constant = weight.storage()->read_only() && block_scale.storage()->read_only();
  p.tile_m = static_cast<int>(thresholds().sm90_tile_m);
  const Tensor* const dequantized = dequantized_weight(weight, x.dtype(), shape.n, shape.k, block_scale, &global_scale);
  const Nvfp4Algorithm algorithm =
      kernels::cuda::choose_nvfp4_algorithm(p, thresholds(), prefill, dequantized != nullptr);
  const bool disjoint_rows = algorithm != Nvfp4Algorithm::kGemv && algorithm != Nvfp4Algorithm::kGemmSm80;
  const W4A16Activations rows = w4a16_activations(on, x, shape.m, shape.k, shape.x_width, disjoint_rows);
  p.x = rows.tensor->raw(), p.x_stride = rows.stride, p.x_width = rows.width;
  const TensorPtr dense_bias = bias == nullptr ? nullptr : contiguous(*bias);
  p.bias = dense_bias == nullptr ? nullptr : dense_bias->raw();
  p.out = out->raw();
  if (algorithm == Nvfp4Algorithm::kDequantized) {
    gemm_dequantized(op, on, p, *out, dense_bias.get(), *dequantized);
    return out;
  }
  const TensorPtr codes = aligned_cuda(weight), scales = aligned_cuda(block_scale);
  p.weight = codes->raw(), p.block_scales = scales->raw();
  p.global_scales = global_scale.data<float>(), p.row_scales = shape.row_scales;
  launch(op, on, p, algorithm, *out, dense_bias.get());
  return out;
}

TensorPtr dequantize_nvfp4_cuda(const char* op, const OnDevice& on, const Tensor& weight, const Tensor& block_scale,
                                const Tensor& global_scale, const Nvfp4Shape& shape, DType dtype) {
  check_w4a16_gpu(op, "NVFP4", on);
  TensorPtr out = empty_dequantized(op, on, dtype, shape.n, shape.k);
  if (out->numel() == 0) return out;
  const TensorPtr codes = aligned_cuda(weight), scales = aligned_cuda(block_scale);
  Nvfp4Gemm p;
  p.dtype = dtype;
  p.n = shape.n, p.k = shape.k;
  p.inner_k_tiles = shape.inner_k_tiles;
  p.weight = codes->raw(), p.block_scales = scales->raw();
  p.global_scales = global_scale.data<float>(), p.row_scales = shape.row_scales;
  on.launched(kernels::cuda::nvfp4_dequantize(p, 0, p.n, out->raw(), on.stream()));
  return out;
}

}  // namespace untorch::shims
