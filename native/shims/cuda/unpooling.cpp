// Max unpooling and fractional max pooling on CUDA.
#include "kernels/cuda/unpooling.h"

#include "cuda/device_error.h"
#include "shims/cuda/shim.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

void check_dtype(const char* op, const Tensor& input) {
  if (is_floating(input.dtype())) return;
  throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(input.dtype()),
              " is not supported on CUDA, expected float16, bfloat16, float32 or float64");
}

void unpool(const char* op, std::int64_t n, AtenTensorHandle self, AtenTensorHandle index, DimSpan output_size,
            AtenTensorHandle* ret0) {
  const Tensor &input = cuda_input(self, op, "self"), &indices = cuda_input(index, op, "indices");
  check_dtype(op, input);
  check(input.dim() == n + 1 || input.dim() == n + 2, op, ": argument 'self' must be ", n + 1, "-D or ", n + 2,
        "-D, got shape ", to_string(input.sizes()));
  check(indices.sizes() == input.sizes(), op, ": argument 'indices' must have shape ", to_string(input.sizes()),
        ", got ", to_string(indices.sizes()));
  check(indices.dtype() == DType::kInt64, op, ": argument 'indices' must be int64, got ", dtype_name(indices.dtype()));
  check(static_cast<std::int64_t>(output_size.size()) == n, op, ": argument 'output_size' must have ", n,
        " values, got ", to_string(output_size));
  Dims sizes(input.sizes());
  for (std::size_t d = 0; d < output_size.size(); ++d) {
    sizes[sizes.size() - output_size.size() + d] = output_size[d];
  }
  const std::int64_t image = checked_numel(output_size);
  std::int64_t pixels = 1, planes = 1;
  for (std::int64_t d = 0; d < input.dim(); ++d) (d < input.dim() - n ? planes : pixels) *= input.size(d);

  const OnDevice on(op, input, {&indices});
  const TensorPtr x = contiguous_cuda(input), at = contiguous_cuda(indices);
  // Row-major whatever comes in, as PyTorch's is on CUDA.
  TensorPtr out = Tensor::empty(sizes, input.dtype(), input.device());
  if (out->numel() != 0) {
    const std::size_t bytes = static_cast<std::size_t>(out->numel()) * sizeof(unsigned long long);
    const StorageRef winners = on.scratch(bytes);
    cuda::check_driver(
        cuda::driver().memset_d8_async(reinterpret_cast<cuda::DevicePtr>(winners->data()), 0, bytes, on.stream()), op);
    on.launched(kernels::cuda::max_unpool(planes, pixels, image, static_cast<int>(element_size(input.dtype())),
                                          x->raw(), at->data<std::int64_t>(),
                                          static_cast<unsigned long long*>(winners->data()), out->raw(),
                                          cuda::DeviceErrors::word(on.index()), on.stream()));
  }
  give(ret0, std::move(out), op);
}

void fractional(const char* op, std::int64_t n, AtenTensorHandle self, DimSpan kernel_size, DimSpan output_size,
                AtenTensorHandle samples_handle, AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  const Tensor &input = cuda_input(self, op, "self"), &random = cuda_input(samples_handle, op, "random_samples");
  check(ret0 != nullptr && ret1 != nullptr, op, ": output pointer is null");
  check_dtype(op, input);
  check(input.dim() == n + 1 || input.dim() == n + 2, op, ": argument 'self' must be ", n + 1, "-D or ", n + 2,
        "-D, got shape ", to_string(input.sizes()));
  check(static_cast<std::int64_t>(kernel_size.size()) == n && static_cast<std::int64_t>(output_size.size()) == n, op,
        ": arguments 'kernel_size' and 'output_size' must have ", n, " values, got ", to_string(kernel_size), " and ",
        to_string(output_size));
  check(random.dtype() == input.dtype(), op, ": argument 'random_samples' must be ", dtype_name(input.dtype()),
        " like self, got ", dtype_name(random.dtype()));
  kernels::cuda::FractionalPool pool{};
  const bool batched = input.dim() == n + 2;
  pool.batch = batched ? input.size(0) : 1;
  pool.channels = input.size(-n - 1);
  check(random.dim() == 3 && random.size(0) >= pool.batch && random.size(1) >= pool.channels && random.size(2) == n, op,
        ": argument 'random_samples' must have shape ", to_string(Dims{pool.batch, pool.channels, n}), ", got ",
        to_string(random.sizes()));
  pool.in_batch = batched ? input.stride(0) : 0;
  pool.in_channel = input.stride(-n - 1);
  pool.sample_batch = random.stride(0);
  pool.sample_channel = random.stride(1);
  pool.sample_at = random.stride(2);
  Dims sizes(input.sizes());
  for (std::int64_t d = 0; d < 3; ++d) {
    const std::int64_t from = d - (3 - n);
    pool.input[d] = pool.output[d] = pool.kernel[d] = 1;
    pool.sample_slot[d] = -1;
    if (from < 0) continue;
    pool.input[d] = input.size(from - n);
    pool.in_at[d] = input.stride(from - n);
    pool.kernel[d] = kernel_size[static_cast<std::size_t>(from)];
    pool.output[d] = output_size[static_cast<std::size_t>(from)];
    // Two-dimensional samples come as (width, height), three-dimensional ones as (time, height, width).
    pool.sample_slot[d] = static_cast<int>(n == 2 ? 1 - from : from);
    check(pool.kernel[d] > 0 && pool.output[d] >= 0 && pool.output[d] + pool.kernel[d] - 1 <= pool.input[d], op,
          ": kernel ", to_string(kernel_size), " with output ", to_string(output_size), " does not fit into input ",
          to_string(input.sizes()));
    sizes[sizes.size() - static_cast<std::size_t>(n - from)] = pool.output[d];
  }
  const OnDevice on(op, input, {&random});
  TensorPtr out = Tensor::empty(sizes, input.dtype(), input.device());
  TensorPtr indices = Tensor::empty(sizes, DType::kInt64, input.device());
  on.launched(kernels::cuda::fractional_max_pool(pool, scalar_of(input), input.raw(), random.raw(), out->raw(),
                                                 indices->data<std::int64_t>(), on.stream()));
  give(ret0, std::move(out), op);
  give(ret1, std::move(indices), op);
}

}  // namespace

UNTORCH_SHIM aoti_torch_cuda_max_unpool2d(AtenTensorHandle self, AtenTensorHandle indices,
                                          const std::int64_t* output_size, std::int64_t output_size_len,
                                          AtenTensorHandle* ret0) {
  return guarded("max_unpool2d",
                 [&] { unpool("max_unpool2d", 2, self, indices, ints(output_size, output_size_len), ret0); });
}

// Stride and padding are in the signature only: the indices say everything.
UNTORCH_SHIM aoti_torch_cuda_max_unpool3d(AtenTensorHandle self, AtenTensorHandle indices,
                                          const std::int64_t* output_size, std::int64_t output_size_len,
                                          const std::int64_t* /*stride*/, std::int64_t /*stride_len*/,
                                          const std::int64_t* /*padding*/, std::int64_t /*padding_len*/,
                                          AtenTensorHandle* ret0) {
  return guarded("max_unpool3d",
                 [&] { unpool("max_unpool3d", 3, self, indices, ints(output_size, output_size_len), ret0); });
}

UNTORCH_SHIM aoti_torch_cuda_fractional_max_pool2d(AtenTensorHandle self, const std::int64_t* kernel_size,
                                                   std::int64_t kernel_size_len, const std::int64_t* output_size,
                                                   std::int64_t output_size_len, AtenTensorHandle random_samples,
                                                   AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  return guarded("fractional_max_pool2d", [&] {
    fractional("fractional_max_pool2d", 2, self, ints(kernel_size, kernel_size_len), ints(output_size, output_size_len),
               random_samples, ret0, ret1);
  });
}

UNTORCH_SHIM aoti_torch_cuda_fractional_max_pool3d(AtenTensorHandle self, const std::int64_t* kernel_size,
                                                   std::int64_t kernel_size_len, const std::int64_t* output_size,
                                                   std::int64_t output_size_len, AtenTensorHandle random_samples,
                                                   AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  return guarded("fractional_max_pool3d", [&] {
    fractional("fractional_max_pool3d", 3, self, ints(kernel_size, kernel_size_len), ints(output_size, output_size_len),
               random_samples, ret0, ret1);
  });
}
