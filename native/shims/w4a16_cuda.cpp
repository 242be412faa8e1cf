// Shared by W4A16 linear layers on CUDA: operands, the GPU's features, dequantize + cuBLASLt.
#include "shims/w4a16_cuda.h"

#include <algorithm>
#include <cstdlib>

#include "cuda/blas.h"
#include "cuda/memory_pool.h"
#include "shims/matmul_checks.h"
#include "tensor/copy.h"
#include "tensor/dequantized_weight.h"

namespace untorch::shims {
namespace {

constexpr std::uintptr_t kAlignment = 16;  // of the kernels' loads, in bytes
constexpr std::int64_t kStep = 8;          // elements of x in one

bool is_aligned(const void* address) { return reinterpret_cast<std::uintptr_t>(address) % kAlignment == 0; }

// Copies the bias to `out`, to which the GEMM is then added (beta 1), where it cannot be cuBLAS's epilogue; true if so.
// For N that are no multiple of 8 epilogues were seen that round before they add a bias; beta · c is added to
// accumulators.
bool start_with_bias(const kernels::cuda::W4A16Gemm& p, const Tensor& out, const Tensor* bias) {
  if (bias == nullptr || p.n % kStep == 0) return false;
  copy(out, *bias);
  return true;
}

// Columns [n0, n0 + n) of the result, from as many rows of the weight, [n, p.k].
void gemm_columns(const char* op, const OnDevice& on, const kernels::cuda::W4A16Gemm& p, const Tensor& out,
                  bool starts_with_bias, const void* weight, std::int64_t n0, std::int64_t n) {
  const auto bytes = static_cast<std::int64_t>(element_size(out.dtype()));
  cuda::BlasGemm gemm;
  gemm.m = p.m, gemm.n = n, gemm.k = p.x_width;
  gemm.a = {p.x, out.dtype(), false, p.x_stride, 0};
  gemm.b = {weight, out.dtype(), true, p.k, 0};
  gemm.d = static_cast<std::byte*>(out.raw()) + n0 * bytes;
  gemm.d_dtype = out.dtype(), gemm.ldd = p.n;
  if (starts_with_bias) {
    gemm.c = gemm.d, gemm.ldc = p.n, gemm.beta = 1.0;
  } else if (p.bias != nullptr) {
    gemm.bias = static_cast<const std::byte*>(p.bias) + n0 * bytes;
    gemm.bias_dtype = out.dtype();
  }
  if (!cuda::blas_gemm(op, gemm, on.index(), on.stream())) {
    throw_error(ErrorKind::kUnsupported, op, ": cuBLAS has no algorithm for ", dtype_name(out.dtype()), " [", p.m, ", ",
                p.x_width, "] times [", p.x_width, ", ", n, "] on this GPU");
  }
}

}  // namespace

std::int64_t from_environment(const char* variable, std::int64_t otherwise) {
  const char* const value = std::getenv(variable);
  return value == nullptr ? otherwise : std::atoll(value);
}

void check_w4a16_gpu(const char* op, const char* weights, const OnDevice& on) {
  if (on.properties().major < 8) {
    throw_error(ErrorKind::kUnsupported, op, ": ", weights, " weights need a GPU of compute capability 8.0 or newer, ",
                device_name(on.device()), " is ", on.properties().architecture());
  }
}

TensorPtr aligned_cuda(const Tensor& tensor) {
  TensorPtr dense = contiguous(tensor);
  if (is_aligned(dense->raw())) return dense;
  TensorPtr out = Tensor::empty(dense->sizes(), dense->dtype(), dense->device());
  copy(*out, *dense);
  return out;
}

W4A16Activations w4a16_activations(const OnDevice& on, const Tensor& x, std::int64_t m, std::int64_t k,
                                   std::int64_t x_width, bool disjoint_rows) {
  W4A16Activations out{std::make_unique<Tensor>(x), x_width, x_width};
  const std::optional<std::int64_t> stride = row_stride_of(x);
  if (stride) {
    out.stride = *stride;
  } else {
    out.tensor = contiguous(x);
  }
  const bool served = is_aligned(out.tensor->raw()) && out.stride % kStep == 0 && out.width % kStep == 0 &&
                      (!disjoint_rows || out.stride >= out.width);
  if (served && out.width > 0) return out;
  const std::int64_t width = std::max((x_width + kStep - 1) / kStep * kStep, kStep);
  const auto halves = static_cast<std::int64_t>(element_size(x.dtype()) / 2);
  TensorPtr padded = Tensor::empty(Dims{m, width}, x.dtype(), on.device());
  on.launched(kernels::cuda::w4a16_pad_activations(out.tensor->raw(), m, out.width * halves, out.stride * halves,
                                                   padded->raw(), width * halves, on.stream()));
  return {std::move(padded), std::min(width, k), width};
}

void describe_gpu(const OnDevice& on, kernels::cuda::W4A16Gemm& p) {
  const cuda::DeviceProperties& gpu = on.properties();
  p.num_sms = gpu.num_sms;
  p.max_shared_bytes = gpu.max_shared_per_block;
  p.has_clusters = gpu.major >= 9;
  p.has_wgmma = gpu.major == 9 && gpu.minor == 0;
  p.pdl = gpu.has_pdl;
}

const Tensor* dequantized_weight(const Tensor& weight, DType dtype, std::int64_t n, std::int64_t k,
                                 const Tensor& scales, const Tensor* more_scales) {
  const DequantizedWeight* const found = weight.storage()->dequantized();
  if (found == nullptr || weight.storage_offset() != 0 || !found->is_of(scales, more_scales)) return nullptr;
  const Tensor& matrix = found->matrix;
  return matrix.dtype() == dtype && matrix.size(0) == n && matrix.size(1) == k ? &matrix : nullptr;
}

TensorPtr empty_dequantized(const char* op, const OnDevice& on, DType dtype, std::int64_t n, std::int64_t k) {
  check(dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16, op,
        ": a weight is dequantized to float32, bfloat16 or float16, not to ", dtype_name(dtype));
  const Dims sizes{n, k};
  StorageRef storage =
      cuda::allocate_unpooled(static_cast<std::size_t>(checked_numel(sizes)) * element_size(dtype), on.index());
  return std::make_unique<Tensor>(std::move(storage), 0, dtype, sizes, contiguous_strides(sizes));
}

void gemm_dequantized(const char* op, const OnDevice& on, const kernels::cuda::W4A16Gemm& p, const Tensor& out,
                      const Tensor* bias, const Tensor& dequantized) {
  gemm_columns(op, on, p, out, start_with_bias(p, out, bias), dequantized.raw(), 0, p.n);
}

void gemm_dequantize_chunks(const char* op, const OnDevice& on, const kernels::cuda::W4A16Gemm& p, const Tensor& out,
                            const Tensor* bias, std::int64_t chunk,
                            const std::function<int(std::int64_t, std::int64_t, void*)>& dequantize) {
  const auto bytes = static_cast<std::int64_t>(element_size(out.dtype()));
  const StorageRef scratch = on.scratch(static_cast<std::size_t>(chunk * p.k * bytes));
  const bool starts_with_bias = start_with_bias(p, out, bias);
  for (std::int64_t n0 = 0; n0 < p.n; n0 += chunk) {
    const std::int64_t n = std::min(chunk, p.n - n0);
    on.launched(dequantize(n0, n, scratch->data()));
    gemm_columns(op, on, p, out, starts_with_bias, scratch->data(), n0, n);
  }
}

}  // namespace untorch::shims
