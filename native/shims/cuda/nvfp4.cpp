// untorch::nvfp4_linear on CUDA.
#include "kernels/cuda/w4a16/nvfp4.h"

#include "kernels/cuda/w4a16/heuristic.h"
#include "kernels/cuda/w4a16/nvfp4_heuristic.h"
#include "shims/cuda/nvfp4_prefill.h"
#include "shims/cuda/w4a16_linear.h"
#include "shims/nvfp4_checks.h"
#include "shims/unpack.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

using kernels::cuda::Nvfp4Gemm;
using kernels::cuda::Nvfp4Path;

// For benchmarks, which measure where one kernel should take over from the other.
const kernels::cuda::Nvfp4Limits& limits() {
  static const kernels::cuda::Nvfp4Limits made = [] {
    kernels::cuda::Nvfp4Limits out;
    if (const std::int64_t rows = from_environment("UNTORCH_NVFP4_GEMV_M", -1); rows >= 0) out.narrow.set(rows);
    if (const std::int64_t rows = from_environment("UNTORCH_NVFP4_SM90_M", -1); rows >= 0) out.stream.set(rows);
    out.tile_rows = from_environment("UNTORCH_NVFP4_TILE_M", out.tile_rows);
    out.mma_rows = from_environment("UNTORCH_NVFP4_SM80_M", out.mma_rows);
    out.mma_rows_alone = from_environment("UNTORCH_NVFP4_SM80_M", out.mma_rows_alone);
    out.fp8_rows = from_environment("UNTORCH_NVFP4_FP8_M", out.fp8_rows);
    out.fp4_rows = from_environment("UNTORCH_NVFP4_FP4_M", out.fp4_rows);
    out.fp8_fast_accumulation = from_environment("UNTORCH_NVFP4_FP8_FAST_ACCUMULATION", 0) != 0;
    out.fp4_emulated = from_environment("UNTORCH_NVFP4_FP4_EMULATED", 0) != 0;
    return out;
  }();
  return made;
}

void multiply_nvfp4(const char* op, const OnDevice& on, const Nvfp4Gemm& p, Nvfp4Path path, const Tensor& out,
                    const Tensor* bias) {
  if (path == Nvfp4Path::kGemv) {
    on.launched(kernels::cuda::nvfp4_gemv(p, on.stream()));
    return;
  }
  if (path == Nvfp4Path::kDequantizeChunks) {
    const auto bytes = static_cast<std::int64_t>(element_size(out.dtype()));
    const std::int64_t chunk = kernels::cuda::dequantize_chunk_n(p, bytes, on.properties().l2_bytes);
    gemm_dequantize_chunks(op, on, p, out, bias, chunk, [&](std::int64_t first, std::int64_t columns, void* to) {
      return kernels::cuda::nvfp4_dequantize(p, first, columns, to, on.stream());
    });
    return;
  }
  if (path == Nvfp4Path::kFloat8) {
    multiply_nvfp4_float8(op, on, p, out, limits().fp8_fast_accumulation);
    return;
  }
  if (path == Nvfp4Path::kFloat4) {
    multiply_nvfp4_float4(op, on, p, out, limits().fp4_emulated);
    return;
  }
  const bool streams = path == Nvfp4Path::kGemmSm90;
  const std::size_t bytes =
      streams ? kernels::cuda::nvfp4_gemm_sm90_workspace(p) : kernels::cuda::nvfp4_gemm_sm80_workspace(p);
  const StorageRef workspace = bytes > 0 ? on.scratch(bytes) : StorageRef();
  Nvfp4Gemm with = p;
  if (workspace) with.workspace = static_cast<float*>(workspace->data());
  on.launched(streams ? kernels::cuda::nvfp4_gemm_sm90(with, on.stream())
                      : kernels::cuda::nvfp4_gemm_sm80(with, on.stream()));
}

// What is left where x has no columns: cuBLAS has no such product, and the weight may have none either.
TensorPtr bias_alone(const OnDevice& on, const Tensor& x, const Tensor* bias, const Nvfp4Shape& shape) {
  TensorPtr out = Tensor::zeros(shape.out_sizes, x.dtype(), on.device());
  if (bias != nullptr) copy(*out, *bias);
  return out;
}

TensorPtr linear(const char* op, const OnDevice& on, const Tensor& x, const Tensor& weight, const Tensor& block_scale,
                 const Tensor& global_scale, const Tensor* bias, const Nvfp4Shape& shape,
                 kernels::Nvfp4Prefill prefill) {
  if (shape.m == 0 || shape.n == 0) return Tensor::empty(shape.out_sizes, x.dtype(), on.device());
  if (shape.x_width == 0) return bias_alone(on, x, bias, shape);
  TensorPtr out = Tensor::empty(shape.out_sizes, x.dtype(), on.device());
  Nvfp4Gemm p;
  p.dtype = x.dtype();
  p.m = shape.m, p.n = shape.n, p.k = shape.k;
  p.inner_k_tiles = shape.inner_k_tiles;
  describe_gpu(on, p);
  p.tile_rows = static_cast<int>(limits().tile_rows);
  const Tensor* const whole = dequantized_weight(weight, x.dtype(), shape.n, shape.k, block_scale, &global_scale);
  const Nvfp4Path path = kernels::cuda::choose_nvfp4_kernel(p, limits(), prefill, whole != nullptr);
  const bool apart = path != Nvfp4Path::kGemv && path != Nvfp4Path::kGemmSm80;
  const W4A16Activations rows = w4a16_activations(on, x, shape.m, shape.k, shape.x_width, apart);
  p.x = rows.tensor->raw(), p.x_row = rows.stride, p.x_width = rows.width;
  const TensorPtr added = bias == nullptr ? nullptr : contiguous(*bias);
  p.bias = added == nullptr ? nullptr : added->raw();
  p.out = out->raw();
  if (path == Nvfp4Path::kDequantized) {
    gemm_dequantized(op, on, p, *out, added.get(), *whole);
    return out;
  }
  const TensorPtr codes = aligned_cuda(weight), scales = aligned_cuda(block_scale);
  p.weight = codes->raw(), p.block_scales = scales->raw();
  p.global_scales = global_scale.data<float>(), p.row_scales = shape.row_scales;
  multiply_nvfp4(op, on, p, path, *out, added.get());
  return out;
}

TensorPtr unpack(const Tensor& weight, const Tensor& block_scale, const Tensor& global_scale, DType dtype) {
  constexpr const char* op = "nvfp4_linear";
  const Nvfp4Shape shape = check_nvfp4_weight(op, weight, block_scale, global_scale);
  const OnDevice on(op, weight, {&block_scale, &global_scale});
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

[[maybe_unused]] const bool registered = [] {
  cuda_dequantizers.nvfp4 = unpack;
  return true;
}();

}  // namespace

// x [.., k_in] · weightᵀ + bias, for bfloat16, float16 and, slower, float32. prefill: "exact", "fp8" or "fp4".
UNTORCH_SHIM aoti_torch_cuda_nvfp4_linear(AtenTensorHandle x, AtenTensorHandle weight_packed,
                                          AtenTensorHandle block_scale, AtenTensorHandle global_scale,
                                          AtenTensorHandle* bias, const char* prefill, AtenTensorHandle* ret0) {
  constexpr const char* op = "nvfp4_linear";
  return guarded(op, [&] {
    const Tensor &input = cuda_input(x, op, "x"), &packed = cuda_input(weight_packed, op, "weight_packed"),
                 &scales = cuda_input(block_scale, op, "block_scale"),
                 &global = cuda_input(global_scale, op, "global_scale");
    const Tensor* const added = optional_cuda_input(bias, op, "bias");
    check(ret0 != nullptr, op, ": output pointer is null");
    const Nvfp4Shape shape = check_nvfp4_linear(op, input, packed, scales, global, added);
    const kernels::Nvfp4Prefill wanted = check_prefill(op, prefill);
    const OnDevice on(op, input, {&packed, &scales, &global, added});
    check_w4a16_gpu(op, "NVFP4", on);
    if (!(limits().fp4_emulated && wanted == kernels::Nvfp4Prefill::kFloat4)) check_prefill_gpu(op, wanted, on);
    give(ret0, linear(op, on, input, packed, scales, global, added, shape, wanted), op);
  });
}
