// _weight_int4pack_mm and untorch::int4_linear on CUDA.
#include "kernels/cuda/w4a16/int4.h"

#include "kernels/cuda/w4a16/heuristic.h"
#include "kernels/cuda/w4a16/int4_heuristic.h"
#include "shims/cuda/w4a16_linear.h"
#include "shims/int4_checks.h"
#include "shims/unpack.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

using kernels::cuda::Int4Gemm;
using kernels::cuda::Int4Path;

// For benchmarks, which measure where one kernel should take over from the other.
const kernels::cuda::Int4Limits& limits() {
  static const kernels::cuda::Int4Limits made = [] {
    kernels::cuda::Int4Limits out;
    if (const std::int64_t rows = from_environment("UNTORCH_INT4_GEMV_M", -1); rows >= 0) out.narrow.set(rows);
    if (const std::int64_t rows = from_environment("UNTORCH_INT4_SM90_M", -1); rows >= 0) out.stream.set(rows);
    out.tile_rows = from_environment("UNTORCH_INT4_TILE_M", out.tile_rows);
    out.mma_rows = from_environment("UNTORCH_INT4_SM80_M", out.mma_rows);
    out.mma_rows_alone = from_environment("UNTORCH_INT4_SM80_M", out.mma_rows_alone);
    return out;
  }();
  return made;
}

TensorPtr multiply_int4(const char* op, const OnDevice& on, const Tensor& x, const Tensor& weight, const Tensor& scales,
                        const Tensor* bias, const Int4Shape& shape) {
  TensorPtr out = Tensor::empty(shape.out_sizes, x.dtype(), on.device());
  if (out->numel() == 0) return out;
  Int4Gemm p;
  p.dtype = x.dtype();
  p.m = shape.m, p.n = shape.n, p.k = shape.k;
  p.inner_k_tiles = shape.inner_k_tiles, p.group = shape.group;
  describe_gpu(on, p);
  p.tile_rows = static_cast<int>(limits().tile_rows);
  const Tensor* const whole = dequantized_weight(weight, x.dtype(), shape.n, shape.k, scales);
  const Int4Path path = kernels::cuda::choose_int4_kernel(p, limits(), whole != nullptr);
  const bool apart = path != Int4Path::kGemv && path != Int4Path::kGemmSm80;
  const W4A16Activations rows = w4a16_activations(on, x, shape.m, shape.k, shape.x_width, apart);
  p.x = rows.tensor->raw(), p.x_row = rows.stride, p.x_width = rows.width;
  const TensorPtr added = bias == nullptr ? nullptr : contiguous(*bias);
  p.bias = added == nullptr ? nullptr : added->raw();
  p.out = out->raw();
  if (path == Int4Path::kDequantized) {
    gemm_dequantized(op, on, p, *out, added.get(), *whole);
    return out;
  }
  const TensorPtr words = aligned_cuda(weight), factors = aligned_cuda(*to_dtype(scales, x.dtype()));
  p.weight = words->raw(), p.scales = factors->raw();
  if (path == Int4Path::kGemv) {
    on.launched(kernels::cuda::int4_gemv(p, on.stream()));
  } else if (path == Int4Path::kGemmSm80 || path == Int4Path::kGemmSm90) {
    const bool streams = path == Int4Path::kGemmSm90;
    const std::size_t bytes =
        streams ? kernels::cuda::int4_gemm_sm90_workspace(p) : kernels::cuda::int4_gemm_sm80_workspace(p);
    const StorageRef workspace = bytes > 0 ? on.scratch(bytes) : StorageRef();
    if (workspace) p.workspace = static_cast<float*>(workspace->data());
    on.launched(streams ? kernels::cuda::int4_gemm_sm90(p, on.stream())
                        : kernels::cuda::int4_gemm_sm80(p, on.stream()));
  } else {
    const auto bytes = static_cast<std::int64_t>(element_size(x.dtype()));
    const std::int64_t chunk = kernels::cuda::dequantize_chunk_n(p, bytes, on.properties().l2_bytes);
    gemm_dequantize_chunks(op, on, p, *out, added.get(), chunk,
                           [&](std::int64_t first, std::int64_t columns, void* to) {
                             return kernels::cuda::int4_dequantize(p, first, columns, to, on.stream());
                           });
  }
  return out;
}

TensorPtr unpack(const Tensor& weight, const Tensor& scales, std::int64_t group, DType dtype) {
  constexpr const char* op = "int4_linear";
  const Int4Shape shape = check_int4_weight(op, weight, scales, group);
  const OnDevice on(op, weight, {&scales});
  check_w4a16_gpu(op, "int4", on);
  TensorPtr out = empty_dequantized(op, on, dtype, shape.n, shape.k);
  if (out->numel() == 0) return out;
  const TensorPtr words = aligned_cuda(weight), factors = aligned_cuda(*to_dtype(scales, dtype));
  Int4Gemm p;
  p.dtype = dtype;
  p.n = shape.n, p.k = shape.k;
  p.inner_k_tiles = shape.inner_k_tiles, p.group = shape.group;
  p.weight = words->raw(), p.scales = factors->raw();
  on.launched(kernels::cuda::int4_dequantize(p, 0, p.n, out->raw(), on.stream()));
  return out;
}

[[maybe_unused]] const bool registered = [] {
  cuda_dequantizers.int4 = unpack;
  return true;
}();

}  // namespace

// x [m, k] · weightᵀ, bfloat16; the weight's layout is that of _convert_weight_to_int4pack.
UNTORCH_SHIM aoti_torch_cuda__weight_int4pack_mm(AtenTensorHandle self, AtenTensorHandle mat2, std::int64_t qGroupSize,
                                                 AtenTensorHandle qScaleAndZeros, AtenTensorHandle* ret0) {
  constexpr const char* op = "_weight_int4pack_mm";
  return guarded(op, [&] {
    const Tensor &x = cuda_input(self, op, "self"), &weight = cuda_input(mat2, op, "mat2"),
                 &scales = cuda_input(qScaleAndZeros, op, "qScaleAndZeros");
    check(ret0 != nullptr, op, ": output pointer is null");
    const Int4Shape shape = check_int4pack(op, x, weight, qGroupSize, scales);
    const OnDevice on(op, x, {&weight, &scales});
    check_w4a16_gpu(op, "int4", on);
    give(ret0, multiply_int4(op, on, x, weight, scales, nullptr, shape), op);
  });
}

// x [.., k_in] · weightᵀ + bias, for bfloat16, float16 and, slower, float32.
UNTORCH_SHIM aoti_torch_cuda_int4_linear(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle scale_and_zero,
                                         std::int64_t group_size, AtenTensorHandle* bias, AtenTensorHandle* ret0) {
  constexpr const char* op = "int4_linear";
  return guarded(op, [&] {
    const Tensor &input = cuda_input(x, op, "x"), &packed = cuda_input(weight, op, "weight"),
                 &scales = cuda_input(scale_and_zero, op, "scale_and_zero");
    const Tensor* const added = optional_cuda_input(bias, op, "bias");
    check(ret0 != nullptr, op, ": output pointer is null");
    const Int4Shape shape = check_int4_linear(op, input, packed, scales, group_size, added);
    const OnDevice on(op, input, {&packed, &scales, added});
    check_w4a16_gpu(op, "int4", on);
    give(ret0, multiply_int4(op, on, input, packed, scales, added, shape), op);
  });
}
