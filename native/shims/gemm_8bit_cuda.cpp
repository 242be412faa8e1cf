// The GEMM dispatch of CUDA for 8-bit operands: int8, W8A16 and float8, by cuBLASLt and by our own kernels where it has
// no algorithm.
#include <algorithm>

#include "cuda/blas.h"
#include "kernels/cuda/w8a8/gemm_plan.h"
#include "shims/gemm_cuda.h"
#include "shims/w4a16_cuda.h"
#include "shims/w8a8_linear.h"
#include "tensor/device.h"

namespace untorch::shims {
namespace {

// Up to this M the GEMV reads the int8 weights in place; above it cuBLASLt multiplies weights converted to x's dtype,
// in which every int8 is exact.
constexpr std::int64_t kGemvMaxM = 16;

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

// x · weightᵀ in float32, the weights converted to x's dtype; null when cuBLASLt has no algorithm for it.
TensorPtr blas_w8a16(const OnDevice& on, const char* op, const Tensor& x, const Tensor& weight) {
  const std::int64_t m = x.size(0), n = weight.size(0), k = x.size(1);
  const TensorPtr values = to_dtype(weight, x.dtype());
  TensorPtr sums = Tensor::empty(Dims{m, n}, DType::kFloat32, x.device());
  cuda::BlasGemm problem;
  problem.m = m;
  problem.n = n;
  problem.k = k;
  problem.a = {x.raw(), x.dtype(), false, k, 0};
  problem.b = {values->raw(), x.dtype(), true, k, 0};
  problem.d = sums->raw();
  problem.d_dtype = DType::kFloat32;
  problem.ldd = n;
  return cuda::blas_gemm(op, problem, on.index(), on.stream()) ? std::move(sums) : nullptr;
}

}  // namespace

void int8_gemm_cuda(const char* op, const OnDevice& on, const Tensor& a, const Tensor& b, const Tensor& out) {
  const std::int64_t m = a.size(0), k = a.size(1), n = b.size(1);
  if (m == 0 || n == 0) return;
  const std::int64_t ld = m == 1 ? n : out.stride(0);
  if (k > 0 && k % 4 == 0 && n % 4 == 0 && (n == 1 || out.stride(1) == 1) && ld >= n && ld % 4 == 0 &&
      multiple_of(out.raw(), 16)) {
    const Lines left = dense_lines(a, 0, 4), right = dense_lines(b, 1, 4);
    cuda::BlasGemm call;
    call.m = m, call.n = n, call.k = k;
    call.a = {left.data, DType::kInt8, false, left.ld, 0};
    call.b = {right.data, DType::kInt8, true, right.ld, 0};
    call.d = out.raw(), call.d_dtype = DType::kInt32, call.ldd = ld;
    if (cuda::blas_gemm(op, call, on.index(), on.stream())) return;
  }
  kernels::Int8Gemm call;
  call.m = m, call.n = n, call.k = k;
  call.a = a.raw(), call.a_row = a.stride(0), call.a_col = a.stride(1);
  call.b = b.raw(), call.b_row = b.stride(0), call.b_col = b.stride(1);
  call.out = out.raw(), call.out_row = out.stride(0), call.out_col = out.stride(1);
  on.launched(kernels::cuda::gemm_int8(call, on.stream()));
}

void w8a16_gemm_cuda(const char* op, const OnDevice& on, const Tensor& x, const Tensor& weight, const Tensor& scales,
                     const Tensor& out) {
  const std::int64_t m = x.size(0), n = weight.size(0), k = x.size(1);
  const TensorPtr sums = m > kGemvMaxM && k > 0 ? blas_w8a16(on, op, x, weight) : nullptr;
  if (sums != nullptr) {
    on.launched(
        kernels::cuda::scale_columns(m, n, x.dtype(), sums->data<float>(), scales.raw(), out.raw(), on.stream()));
  } else {
    on.launched(
        kernels::cuda::w8a16_gemv(m, n, k, x.dtype(), x.raw(), weight.raw(), scales.raw(), out.raw(), on.stream()));
  }
}

namespace {

// Whether w8_gemm_sm90 multiplied them: dense E4M3 rows and columns into floating point. It promotes sums, with
// fast_accumulation, too. any_m: also where cuBLASLt is faster.
bool scaled_gemm_sm90(const OnDevice& on, const ScaledGemm& s, const cuda::BlasGemm& call, const Tensor& out,
                      bool any_m) {
  if (s.a->dtype() != DType::kFloat8E4M3FN || s.b->dtype() != DType::kFloat8E4M3FN || is_float8(out.dtype())) {
    return false;
  }
  if (call.a.ld != call.k || call.b.ld != call.k) return false;
  kernels::cuda::W8Gemm p;
  describe_gpu(on, p);
  p.dtype = out.dtype(), p.weight_dtype = DType::kFloat8E4M3FN;
  p.m = call.m, p.n = call.n, p.k = call.k;
  p.weight = call.b.data, p.scales = call.scale_b, p.one_scale = !s.rowwise;
  p.is_constant = s.b->storage()->read_only();
  p.bias = call.bias, p.out = call.d;
  if (!(any_m ? kernels::cuda::has_w8_gemm_sm90(p) : prefers_fp8_gemm_sm90(p))) return false;
  const StorageRef workspace = on.scratch(kernels::cuda::w8_gemm_workspace(p));
  p.workspace = static_cast<float*>(workspace->data());
  on.launched(kernels::cuda::w8_gemm_sm90(p, call.a.data, call.scale_a, on.stream()));
  return true;
}

}  // namespace

void scaled_gemm_cuda(const char* op, const OnDevice& on, const ScaledGemm& s, const Tensor& out) {
  const cuda::DeviceProperties& gpu = on.properties();
  if (gpu.major * 10 + gpu.minor < 89) {
    throw_error(ErrorKind::kUnsupported, op, ": a float8 GEMM needs a GPU of compute capability 8.9 or newer, ",
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
  cuda::BlasGemm call;
  call.m = m, call.n = n, call.k = k;
  call.a = {left.data, s.a->dtype(), false, left.ld, 0};
  call.b = {right.data, s.b->dtype(), true, right.ld, 0};
  call.d = out.raw(), call.d_dtype = out.dtype(), call.ldd = n;
  call.fast_accumulation = s.fast_accumulation;
  call.scale_a = row->data<float>(), call.scale_b = column->data<float>();
  call.rowwise_scales = s.rowwise;
  if (bias != nullptr) call.bias = bias->raw(), call.bias_dtype = bias->dtype();
  if (s.scale_result != nullptr && is_float8(out.dtype())) call.scale_d = s.scale_result->data<float>();
  if (scaled_gemm_sm90(on, s, call, out, false)) return;
  if (cuda::blas_gemm(op, call, on.index(), on.stream())) return;
  if (scaled_gemm_sm90(on, s, call, out, true)) return;
  if (s.rowwise) {
    // cuBLAS scales rows and columns on Hopper only, and not before CUDA 12.9: elsewhere the sums are scaled after.
    const TensorPtr sums = Tensor::empty(Dims{m, n}, DType::kFloat32, on.device());
    call.d = sums->raw(), call.d_dtype = DType::kFloat32;
    call.scale_a = call.scale_b = nullptr, call.rowwise_scales = false, call.bias = nullptr;
    if (cuda::blas_gemm(op, call, on.index(), on.stream())) {
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

}  // namespace untorch::shims
