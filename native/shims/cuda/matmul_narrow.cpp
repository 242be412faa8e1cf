// Products of narrow numbers on GPUs: int8 sums, and float8 with scales.
#include <algorithm>

#include "cuda/blas.h"
#include "kernels/cuda/gemm/int8_dp4a.h"
#include "shims/cuda/matmul.h"

namespace untorch::shims {
namespace {

bool is_float8(DType dtype) { return dtype == DType::kFloat8E4M3FN || dtype == DType::kFloat8E5M2; }

bool multiple_of(const void* pointer, std::uintptr_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

// Lines along k: dense and `unit` elements apart, as the tensor cores' 8-bit kernels want them. `lines` 0: the rows of
// the matrix (a), 1: its columns (b). What lies differently is copied.
struct Lines {
  TensorPtr keep;
  const void* data;
  std::int64_t ld;
};
Lines dense_lines(const Tensor& t, int lines, std::int64_t unit) {
  const std::int64_t count = t.size(lines), k = t.size(1 - lines);
  const std::int64_t along = k == 1 ? 1 : t.stride(1 - lines), ld = count == 1 ? k : t.stride(lines);
  if (along == 1 && ld >= k && ld % unit == 0 && multiple_of(t.raw(), static_cast<std::uintptr_t>(unit))) {
    return {nullptr, t.raw(), ld};
  }
  const Dims sizes{count, k}, strides{t.stride(lines), t.stride(1 - lines)};
  const TensorPtr view = t.view(sizes, strides, t.storage_offset());
  TensorPtr copied = Tensor::empty(sizes, t.dtype(), t.device());
  copy(*copied, *view);
  const void* const data = copied->raw();
  return {std::move(copied), data, k};
}

void int_mm(const char* op, const Tensor& a, const Tensor& b, const Tensor& out) {
  const OnDevice on(op, a);
  const std::int64_t m = a.size(0), k = a.size(1), n = b.size(1);
  if (m == 0 || n == 0) return;
  const std::int64_t ld = m == 1 ? n : out.stride(0);
  if (k > 0 && k % 4 == 0 && n % 4 == 0 && (n == 1 || out.stride(1) == 1) && ld >= n && ld % 4 == 0 &&
      multiple_of(out.raw(), 16)) {
    const Lines left = dense_lines(a, 0, 4), right = dense_lines(b, 1, 4);
    cuda::BlasProduct call;
    call.m = m, call.n = n, call.k = k;
    call.a = {left.data, DType::kInt8, false, left.ld, 0};
    call.b = {right.data, DType::kInt8, true, right.ld, 0};
    call.d = out.raw(), call.d_dtype = DType::kInt32, call.ldd = ld;
    if (cuda::blas_multiply(op, call, on.index(), on.stream())) return;
  }
  kernels::cuda::Int8Gemm call;
  call.m = m, call.n = n, call.k = k;
  call.a = a.raw(), call.a_row = a.stride(0), call.a_col = a.stride(1);
  call.b = b.raw(), call.b_row = b.stride(0), call.b_col = b.stride(1);
  call.out = out.raw(), call.out_row = out.stride(0), call.out_col = out.stride(1);
  on.launched(kernels::cuda::gemm_int8(call, on.stream()));
}

struct Scaled {
  const Tensor *a, *b, *scale_a, *scale_b, *bias, *scale_result;
  DType out_dtype;
  bool fast_accumulation;
  bool rowwise;
};

void check_scale(const char* op, const char* name, const Tensor& scale, bool rowwise, DimSpan sizes) {
  check(scale.dtype() == DType::kFloat32, op, ": argument '", name, "' must be float32, got ",
        dtype_name(scale.dtype()));
  check(rowwise ? std::ranges::equal(DimSpan(scale.sizes()), sizes) : scale.numel() == 1, op, ": argument '", name,
        "' must hold one value, or both scales must be [m, 1] and [1, n]; got shape ", to_string(scale.sizes()));
}

Scaled check_scaled(const char* op, AtenTensorHandle self, AtenTensorHandle mat2, AtenTensorHandle scale_a,
                    AtenTensorHandle scale_b, AtenTensorHandle* bias, AtenTensorHandle* scale_result,
                    const std::int32_t* out_dtype, const Tensor* out, std::int32_t use_fast_accum) {
  Scaled s{};
  s.a = &cuda_input(self, op, "self");
  s.b = &cuda_input(mat2, op, "mat2");
  s.scale_a = &cuda_input(scale_a, op, "scale_a");
  s.scale_b = &cuda_input(scale_b, op, "scale_b");
  s.bias = optional_cuda_input(bias, op, "bias");
  s.scale_result = optional_cuda_input(scale_result, op, "scale_result");
  s.out_dtype = dtype_or(out_dtype, out != nullptr ? out->dtype() : s.a->dtype());
  s.fast_accumulation = use_fast_accum != 0;
  const Tensor &a = *s.a, &b = *s.b;
  check_rank(op, "self", a, 2);
  check_rank(op, "mat2", b, 2);
  if (!is_float8(a.dtype()) || !is_float8(b.dtype())) {
    throw_error(ErrorKind::kUnsupported, op, ": operands must be float8_e4m3fn or float8_e5m2, got ",
                dtype_name(a.dtype()), " and ", dtype_name(b.dtype()));
  }
  if (a.dtype() == DType::kFloat8E5M2 && b.dtype() == DType::kFloat8E5M2) {
    throw_error(ErrorKind::kUnsupported, op,
                ": two float8_e5m2 operands are not supported on a GPU, one must be float8_e4m3fn");
  }
  check(a.size(1) == b.size(0), op, ": the inner sizes differ: 'self' is ", to_string(a.sizes()), ", 'mat2' is ",
        to_string(b.sizes()));
  check(a.size(1) % 16 == 0 && b.size(1) % 16 == 0, op,
        ": the inner size and the columns of 'mat2' must be multiples of 16 on a GPU, got 'self' ",
        to_string(a.sizes()), " and 'mat2' ", to_string(b.sizes()));
  if (!is_float8(s.out_dtype) && (!is_floating(s.out_dtype) || s.out_dtype == DType::kFloat64)) {
    throw_error(ErrorKind::kUnsupported, op, ": out_dtype must be float8, bfloat16, float16 or float32, got ",
                dtype_name(s.out_dtype));
  }
  const std::int64_t m = a.size(0), n = b.size(1);
  s.rowwise = s.scale_a->numel() != 1 || s.scale_b->numel() != 1;
  check_scale(op, "scale_a", *s.scale_a, s.rowwise, Dims{m, 1});
  check_scale(op, "scale_b", *s.scale_b, s.rowwise, Dims{1, n});
  if (s.rowwise && is_float8(s.out_dtype)) {
    throw_error(ErrorKind::kUnsupported, op,
                ": with scales of rows and columns out_dtype must be bfloat16, float16 or "
                "float32, got ",
                dtype_name(s.out_dtype));
  }
  if (s.bias != nullptr) {
    check(s.bias->dim() == 1 && s.bias->size(0) == n, op, ": argument 'bias' must have shape [", n, "], got ",
          to_string(s.bias->sizes()));
    const DType wanted = is_float8(s.out_dtype) ? DType::kBFloat16 : s.out_dtype;
    const bool half_bias = is_float8(s.out_dtype) && s.bias->dtype() == DType::kFloat16;
    check(s.bias->dtype() == wanted || half_bias, op, ": argument 'bias' must be ", dtype_name(wanted),
          " for an out_dtype of ", dtype_name(s.out_dtype), ", got ", dtype_name(s.bias->dtype()));
    if (s.out_dtype == DType::kFloat32) {
      throw_error(ErrorKind::kUnsupported, op,
                  ": argument 'bias' is not supported with an out_dtype of float32 (nor by PyTorch); add it after");
    }
  }
  if (s.scale_result != nullptr) check_scale(op, "scale_result", *s.scale_result, false, {});
  if (out != nullptr) check_out(op, *out, s.out_dtype, Dims{m, n});
  for (const Tensor* const other : {s.b, s.scale_a, s.scale_b, s.bias, s.scale_result, out}) {
    check(other == nullptr || other->device() == a.device(), op, ": operands are on ", device_name(a.device()), " and ",
          other == nullptr ? "" : device_name(other->device()), ", expected one device");
  }
  return s;
}

// The product into a dense `out`.
void scaled_mm(const char* op, const Scaled& s, const Tensor& out) {
  const OnDevice on(op, *s.a);
  const cuda::DeviceProperties& gpu = on.properties();
  if (gpu.major * 10 + gpu.minor < 89) {
    throw_error(ErrorKind::kUnsupported, op, ": float8 products need a GPU of compute capability 8.9 or newer, ",
                gpu.name, " has ", gpu.major, ".", gpu.minor);
  }
  const std::int64_t m = s.a->size(0), k = s.a->size(1), n = s.b->size(1);
  if (m == 0 || n == 0) return;
  const TensorPtr bias = s.bias != nullptr ? contiguous(*s.bias) : nullptr;
  if (k == 0) {
    const std::size_t nbytes = static_cast<std::size_t>(out.numel()) * element_size(out.dtype());
    device_table(DeviceType::kCUDA).zero(out.raw(), nbytes, out.device());
    if (bias != nullptr) copy(out, *bias);
    return;
  }
  const Lines left = dense_lines(*s.a, 0, 16), right = dense_lines(*s.b, 1, 16);
  const TensorPtr row = contiguous(*s.scale_a), column = contiguous(*s.scale_b);
  cuda::BlasProduct call;
  call.m = m, call.n = n, call.k = k;
  call.a = {left.data, s.a->dtype(), false, left.ld, 0};
  call.b = {right.data, s.b->dtype(), true, right.ld, 0};
  call.d = out.raw(), call.d_dtype = out.dtype(), call.ldd = n;
  call.fast_accumulation = s.fast_accumulation;
  call.scale_a = row->data<float>(), call.scale_b = column->data<float>();
  call.rowwise_scales = s.rowwise;
  if (bias != nullptr) call.bias = bias->raw(), call.bias_dtype = bias->dtype();
  if (s.scale_result != nullptr && is_float8(out.dtype())) call.scale_d = s.scale_result->data<float>();
  if (cuda::blas_multiply(op, call, on.index(), on.stream())) return;
  if (s.rowwise) {
    // cuBLAS scales rows and columns on Hopper only, and not before CUDA 12.9: elsewhere the sums are scaled after.
    const TensorPtr sums = Tensor::empty(Dims{m, n}, DType::kFloat32, on.device());
    call.d = sums->raw(), call.d_dtype = DType::kFloat32;
    call.scale_a = call.scale_b = nullptr, call.rowwise_scales = false, call.bias = nullptr;
    if (cuda::blas_multiply(op, call, on.index(), on.stream())) {
      kernels::cuda::ScaledSums scaled;
      scaled.m = m, scaled.n = n;
      scaled.sums = sums->data<float>(), scaled.sums_row = n;
      scaled.row = row->data<float>(), scaled.column = column->data<float>();
      scaled.bias = bias != nullptr ? bias->raw() : nullptr;
      scaled.out = out.raw(), scaled.dtype = out.dtype(), scaled.out_row = n;
      on.launched(kernels::cuda::scale_rows_and_columns(scaled, on.stream()));
      return;
    }
  }
  throw_error(ErrorKind::kUnsupported, op, ": cuBLAS has no algorithm for ", dtype_name(s.a->dtype()), " ",
              to_string(s.a->sizes()), " times ", dtype_name(s.b->dtype()), " ", to_string(s.b->sizes()), " into ",
              dtype_name(out.dtype()), " on this GPU");
}

}  // namespace

UNTORCH_SHIM aoti_torch_cuda__int_mm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2) {
  constexpr const char* op = "_int_mm";
  return guarded(op, [&] {
    const Tensor& a = cuda_input(self, op, "self");
    const Tensor& b = cuda_input(mat2, op, "mat2");
    const Tensor& c = cuda_input(out, op, "out");
    check_rank(op, "self", a, 2);
    check_rank(op, "mat2", b, 2);
    check(a.dtype() == DType::kInt8, op, ": argument 'self' must be int8, got ", dtype_name(a.dtype()));
    check(b.dtype() == DType::kInt8, op, ": argument 'mat2' must be int8, got ", dtype_name(b.dtype()));
    check_product(op, "self", a, "mat2", b);
    check_out(op, c, DType::kInt32, Dims{a.size(0), b.size(1)});
    check(b.device() == a.device() && c.device() == a.device(), op, ": operands are on ", device_name(a.device()), ", ",
          device_name(b.device()), " and ", device_name(c.device()), ", expected one device");
    int_mm(op, a, b, c);
  });
}

UNTORCH_SHIM aoti_torch_cuda__scaled_mm(AtenTensorHandle self, AtenTensorHandle mat2, AtenTensorHandle scale_a,
                                        AtenTensorHandle scale_b, AtenTensorHandle* bias,
                                        AtenTensorHandle* scale_result, std::int32_t* out_dtype,
                                        std::int32_t use_fast_accum, AtenTensorHandle* ret0) {
  constexpr const char* op = "_scaled_mm";
  return guarded(op, [&] {
    const Scaled s =
        check_scaled(op, self, mat2, scale_a, scale_b, bias, scale_result, out_dtype, nullptr, use_fast_accum);
    TensorPtr out = Tensor::empty(Dims{s.a->size(0), s.b->size(1)}, s.out_dtype, s.a->device());
    scaled_mm(op, s, *out);
    give(ret0, std::move(out), op);
  });
}

UNTORCH_SHIM aoti_torch_cuda__scaled_mm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2,
                                            AtenTensorHandle scale_a, AtenTensorHandle scale_b, AtenTensorHandle* bias,
                                            AtenTensorHandle* scale_result, std::int32_t* out_dtype,
                                            std::int32_t use_fast_accum) {
  constexpr const char* op = "_scaled_mm";
  return guarded(op, [&] {
    const Tensor& c = cuda_input(out, op, "out");
    const Scaled s = check_scaled(op, self, mat2, scale_a, scale_b, bias, scale_result, out_dtype, &c, use_fast_accum);
    if (c.is_contiguous() && multiple_of(c.raw(), 16)) {
      scaled_mm(op, s, c);
      return;
    }
    const TensorPtr dense = Tensor::empty(c.sizes(), c.dtype(), c.device());
    scaled_mm(op, s, *dense);
    copy(c, *dense);
  });
}

UNTORCH_SHIM aoti_torch_cuda__scaled_grouped_mm(AtenTensorHandle self, AtenTensorHandle, AtenTensorHandle,
                                                AtenTensorHandle, AtenTensorHandle*, AtenTensorHandle*,
                                                AtenTensorHandle*, std::int32_t*, std::int32_t, AtenTensorHandle*) {
  constexpr const char* op = "_scaled_grouped_mm";
  return guarded(op, [&] {
    cuda_input(self, op, "self");
    throw_error(ErrorKind::kUnsupported, op,
                ": float8 products over groups are not supported on a GPU; use _scaled_mm for each group, or "
                "_grouped_mm in bfloat16");
  });
}

}  // namespace untorch::shims
