// What linear layers with packed weights of four bits, int4 and NVFP4, share on CUDA.
#include "shims/cuda/packed_linear.h"

#include <algorithm>
#include <cstdlib>

#include "cuda/blas.h"
#include "shims/matmul_checks.h"

namespace untorch::shims {
namespace {

constexpr std::uintptr_t kAlignment = 16;  // of what the kernels read 16 bytes at a time
constexpr std::int64_t kStep = 8;          // elements of x in that

bool is_aligned(const void* address) { return reinterpret_cast<std::uintptr_t>(address) % kAlignment == 0; }

}  // namespace

std::int64_t from_environment(const char* variable, std::int64_t otherwise) {
  const char* const value = std::getenv(variable);
  return value == nullptr ? otherwise : std::atoll(value);
}

void check_packed_gpu(const char* op, const char* weights, const OnDevice& on) {
  if (on.properties().major < 8) {
    throw_error(ErrorKind::kUnsupported, op, ": ", weights, " weights need a GPU of compute capability 8.0 or newer, ",
                device_name(on.device()), " is ", on.properties().architecture());
  }
}

TensorPtr aligned_cuda(const Tensor& tensor) {
  TensorPtr dense = contiguous_cuda(tensor);
  if (is_aligned(dense->raw())) return dense;
  TensorPtr out = Tensor::empty(dense->sizes(), dense->dtype(), dense->device());
  copy(*out, *dense);
  return out;
}

PackedRows packed_rows(const OnDevice& on, const Tensor& x, std::int64_t m, std::int64_t k, std::int64_t x_width,
                       bool for_blas) {
  PackedRows out{std::make_unique<Tensor>(x), x_width, x_width};
  const std::optional<std::int64_t> stride = row_stride_of(x);
  if (stride) {
    out.stride = *stride;
  } else {
    out.tensor = contiguous_cuda(x);
  }
  const bool served = is_aligned(out.tensor->raw()) && out.stride % kStep == 0 && out.width % kStep == 0 &&
                      (!for_blas || out.stride >= out.width);
  if (served && out.width > 0) return out;
  const std::int64_t width = std::max((x_width + kStep - 1) / kStep * kStep, kStep);
  const auto halves = static_cast<std::int64_t>(element_size(x.dtype()) / 2);
  TensorPtr padded = Tensor::empty(Dims{m, width}, x.dtype(), on.device());
  on.launched(kernels::cuda::packed_pad_rows(out.tensor->raw(), m, out.width * halves, out.stride * halves,
                                             padded->raw(), width * halves, on.stream()));
  return {std::move(padded), std::min(width, k), width};
}

void describe_gpu(const OnDevice& on, kernels::cuda::PackedGemm& p) {
  const cuda::DeviceProperties& gpu = on.properties();
  p.multiprocessors = gpu.multiprocessors;
  p.max_shared_bytes = gpu.max_shared_per_block;
  p.has_clusters = gpu.major >= 9;
  p.has_wgmma = gpu.major == 9 && gpu.minor == 0;
}

void multiply_unpacked(const char* op, const OnDevice& on, const kernels::cuda::PackedGemm& p, const Tensor& out,
                       const Tensor* bias, std::int64_t chunk,
                       const std::function<int(std::int64_t, std::int64_t, void*)>& unpack) {
  const auto bytes = static_cast<std::int64_t>(element_size(out.dtype()));
  const StorageRef scratch = on.scratch(static_cast<std::size_t>(chunk * p.k * bytes));
  auto* const results = static_cast<std::byte*>(out.raw());
  // For such n results were seen that cuBLAS's epilogue had rounded before it added a bias; beta · c adds it to sums.
  const bool starts_with_bias = bias != nullptr && p.n % kStep != 0;
  if (starts_with_bias) copy(out, *bias);
  for (std::int64_t first = 0; first < p.n; first += chunk) {
    const std::int64_t columns = std::min(chunk, p.n - first);
    on.launched(unpack(first, columns, scratch->data()));
    cuda::BlasProduct product;
    product.m = p.m, product.n = columns, product.k = p.x_width;
    product.a = {p.x, out.dtype(), false, p.x_row, 0};
    product.b = {scratch->data(), out.dtype(), true, p.k, 0};
    product.d = results + first * bytes;
    product.d_dtype = out.dtype(), product.ldd = p.n;
    if (starts_with_bias) {
      product.c = product.d, product.ldc = p.n, product.beta = 1.0;
    } else if (bias != nullptr) {
      product.bias = static_cast<const std::byte*>(p.bias) + first * bytes;
      product.bias_dtype = out.dtype();
    }
    if (!cuda::blas_multiply(op, product, on.index(), on.stream())) {
      throw_error(ErrorKind::kUnsupported, op, ": cuBLAS has no algorithm for ", dtype_name(out.dtype()), " [", p.m,
                  ", ", p.x_width, "] times [", p.x_width, ", ", columns, "] on this GPU");
    }
  }
}

}  // namespace untorch::shims
