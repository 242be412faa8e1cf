// Average and maximum pooling on CUDA, sliding and adaptive, in two and three dimensions.
#include "kernels/cuda/pooling.h"

#include "shims/cuda/shim.h"
#include "shims/nn.h"
#include "shims/pooling.h"

using namespace untorch;
using namespace untorch::shims;
using kernels::cuda::PoolDivisor;

namespace {

constexpr std::int64_t kOne[] = {1};

void check_dtype(const char* op, const Tensor& input) {
  if (is_floating(input.dtype())) return;
  throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(input.dtype()),
              " is not supported on CUDA, expected float16, bfloat16, float32 or float64");
}

kernels::cuda::Pool lowered(const PoolProblem& problem) {
  kernels::cuda::Pool pool{};
  pool.batch = problem.batch;
  pool.channels = problem.channels;
  pool.adaptive = problem.adaptive;
  for (std::size_t d = 0; d < 3; ++d) {
    pool.input[d] = problem.input[d];
    pool.output[d] = problem.output[d];
    pool.kernel[d] = problem.kernel[d];
    pool.stride[d] = problem.stride[d];
    pool.padding[d] = problem.padding[d];
    pool.dilation[d] = problem.dilation[d];
    pool.in_at[d] = problem.input_stride[d];
  }
  pool.in_batch = problem.batch_stride;
  pool.in_channel = problem.channel_stride;
  pool.channels_last = problem.channels_last;
  return pool;
}

TensorPtr average(const char* op, const Tensor& input, const PoolProblem& problem, PoolDivisor divisor,
                  std::int64_t fixed) {
  const OnDevice on(op, input);
  TensorPtr out = empty_format(problem.sizes, input.dtype(), problem.channels_last, input.device());
  on.launched(kernels::cuda::avg_pool(lowered(problem), divisor, fixed, scalar_of(input), input.raw(), out->raw(),
                                      on.stream()));
  return out;
}

void maximum(const char* op, const Tensor& input, const PoolProblem& problem, AtenTensorHandle* ret0,
             AtenTensorHandle* ret1) {
  check(ret0 != nullptr && ret1 != nullptr, op, ": output pointer is null");
  const OnDevice on(op, input);
  TensorPtr out = empty_format(problem.sizes, input.dtype(), problem.channels_last, input.device());
  TensorPtr indices = empty_format(problem.sizes, DType::kInt64, problem.channels_last, input.device());
  on.launched(kernels::cuda::max_pool(lowered(problem), scalar_of(input), input.raw(), out->raw(),
                                      indices->data<std::int64_t>(), on.stream()));
  give(ret0, std::move(out), op);
  give(ret1, std::move(indices), op);
}

AOTITorchError avg_pool_shim(const char* op, std::int64_t n, AtenTensorHandle self, DimSpan kernel, DimSpan stride,
                             DimSpan padding, bool ceil_mode, bool count_include_pad,
                             const std::int64_t* divisor_override, AtenTensorHandle* ret0) {
  return guarded(op, [&] {
    const Tensor& input = cuda_input(self, op, "self");
    check_dtype(op, input);
    check(divisor_override == nullptr || *divisor_override != 0, op, ": argument 'divisor_override' must not be 0");
    // Three-dimensional averages are row-major whatever comes in, as in PyTorch.
    const PoolProblem problem = sliding_pool(op, input, n, kernel, stride, padding, DimSpan{kOne}, ceil_mode, n == 2);
    const PoolDivisor divisor = divisor_override != nullptr ? PoolDivisor::kFixed
                                : count_include_pad         ? PoolDivisor::kCovered
                                                            : PoolDivisor::kWindow;
    give(ret0, average(op, input, problem, divisor, divisor_override == nullptr ? 0 : *divisor_override), op);
  });
}

AOTITorchError adaptive_avg_shim(const char* op, std::int64_t n, AtenTensorHandle self, DimSpan output,
                                 AtenTensorHandle* ret0) {
  return guarded(op, [&] {
    const Tensor& input = cuda_input(self, op, "self");
    check_dtype(op, input);
    give(ret0, average(op, input, adaptive_pool(op, input, n, output, n == 2), PoolDivisor::kWindow, 0), op);
  });
}

AOTITorchError adaptive_max_shim(const char* op, std::int64_t n, AtenTensorHandle self, DimSpan output,
                                 AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  return guarded(op, [&] {
    const Tensor& input = cuda_input(self, op, "self");
    check_dtype(op, input);
    maximum(op, input, adaptive_pool(op, input, n, output, n == 2), ret0, ret1);
  });
}

AOTITorchError max_pool_shim(const char* op, std::int64_t n, AtenTensorHandle self, DimSpan kernel, DimSpan stride,
                             DimSpan padding, DimSpan dilation, bool ceil_mode, AtenTensorHandle* ret0,
                             AtenTensorHandle* ret1) {
  return guarded(op, [&] {
    const Tensor& input = cuda_input(self, op, "self");
    check_dtype(op, input);
    maximum(op, input, sliding_pool(op, input, n, kernel, stride, padding, dilation, ceil_mode, true), ret0, ret1);
  });
}

}  // namespace

#define UNTORCH_POOLING_SHIMS(N)                                                                                      \
  UNTORCH_SHIM aoti_torch_cuda_avg_pool##N##d(                                                                        \
      AtenTensorHandle self, const std::int64_t* kernel_size, std::int64_t kernel_size_len,                           \
      const std::int64_t* stride, std::int64_t stride_len, const std::int64_t* padding, std::int64_t padding_len,     \
      std::int32_t ceil_mode, std::int32_t count_include_pad, std::int64_t* divisor_override,                         \
      AtenTensorHandle* ret0) {                                                                                       \
    return avg_pool_shim("avg_pool" #N "d", N, self, ints(kernel_size, kernel_size_len), ints(stride, stride_len),    \
                         ints(padding, padding_len), ceil_mode != 0, count_include_pad != 0, divisor_override, ret0); \
  }                                                                                                                   \
  UNTORCH_SHIM aoti_torch_cuda__adaptive_avg_pool##N##d(AtenTensorHandle self, const std::int64_t* output_size,       \
                                                        std::int64_t output_size_len, AtenTensorHandle* ret0) {       \
    return adaptive_avg_shim("_adaptive_avg_pool" #N "d", N, self, ints(output_size, output_size_len), ret0);         \
  }                                                                                                                   \
  UNTORCH_SHIM aoti_torch_cuda_adaptive_max_pool##N##d(AtenTensorHandle self, const std::int64_t* output_size,        \
                                                       std::int64_t output_size_len, AtenTensorHandle* ret0,          \
                                                       AtenTensorHandle* ret1) {                                      \
    return adaptive_max_shim("adaptive_max_pool" #N "d", N, self, ints(output_size, output_size_len), ret0, ret1);    \
  }                                                                                                                   \
  UNTORCH_SHIM aoti_torch_cuda_max_pool##N##d_with_indices(                                                           \
      AtenTensorHandle self, const std::int64_t* kernel_size, std::int64_t kernel_size_len,                           \
      const std::int64_t* stride, std::int64_t stride_len, const std::int64_t* padding, std::int64_t padding_len,     \
      const std::int64_t* dilation, std::int64_t dilation_len, std::int32_t ceil_mode, AtenTensorHandle* ret0,        \
      AtenTensorHandle* ret1) {                                                                                       \
    return max_pool_shim("max_pool" #N "d_with_indices", N, self, ints(kernel_size, kernel_size_len),                 \
                         ints(stride, stride_len), ints(padding, padding_len), ints(dilation, dilation_len),          \
                         ceil_mode != 0, ret0, ret1);                                                                 \
  }
UNTORCH_POOLING_SHIMS(2)
UNTORCH_POOLING_SHIMS(3)
#undef UNTORCH_POOLING_SHIMS
