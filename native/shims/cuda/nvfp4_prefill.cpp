// Products of many rows with NVFP4 weights in float8, and of two NVFP4 operands, on CUDA.
#include "shims/cuda/nvfp4_prefill.h"

#include <algorithm>

#include "cuda/blas.h"
#include "kernels/cuda/quantize/fp8_rows.h"
#include "kernels/cuda/quantize/nvfp4_operands.h"
#include "kernels/cuda/w4a16/heuristic.h"
#include "kernels/cuda/w4a16/nvfp4_heuristic.h"
#include "kernels/gemm.h"

namespace untorch::shims {
namespace {

constexpr std::int64_t kStep = 16;  // elements that float8 products of cuBLASLt want sizes to be a multiple of
constexpr std::int64_t kMostSums = std::int64_t{64} << 20;  // float32 results that wait to be scaled
// Of a multiprocessor: twice and four times those of 16-bit numbers.
constexpr double kFloat8OperationsASecond = 12e12, kFloat4OperationsASecond = 24e12;

std::int64_t rounded_up(std::int64_t size) { return (size + kStep - 1) / kStep * kStep; }

// Of `columns`, so many that there is room for their sums.
std::int64_t columns_of_sums(std::int64_t m, std::int64_t columns) {
  return std::min(columns, std::max<std::int64_t>(kMostSums / m / 256 * 256, 256));
}

// Of columns [first, first + columns): what scales their sums, without the factors of rows and columns.
kernels::cuda::ScaledSums scaled_sums(const kernels::cuda::Nvfp4Gemm& p, const Tensor& out, std::int64_t first,
                                      std::int64_t columns, const StorageRef& sums) {
  kernels::cuda::ScaledSums scaled;
  scaled.m = p.m, scaled.n = columns;
  scaled.sums = static_cast<const float*>(sums->data()), scaled.sums_row = rounded_up(columns);
  const std::size_t offset = static_cast<std::size_t>(first) * element_size(out.dtype());
  if (p.bias != nullptr) scaled.bias = static_cast<const std::byte*>(p.bias) + offset;
  scaled.out = static_cast<std::byte*>(out.raw()) + offset;
  scaled.dtype = out.dtype(), scaled.out_row = p.n;
  return scaled;
}

// Columns up to the next multiple of 16 have sums, too, of what lies behind the others.
void multiply_into_sums(const char* op, const OnDevice& on, cuda::BlasGemm product, const StorageRef& sums,
                        const char* instead) {
  product.n = rounded_up(product.n);
  product.d = sums->data(), product.d_dtype = DType::kFloat32, product.ldd = product.n;
  if (!cuda::blas_gemm(op, product, on.index(), on.stream())) {
    throw_error(ErrorKind::kUnsupported, op, ": cuBLAS ", cuda::try_blas(nullptr), " has no algorithm for ",
                dtype_name(product.a.dtype), " [", product.m, ", ", product.k, "] times [", product.k, ", ", product.n,
                "] on this GPU: quantise with prefill=", instead);
  }
}

// Where cuBLASLt has no product with scales of rows and columns for this GPU, these sizes or this dtype.
void multiply_and_scale(const char* op, const OnDevice& on, const cuda::BlasGemm& product,
                        const kernels::cuda::Nvfp4Gemm& p, const Tensor& out, std::int64_t first,
                        const StorageRef& sums) {
  const std::int64_t step = columns_of_sums(p.m, product.n);
  cuda::BlasGemm part = product;
  part.scale_a = part.scale_b = nullptr, part.rowwise_scales = false, part.bias = nullptr;
  for (std::int64_t at = 0; at < product.n; at += step) {
    part.n = std::min(step, product.n - at);
    part.b.data = static_cast<const std::byte*>(product.b.data) + at * product.b.ld;
    kernels::cuda::ScaledSums scaled = scaled_sums(p, out, first + at, part.n, sums);
    scaled.row = product.scale_a, scaled.column = product.scale_b + at;
    multiply_into_sums(op, on, part, sums, "'exact'");
    on.launched(kernels::cuda::scale_rows_and_columns(scaled, on.stream()));
  }
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
  const std::int64_t chunk =
      kernels::cuda::dequantize_chunk_n(p, 1, on.properties().l2_bytes, kFloat8OperationsASecond);
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
    on.launched(kernels::cuda::nvfp4_dequantize_fp8(p, first, columns, weight->data(), on.stream()));
    const std::size_t offset = static_cast<std::size_t>(first) * bytes;
    cuda::BlasGemm product;
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
    if (scales_at_once && cuda::blas_gemm(op, product, on.index(), on.stream())) continue;
    if (!sums) {
      sums = on.scratch(static_cast<std::size_t>(p.m * rounded_up(columns_of_sums(p.m, chunk))) * sizeof(float));
    }
    multiply_and_scale(op, on, product, p, out, first, sums);
  }
}

void multiply_nvfp4_float4(const char* op, const OnDevice& on, const kernels::cuda::Nvfp4Gemm& p, const Tensor& out,
                           bool emulated) {
  using namespace kernels::cuda;
  const auto bytes_of = [](std::int64_t count) { return static_cast<std::size_t>(count); };
  const auto padded = [](std::int64_t rows) {
    return (rows + kFloat4TileRows - 1) / kFloat4TileRows * kFloat4TileRows;
  };
  // Not the weight's k: where x is narrower, what is behind it multiplies nothing.
  const std::int64_t k = (p.x_width + kFloat4Step - 1) / kFloat4Step * kFloat4Step;
  const std::int64_t chunk =
      columns_of_sums(p.m, dequantize_chunk_n(p, 1, on.properties().l2_bytes, kFloat4OperationsASecond));
  const StorageRef x = on.scratch(bytes_of(p.m * k / 2)), x_scales = on.scratch(bytes_of(padded(p.m) * k / 16)),
                   row_scales = on.scratch(bytes_of(p.m) * sizeof(float)),
                   weight = on.scratch(bytes_of(rounded_up(chunk) * k / 2)),
                   weight_scales = on.scratch(bytes_of(padded(chunk) * k / 16)),
                   sums = on.scratch(bytes_of(p.m * rounded_up(chunk)) * sizeof(float));
  Float4Rows rows;
  rows.dtype = p.dtype;
  rows.m = p.m, rows.width = p.x_width;
  rows.x = p.x, rows.row = p.x_row;
  rows.k = k, rows.codes = x->data(), rows.block_scales = x_scales->data();
  rows.scales = static_cast<float*>(row_scales->data());
  on.launched(float4_rows(rows, on.stream()));
  for (std::int64_t first = 0; first < p.n; first += chunk) {
    const std::int64_t columns = std::min(chunk, p.n - first);
    on.launched(nvfp4_to_float4(p, first, columns, k, weight->data(), weight_scales->data(), on.stream()));
    ScaledSums scaled = scaled_sums(p, out, first, columns, sums);
    scaled.row = rows.scales, scaled.column = p.global_scales + (p.row_scales ? first : 0);
    scaled.one_column = !p.row_scales;
    if (emulated) {
      Float4Product product;
      product.m = p.m, product.n = columns, product.k = k;
      product.a = x->data(), product.a_scales = x_scales->data();
      product.b = weight->data(), product.b_scales = weight_scales->data();
      product.sums = static_cast<float*>(sums->data()), product.sums_row = scaled.sums_row;
      on.launched(float4_multiply(product, on.stream()));
    } else {
      cuda::BlasGemm product;
      product.m = p.m, product.n = columns, product.k = k;
      product.a = {x->data(), DType::kFloat4E2M1FNx2, false, k, 0};
      product.b = {weight->data(), DType::kFloat4E2M1FNx2, true, k, 0};
      product.block_scale_a = x_scales->data(), product.block_scale_b = weight_scales->data();
      multiply_into_sums(op, on, product, sums, "'fp8' or 'exact', or install cuBLAS of CUDA 12.8 or newer");
    }
    on.launched(scale_rows_and_columns(scaled, on.stream()));
  }
}

}  // namespace untorch::shims
