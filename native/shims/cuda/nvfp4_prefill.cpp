// Products of many rows with NVFP4 weights in float8, on CUDA.
#include "shims/cuda/nvfp4_prefill.h"

#include <algorithm>

#include "cuda/blas.h"
#include "kernels/cuda/float8.h"
#include "kernels/cuda/gemm_narrow.h"
#include "kernels/cuda/nvfp4_choice.h"
#include "kernels/cuda/packed_choice.h"

namespace untorch::shims {
namespace {

constexpr std::int64_t kStep = 16;  // elements that float8 products of cuBLASLt want sizes to be a multiple of
constexpr double kFloat8OperationsASecond = 12e12;  // of a multiprocessor: twice those of 16-bit numbers

std::int64_t rounded_up(std::int64_t size) { return (size + kStep - 1) / kStep * kStep; }

// The sums of a chunk of columns, and then scaled: where cuBLASLt has no product with scales of rows and columns for
// this GPU, these sizes or this dtype.
void multiply_and_scale(const char* op, const OnDevice& on, cuda::BlasProduct product,
                        const kernels::cuda::Nvfp4Gemm& p, const Tensor& out, std::int64_t first, std::int64_t columns,
                        const StorageRef& sums) {
  kernels::cuda::ScaledSums scaled;
  scaled.m = p.m, scaled.n = columns;
  scaled.sums = static_cast<const float*>(sums->data()), scaled.sums_row = rounded_up(columns);
  scaled.row = product.scale_a, scaled.column = product.scale_b;
  const std::size_t bytes = element_size(out.dtype());
  if (p.bias != nullptr) scaled.bias = static_cast<const std::byte*>(p.bias) + static_cast<std::size_t>(first) * bytes;
  scaled.out = static_cast<std::byte*>(out.raw()) + static_cast<std::size_t>(first) * bytes;
  scaled.dtype = scalar_of(out), scaled.out_row = p.n;
  product.n = scaled.sums_row;  // columns that are not there have products, too, of what lies behind the others
  product.d = sums->data(), product.d_dtype = DType::kFloat32, product.ldd = scaled.sums_row;
  product.scale_a = product.scale_b = nullptr, product.rowwise_scales = false, product.bias = nullptr;
  if (!cuda::blas_multiply(op, product, on.index(), on.stream())) {
    throw_error(ErrorKind::kUnsupported, op, ": cuBLAS has no algorithm for float8_e4m3fn [", p.m, ", ", product.k,
                "] times [", product.k, ", ", product.n, "] on this GPU: quantise with prefill='exact'");
  }
  on.launched(kernels::cuda::scale_rows_and_columns(scaled, on.stream()));
}

}  // namespace

void check_prefill_gpu(const char* op, kernels::Nvfp4Prefill prefill, const OnDevice& on) {
  const cuda::DeviceProperties& gpu = on.properties();
  if (const char* const obstacle = kernels::cuda::prefill_obstacle(prefill, gpu.major, gpu.minor)) {
    throw_error(ErrorKind::kUnsupported, op, ": ", obstacle, "; ", device_name(on.device()), ", ", gpu.name, ", is ",
                gpu.architecture());
  }
}

void multiply_nvfp4_float8(const char* op, const OnDevice& on, const kernels::cuda::Nvfp4Gemm& p, const Tensor& out,
                           bool fast_accumulation) {
  const std::int64_t width = rounded_up(p.x_width);
  const std::int64_t columns_at = (p.m + 63) / 64 * 64;  // behind the rows' scales, aligned as memory is
  const std::int64_t chunk = kernels::cuda::packed_chunk(p, 1, on.properties().l2_bytes, kFloat8OperationsASecond);
  const StorageRef x = on.scratch(static_cast<std::size_t>(p.m * width)),
                   weight = on.scratch(static_cast<std::size_t>(rounded_up(chunk) * p.k)),
                   factors = on.scratch(static_cast<std::size_t>(columns_at + p.n) * sizeof(float));
  auto* const row_scales = static_cast<float*>(factors->data());
  kernels::cuda::Float8Rows rows;
  rows.dtype = p.dtype;
  rows.m = p.m, rows.width = p.x_width;
  rows.x = p.x, rows.row = p.x_row;
  rows.to = x->data(), rows.to_width = width;
  rows.scales = row_scales;
  rows.factors = p.global_scales, rows.one_factor = !p.row_scales;
  rows.by = static_cast<float>(1 << kernels::cuda::kNvfp4Float8Shift);
  rows.columns = row_scales + columns_at, rows.n = p.n;
  on.launched(kernels::cuda::float8_rows(rows, on.stream()));
  // Sizes that are no multiple of 16 make sums, and so does float32, to which cuBLASLt adds no bias.
  const bool scales_at_once = p.n % kStep == 0 && out.dtype() != DType::kFloat32;
  const std::size_t bytes = element_size(out.dtype());
  StorageRef sums;
  for (std::int64_t first = 0; first < p.n; first += chunk) {
    const std::int64_t columns = std::min(chunk, p.n - first);
    on.launched(kernels::cuda::nvfp4_unpack_float8(p, first, columns, weight->data(), on.stream()));
    const std::size_t offset = static_cast<std::size_t>(first) * bytes;
    cuda::BlasProduct product;
    product.m = p.m, product.n = columns, product.k = width;
    product.a = {x->data(), DType::kFloat8E4M3FN, false, width, 0};
    product.b = {weight->data(), DType::kFloat8E4M3FN, true, p.k, 0};
    product.d = static_cast<std::byte*>(out.raw()) + offset;
    product.d_dtype = out.dtype(), product.ldd = p.n;
    product.scale_a = rows.scales, product.scale_b = rows.columns + first, product.rowwise_scales = true;
    product.fast_accumulation = fast_accumulation;
    if (p.bias != nullptr) {
      product.bias = static_cast<const std::byte*>(p.bias) + offset, product.bias_dtype = out.dtype();
    }
    if (scales_at_once && cuda::blas_multiply(op, product, on.index(), on.stream())) continue;
    if (!sums) sums = on.scratch(static_cast<std::size_t>(p.m * rounded_up(chunk)) * sizeof(float));
    multiply_and_scale(op, on, product, p, out, first, columns, sums);
  }
}

}  // namespace untorch::shims
