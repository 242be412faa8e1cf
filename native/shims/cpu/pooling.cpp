// Average and maximum pooling, sliding and adaptive, in two and three dimensions.
#include "kernels/cpu/pooling.h"

#include "shims/nn.h"
#include "shims/pooling.h"

using namespace untorch;
using namespace untorch::shims;
using kernels::Divisor;
using kernels::PoolShape;

namespace {

struct Pool {
  PoolShape shape{};
  Dims sizes;  // of the output
  bool channels_last = false;
};

// The windows and the layouts of a problem.
Pool laid_out(const PoolProblem& problem) {
  Pool pool;
  PoolShape& shape = pool.shape;
  pool.sizes = problem.sizes;
  pool.channels_last = problem.channels_last;
  shape.batch = problem.batch;
  shape.channels = problem.channels;
  shape.input = problem.input;
  shape.output = problem.output;
  shape.in = {problem.batch_stride, problem.channel_stride, problem.input_stride};
  for (std::size_t d = 0; d < 3; ++d) {
    shape.windows[d] = problem.adaptive
                           ? kernels::adaptive_windows(problem.input[d], problem.output[d])
                           : kernels::sliding_windows(problem.input[d], problem.output[d], problem.kernel[d],
                                                      problem.stride[d], problem.padding[d], problem.dilation[d]);
  }
  const Dims strides = pool.channels_last ? channels_last_strides(pool.sizes) : contiguous_strides(pool.sizes);
  const std::size_t lead = strides.size() - problem.spatial, missing = 3 - problem.spatial;
  shape.out.batch_stride = lead == 2 ? strides[0] : 0;
  shape.out.channel_stride = strides[lead - 1];
  for (std::size_t d = 0; d < 3; ++d) shape.out.stride[d] = d < missing ? 0 : strides[lead + d - missing];
  shape.channels_innermost = pool.channels_last && shape.in.channel_stride == 1 && shape.channels > 1;
  return pool;
}

template <class Fn>
void dispatch_pool(const char* op, DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kUInt8:
      return fn.template operator()<std::uint8_t>();
    case DType::kInt8:
      return fn.template operator()<std::int8_t>();
    case DType::kInt16:
      return fn.template operator()<std::int16_t>();
    case DType::kInt32:
      return fn.template operator()<std::int32_t>();
    case DType::kInt64:
      return fn.template operator()<std::int64_t>();
    default:
      return dispatch_floating(op, dtype, std::forward<Fn>(fn));
  }
}

TensorPtr average(const char* op, const Tensor& input, const Pool& pool, Divisor divisor, std::int64_t fixed) {
  TensorPtr out = empty_format(pool.sizes, input.dtype(), pool.channels_last);
  if (out->numel() == 0) return out;
  dispatch_pool(op, input.dtype(),
                [&]<class T>() { kernels::avg_pool(pool.shape, divisor, fixed, input.data<T>(), out->data<T>()); });
  return out;
}

void maximum(const char* op, const Tensor& input, const Pool& pool, AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  TensorPtr out = empty_format(pool.sizes, input.dtype(), pool.channels_last);
  TensorPtr indices = empty_format(pool.sizes, DType::kInt64, pool.channels_last);
  if (out->numel() != 0) {
    dispatch_pool(op, input.dtype(), [&]<class T>() {
      kernels::max_pool(pool.shape, input.data<T>(), out->data<T>(), indices->data<std::int64_t>());
    });
  }
  check(ret1 != nullptr, op, ": output pointer is null");
  give(ret0, std::move(out), op);
  give(ret1, std::move(indices), op);
}

constexpr std::int64_t kOne[] = {1};

AOTITorchError avg_pool_shim(const char* op, std::int64_t n, AtenTensorHandle self, DimSpan kernel, DimSpan stride,
                             DimSpan padding, bool ceil_mode, bool count_include_pad,
                             const std::int64_t* divisor_override, AtenTensorHandle* ret0) {
  return guarded(op, [&] {
    const Tensor& input = cpu_input(self, op, "self");
    check(divisor_override == nullptr || *divisor_override != 0, op, ": argument 'divisor_override' must not be 0");
    // Three-dimensional averages are row-major whatever comes in, as in PyTorch.
    const Pool pool = laid_out(sliding_pool(op, input, n, kernel, stride, padding, DimSpan{kOne}, ceil_mode, n == 2));
    const Divisor divisor = divisor_override != nullptr ? Divisor::kFixed
                            : count_include_pad         ? Divisor::kCovered
                                                        : Divisor::kWindow;
    give(ret0, average(op, input, pool, divisor, divisor_override == nullptr ? 0 : *divisor_override), op);
  });
}

AOTITorchError adaptive_avg_shim(const char* op, std::int64_t n, AtenTensorHandle self, DimSpan output,
                                 AtenTensorHandle* ret0) {
  return guarded(op, [&] {
    const Tensor& input = cpu_input(self, op, "self");
    give(ret0, average(op, input, laid_out(adaptive_pool(op, input, n, output, n == 2)), Divisor::kWindow, 0), op);
  });
}

AOTITorchError adaptive_max_shim(const char* op, std::int64_t n, AtenTensorHandle self, DimSpan output,
                                 AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  return guarded(op, [&] {
    const Tensor& input = cpu_input(self, op, "self");
    maximum(op, input, laid_out(adaptive_pool(op, input, n, output, n == 2)), ret0, ret1);
  });
}

AOTITorchError max_pool_shim(const char* op, std::int64_t n, AtenTensorHandle self, DimSpan kernel, DimSpan stride,
                             DimSpan padding, DimSpan dilation, bool ceil_mode, AtenTensorHandle* ret0,
                             AtenTensorHandle* ret1) {
  return guarded(op, [&] {
    const Tensor& input = cpu_input(self, op, "self");
    maximum(op, input, laid_out(sliding_pool(op, input, n, kernel, stride, padding, dilation, ceil_mode, true)), ret0,
            ret1);
  });
}

}  // namespace

#define UNTORCH_POOLING_SHIMS(N)                                                                                      \
  UNTORCH_SHIM aoti_torch_cpu_avg_pool##N##d(                                                                         \
      AtenTensorHandle self, const std::int64_t* kernel_size, std::int64_t kernel_size_len,                           \
      const std::int64_t* stride, std::int64_t stride_len, const std::int64_t* padding, std::int64_t padding_len,     \
      std::int32_t ceil_mode, std::int32_t count_include_pad, std::int64_t* divisor_override,                         \
      AtenTensorHandle* ret0) {                                                                                       \
    return avg_pool_shim("avg_pool" #N "d", N, self, ints(kernel_size, kernel_size_len), ints(stride, stride_len),    \
                         ints(padding, padding_len), ceil_mode != 0, count_include_pad != 0, divisor_override, ret0); \
  }                                                                                                                   \
  UNTORCH_SHIM aoti_torch_cpu__adaptive_avg_pool##N##d(AtenTensorHandle self, const std::int64_t* output_size,        \
                                                       std::int64_t output_size_len, AtenTensorHandle* ret0) {        \
    return adaptive_avg_shim("_adaptive_avg_pool" #N "d", N, self, ints(output_size, output_size_len), ret0);         \
  }                                                                                                                   \
  UNTORCH_SHIM aoti_torch_cpu_adaptive_max_pool##N##d(AtenTensorHandle self, const std::int64_t* output_size,         \
                                                      std::int64_t output_size_len, AtenTensorHandle* ret0,           \
                                                      AtenTensorHandle* ret1) {                                       \
    return adaptive_max_shim("adaptive_max_pool" #N "d", N, self, ints(output_size, output_size_len), ret0, ret1);    \
  }                                                                                                                   \
  UNTORCH_SHIM aoti_torch_cpu_max_pool##N##d_with_indices(                                                            \
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
