// _scaled_mm: GEMM of float8 with one scale for each operand, or one for each row of a and column of b.
#include <algorithm>

#include "shims/gemm_cuda.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

void check_scale(const Op& op, const char* name, const Tensor& scale, bool rowwise, DimSpan sizes) {
  check(scale.dtype() == DType::kFloat32, op, ": argument '", name, "' must be float32, got ",
        dtype_name(scale.dtype()));
  check(rowwise ? std::ranges::equal(DimSpan(scale.sizes()), sizes) : scale.numel() == 1, op, ": argument '", name,
        "' must hold one value, or both scales must be [m, 1] and [1, n]; got shape ", to_string(scale.sizes()));
}

// cuBLASLt serves fewer cases than the CPU.
void check_cuda_limits(const Op& op, const ScaledGemm& s) {
  const Tensor &a = *s.a, &b = *s.b;
  if (a.dtype() == DType::kFloat8E5M2 && b.dtype() == DType::kFloat8E5M2) {
    throw_error(ErrorKind::kUnsupported, op,
                ": two float8_e5m2 operands are not supported on a GPU, one must be float8_e4m3fn");
  }
  check(a.size(1) % 16 == 0 && b.size(1) % 16 == 0, op,
        ": the inner size and the columns of 'mat2' must be multiples of 16 on a GPU, got 'self' ",
        to_string(a.sizes()), " and 'mat2' ", to_string(b.sizes()));
  if (s.rowwise && is_float8(s.out_dtype)) {
    throw_error(ErrorKind::kUnsupported, op,
                ": with scales of rows and columns out_dtype must be bfloat16, float16 or "
                "float32, got ",
                dtype_name(s.out_dtype));
  }
  if (s.bias != nullptr) {
    const DType wanted = is_float8(s.out_dtype) ? DType::kBFloat16 : s.out_dtype;
    const bool half_bias = is_float8(s.out_dtype) && s.bias->dtype() == DType::kFloat16;
    check(s.bias->dtype() == wanted || half_bias, op, ": argument 'bias' must be ", dtype_name(wanted),
          " for an out_dtype of ", dtype_name(s.out_dtype), ", got ", dtype_name(s.bias->dtype()));
    if (s.out_dtype == DType::kFloat32) {
      throw_error(ErrorKind::kUnsupported, op,
                  ": argument 'bias' is not supported with an out_dtype of float32 (nor by PyTorch); add it after");
    }
  }
}

ScaledGemm check_scaled(const Op& op, AtenTensorHandle self, AtenTensorHandle mat2, AtenTensorHandle scale_a,
                        AtenTensorHandle scale_b, AtenTensorHandle* bias, AtenTensorHandle* scale_result,
                        const std::int32_t* out_dtype, const Tensor* out, std::int32_t use_fast_accum) {
  ScaledGemm s{};
  s.a = &op.input(self, "self");
  s.b = &op.input(mat2, "mat2");
  s.scale_a = &op.input(scale_a, "scale_a");
  s.scale_b = &op.input(scale_b, "scale_b");
  s.bias = op.optional_input(bias, "bias");
  s.scale_result = op.optional_input(scale_result, "scale_result");
  s.out_dtype = dtype_or(out_dtype, out != nullptr ? out->dtype() : s.a->dtype());
  s.fast_accumulation = use_fast_accum != 0;  // a hint for tensor cores
  s.rowwise = s.scale_a->numel() != 1 || s.scale_b->numel() != 1;
  const Tensor &a = *s.a, &b = *s.b;
  check_rank(op, "self", a, 2);
  check_rank(op, "mat2", b, 2);
  if (!is_float8(a.dtype()) || !is_float8(b.dtype())) {
    throw_error(ErrorKind::kUnsupported, op, ": operands must be float8_e4m3fn or float8_e5m2, got ",
                dtype_name(a.dtype()), " and ", dtype_name(b.dtype()));
  }
  check(a.size(1) == b.size(0), op, ": the inner sizes differ: 'self' is ", to_string(a.sizes()), ", 'mat2' is ",
        to_string(b.sizes()));
  if (!is_float8(s.out_dtype) && (!is_floating(s.out_dtype) || s.out_dtype == DType::kFloat64)) {
    throw_error(ErrorKind::kUnsupported, op, ": out_dtype must be float8, bfloat16, float16 or float32, got ",
                dtype_name(s.out_dtype));
  }
  const std::int64_t m = a.size(0), n = b.size(1);
  check_scale(op, "scale_a", *s.scale_a, s.rowwise, Dims{m, 1});
  check_scale(op, "scale_b", *s.scale_b, s.rowwise, Dims{1, n});
  check(s.bias == nullptr || (s.bias->dim() == 1 && s.bias->size(0) == n), op, ": argument 'bias' must have shape [", n,
        "], got ", s.bias == nullptr ? "" : std::string(to_string(s.bias->sizes())));
  if (s.scale_result != nullptr) check_scale(op, "scale_result", *s.scale_result, false, {});
  if (op.on_cuda()) check_cuda_limits(op, s);
  if (out != nullptr) check_out(op, *out, s.out_dtype, Dims{m, n});
  op.check_same_device({s.a, s.b, s.scale_a, s.scale_b, s.bias, s.scale_result, out});
  return s;
}

// On the CPU: a float32 GEMM of converted operands, then the scales.
void scaled_gemm_cpu(const ScaledGemm& s, const Tensor& out) {
  const std::int64_t m = s.a->size(0), n = s.b->size(1);
  const TensorPtr left = Tensor::empty(s.a->sizes(), DType::kFloat32);
  const TensorPtr right = Tensor::empty(s.b->sizes(), DType::kFloat32);
  const TensorPtr sums = Tensor::empty(Dims{m, n}, DType::kFloat32);
  kernels::cpu::float8_to_float(matrix_of(*s.a), left->data<float>());
  kernels::cpu::float8_to_float(matrix_of(*s.b), right->data<float>());
  kernels::cpu::gemm(matrix_of(*left), matrix_of(*right), matrix_of(*sums), 1.0, 0.0);
  const TensorPtr row = contiguous(*s.scale_a), column = contiguous(*s.scale_b);
  const TensorPtr bias = s.bias == nullptr ? nullptr : to_dtype(*s.bias, DType::kFloat32);
  // Only a float8 result is rescaled.
  const bool rescaled = s.scale_result != nullptr && is_float8(s.out_dtype);
  kernels::cpu::scale_epilogue({.m = m,
                                .n = n,
                                .values = sums->data<float>(),
                                .row = row->data<float>(),
                                .column = column->data<float>(),
                                .row_stride = s.rowwise ? 1 : 0,
                                .column_stride = s.rowwise ? 1 : 0,
                                .bias = bias == nullptr ? nullptr : bias->data<float>(),
                                .divisor = rescaled ? s.scale_result->data<float>()[0] : 1.0f});
  if (is_float8(s.out_dtype)) {
    kernels::cpu::float_to_float8(m * n, sums->data<float>(), s.out_dtype, out.raw());
  } else {
    copy(out, *sums);
  }
}

// Into a dense `out`.
void scaled_gemm(const Op& op, const ScaledGemm& s, const Tensor& out) {
  run(op, {s.a}, [&] { scaled_gemm_cpu(s, out); }, [&](const auto& on) { scaled_gemm_cuda(op, on, s, out); });
}

}  // namespace

UNTORCH_OP(_scaled_mm,
           (AtenTensorHandle self, AtenTensorHandle mat2, AtenTensorHandle scale_a, AtenTensorHandle scale_b,
            AtenTensorHandle* bias, AtenTensorHandle* scale_result, std::int32_t* out_dtype,
            std::int32_t use_fast_accum, AtenTensorHandle* ret0),
           self, mat2, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum, ret0) {
  const ScaledGemm s =
      check_scaled(op, self, mat2, scale_a, scale_b, bias, scale_result, out_dtype, nullptr, use_fast_accum);
  TensorPtr out = Tensor::empty(Dims{s.a->size(0), s.b->size(1)}, s.out_dtype, s.a->device());
  scaled_gemm(op, s, *out);
  give(ret0, std::move(out), op);
}

UNTORCH_OP_AS("_scaled_mm", _scaled_mm_out,
              (AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2, AtenTensorHandle scale_a,
               AtenTensorHandle scale_b, AtenTensorHandle* bias, AtenTensorHandle* scale_result,
               std::int32_t* out_dtype, std::int32_t use_fast_accum),
              out, self, mat2, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum) {
  const Tensor& c = op.input(out, "out");
  const ScaledGemm s =
      check_scaled(op, self, mat2, scale_a, scale_b, bias, scale_result, out_dtype, &c, use_fast_accum);
  if (c.is_contiguous() && reinterpret_cast<std::uintptr_t>(c.raw()) % 16 == 0) {
    scaled_gemm(op, s, c);
    return;
  }
  const TensorPtr dense = Tensor::empty(c.sizes(), c.dtype(), c.device());
  scaled_gemm(op, s, *dense);
  copy(c, *dense);
}

// Names that torch no longer generates. bias and scale_result may be null; ret1, once the largest magnitude of the
// result, is left as it is, as by PyTorch.
UNTORCH_SHIM aoti_torch__scaled_mm_v2(AtenTensorHandle self, AtenTensorHandle mat2, AtenTensorHandle scale_a,
                                      AtenTensorHandle scale_b, AtenTensorHandle bias, AtenTensorHandle scale_result,
                                      std::int32_t* out_dtype, std::int8_t use_fast_accum, AtenTensorHandle* ret0) {
  constexpr const char* name = "_scaled_mm";
  return guarded(name, [&] {
    _scaled_mm_op(Op::of(name, self, "self"), self, mat2, scale_a, scale_b, &bias, &scale_result, out_dtype,
                  use_fast_accum, ret0);
  });
}

UNTORCH_SHIM aoti_torch__scaled_mm(AtenTensorHandle self, AtenTensorHandle mat2, AtenTensorHandle bias,
                                   std::int32_t* out_dtype, AtenTensorHandle scale_a, AtenTensorHandle scale_b,
                                   AtenTensorHandle scale_result, std::int8_t use_fast_accum, AtenTensorHandle* ret0,
                                   AtenTensorHandle* ret1) {
  (void)ret1;
  return aoti_torch__scaled_mm_v2(self, mat2, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum, ret0);
}

#ifdef UNTORCH_CUDA_KERNELS
UNTORCH_SHIM aoti_torch_cuda__scaled_grouped_mm(AtenTensorHandle self, AtenTensorHandle, AtenTensorHandle,
                                                AtenTensorHandle, AtenTensorHandle*, AtenTensorHandle*,
                                                AtenTensorHandle*, std::int32_t*, std::int32_t, AtenTensorHandle*) {
  constexpr const char* op = "_scaled_grouped_mm";
  return guarded(op, [&] {
    cuda_input(self, op, "self");
    throw_error(ErrorKind::kUnsupported, op,
                ": grouped GEMM of float8 is not supported on a GPU; use _scaled_mm for each group, or "
                "_grouped_mm in bfloat16");
  });
}
#endif
