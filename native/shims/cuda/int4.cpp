// _weight_int4pack_mm and untorch::int4_linear on CUDA.
#include "kernels/cuda/int4.h"

#include <algorithm>
#include <cstdlib>

#include "cuda/blas.h"
#include "kernels/cuda/int4_choice.h"
#include "shims/cuda/shim.h"
#include "shims/int4_checks.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

using kernels::cuda::Int4Gemm;
using kernels::cuda::Int4Path;

constexpr std::uintptr_t kAlignment = 16;  // of what the kernels read 16 bytes at a time
constexpr std::int64_t kStep = 8;          // elements of x in that

bool is_aligned(const void* address) { return reinterpret_cast<std::uintptr_t>(address) % kAlignment == 0; }

// For benchmarks, which measure where one kernel should take over from the other.
const kernels::cuda::Int4Limits& limits() {
  static const kernels::cuda::Int4Limits made = [] {
    kernels::cuda::Int4Limits out;
    if (const char* const rows = std::getenv("UNTORCH_INT4_MMA_ROWS")) {
      out.mma_rows = out.mma_rows_alone = std::atoll(rows);
    }
    if (const char* const rows = std::getenv("UNTORCH_INT4_WGMMA_ROWS")) out.wgmma_rows = std::atoll(rows);
    if (const char* const rows = std::getenv("UNTORCH_INT4_STREAM_ROWS")) out.stream_rows = std::atoll(rows);
    if (const char* const rows = std::getenv("UNTORCH_INT4_NARROW_ROWS")) out.narrow_rows = std::atoll(rows);
    return out;
  }();
  return made;
}

void check_gpu(const char* op, const OnDevice& on) {
  if (on.properties().major < 8) {
    throw_error(ErrorKind::kUnsupported, op, ": int4 weights need a GPU of compute capability 8.0 or newer, ",
                device_name(on.device()), " is ", on.properties().architecture());
  }
}

// The tensor, dense and aligned: another handle on it, or a copy.
TensorPtr aligned(const Tensor& tensor) {
  TensorPtr dense = contiguous_cuda(tensor);
  if (is_aligned(dense->raw())) return dense;
  TensorPtr out = Tensor::empty(dense->sizes(), dense->dtype(), dense->device());
  copy(*out, *dense);
  return out;
}

// x as rows at one distance: where, how wide and how far apart. What the kernels cannot read is copied, with zeros
// behind; for cuBLAS, too, which is slower with such rows and rounds twice where there is a bias.
struct Rows {
  TensorPtr tensor;
  std::int64_t width = 0, stride = 0;
};
Rows rows_of(const OnDevice& on, const Tensor& x, const Int4Shape& shape, bool for_blas) {
  Rows out{std::make_unique<Tensor>(x), shape.x_width, shape.x_width};
  const std::optional<std::int64_t> stride = row_stride_of(x);
  if (stride) {
    out.stride = *stride;
  } else {
    out.tensor = contiguous_cuda(x);
  }
  const bool served = is_aligned(out.tensor->raw()) && out.stride % kStep == 0 && out.width % kStep == 0 &&
                      (!for_blas || out.stride >= out.width);
  if (served && out.width > 0) return out;
  const std::int64_t width = std::max((shape.x_width + kStep - 1) / kStep * kStep, kStep);
  const auto halves = static_cast<std::int64_t>(element_size(x.dtype()) / 2);
  TensorPtr padded = Tensor::empty(Dims{shape.m, width}, x.dtype(), on.device());
  on.launched(kernels::cuda::int4_pad_rows(out.tensor->raw(), shape.m, out.width * halves, out.stride * halves,
                                           padded->raw(), width * halves, on.stream()));
  return {std::move(padded), std::min(width, shape.k), width};
}

// Chunks of columns, unpacked and multiplied one after the other in the same scratch.
void multiply_unpacked(const char* op, const OnDevice& on, const Int4Gemm& p, DType dtype) {
  const auto bytes = static_cast<std::int64_t>(element_size(dtype));
  const std::int64_t chunk = kernels::cuda::int4_chunk(p.n, p.k, bytes, on.properties().l2_bytes, limits());
  const StorageRef scratch = on.scratch(static_cast<std::size_t>(chunk * p.k * bytes));
  for (std::int64_t first = 0; first < p.n; first += chunk) {
    const std::int64_t columns = std::min(chunk, p.n - first);
    on.launched(kernels::cuda::int4_unpack(p, first, columns, scratch->data(), on.stream()));
    cuda::BlasProduct product;
    product.m = p.m, product.n = columns, product.k = p.x_width;
    product.a = {p.x, dtype, false, p.x_row, 0};
    product.b = {scratch->data(), dtype, true, p.k, 0};
    product.d = static_cast<std::byte*>(p.out) + first * bytes;
    product.d_dtype = dtype, product.ldd = p.n;
    if (p.bias != nullptr) {
      product.bias = static_cast<const std::byte*>(p.bias) + first * bytes;
      product.bias_dtype = dtype;
    }
    if (!cuda::blas_multiply(op, product, on.index(), on.stream())) {
      throw_error(ErrorKind::kUnsupported, op, ": cuBLAS has no algorithm for ", dtype_name(dtype), " [", p.m, ", ",
                  p.x_width, "] times [", p.x_width, ", ", columns, "] on this GPU");
    }
  }
}

TensorPtr multiply_int4(const char* op, const OnDevice& on, const Tensor& x, const Tensor& weight, const Tensor& scales,
                        const Tensor* bias, const Int4Shape& shape) {
  TensorPtr out = Tensor::empty(shape.out_sizes, x.dtype(), on.device());
  if (out->numel() == 0) return out;
  Int4Gemm p;
  p.dtype = scalar_of(x);
  p.m = shape.m, p.n = shape.n, p.k = shape.k;
  p.inner_k_tiles = shape.inner_k_tiles, p.group = shape.group;
  const cuda::DeviceProperties& gpu = on.properties();
  p.multiprocessors = gpu.multiprocessors;
  p.max_shared_bytes = gpu.max_shared_per_block;
  p.has_clusters = gpu.major >= 9;
  p.has_wgmma = gpu.major == 9 && gpu.minor == 0;
  const Int4Path path = kernels::cuda::choose_int4(p, limits());
  const Rows rows = rows_of(on, x, shape, path == Int4Path::kUnpack);
  const TensorPtr words = aligned(weight), factors = aligned(*to_dtype_cuda(scales, x.dtype()));
  const TensorPtr added = bias == nullptr ? nullptr : contiguous_cuda(*bias);
  p.x = rows.tensor->raw(), p.x_row = rows.stride, p.x_width = rows.width;
  p.weight = words->raw(), p.scales = factors->raw();
  p.bias = added == nullptr ? nullptr : added->raw();
  p.out = out->raw();
  if (path == Int4Path::kNarrow) {
    on.launched(kernels::cuda::int4_narrow(p, on.stream()));
  } else if (path == Int4Path::kMma || path == Int4Path::kStream) {
    const bool streams = path == Int4Path::kStream;
    const std::size_t bytes = streams ? kernels::cuda::int4_stream_workspace(p) : kernels::cuda::int4_mma_workspace(p);
    const StorageRef workspace = bytes > 0 ? on.scratch(bytes) : StorageRef();
    if (workspace) p.workspace = static_cast<float*>(workspace->data());
    on.launched(streams ? kernels::cuda::int4_stream(p, on.stream()) : kernels::cuda::int4_mma(p, on.stream()));
  } else if (path == Int4Path::kWgmma) {
    on.launched(kernels::cuda::int4_wgmma(p, on.stream()));
  } else {
    multiply_unpacked(op, on, p, x.dtype());
  }
  return out;
}

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
    check_gpu(op, on);
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
    check_gpu(op, on);
    give(ret0, multiply_int4(op, on, input, packed, scales, added, shape), op);
  });
}
