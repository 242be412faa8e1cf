// Average and maximum pooling, sliding and adaptive, in two and three dimensions.
#include "kernels/cpu/pooling.h"

#include "shims/cpu/nn.h"

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

// The input's part of a pooling problem over `n` spatial dimensions; [c, …] and [n, c, …] are taken.
Pool start(const char* op, const Tensor& input, std::int64_t n) {
  const std::int64_t ndim = input.dim();
  check(ndim == n + 1 || ndim == n + 2, op, ": argument 'self' must be ", n + 1, "-D or ", n + 2, "-D, got shape ",
        to_string(input.sizes()));
  for (std::int64_t d = ndim - n - 1; d < ndim; ++d) {
    check(input.size(d) > 0, op, ": argument 'self' must not be empty but for the batch, got shape ",
          to_string(input.sizes()));
  }
  Pool pool;
  const bool batched = ndim == n + 2;
  pool.shape.batch = batched ? input.size(0) : 1;
  pool.shape.channels = input.size(-n - 1);
  pool.shape.in.batch_stride = batched ? input.stride(0) : 0;
  pool.shape.in.channel_stride = input.stride(-n - 1);
  for (std::int64_t d = 0; d < 3; ++d) {
    const auto i = static_cast<std::size_t>(d);
    const bool missing = d < 3 - n;
    pool.shape.input[i] = missing ? 1 : input.size(d - 3);
    pool.shape.in.stride[i] = missing ? 0 : input.stride(d - 3);
  }
  pool.sizes = input.sizes();
  pool.channels_last = suggests_channels_last(input) && ndim == n + 2;
  return pool;
}

// Fills in the output's layout once the windows stand.
void finish(Pool& pool, std::int64_t n, bool keep_channels_last) {
  pool.channels_last = pool.channels_last && keep_channels_last;
  const std::size_t lead = pool.sizes.size() - static_cast<std::size_t>(n);
  for (std::size_t d = 0; d < static_cast<std::size_t>(n); ++d) {
    pool.sizes[lead + d] = pool.shape.output[3 - static_cast<std::size_t>(n) + d];
  }
  const Dims strides = pool.channels_last ? channels_last_strides(pool.sizes) : contiguous_strides(pool.sizes);
  const bool batched = lead == 2;
  pool.shape.out.batch_stride = batched ? strides[0] : 0;
  pool.shape.out.channel_stride = strides[lead - 1];
  for (std::size_t d = 0; d < 3; ++d) {
    const std::size_t missing = 3 - static_cast<std::size_t>(n);
    pool.shape.out.stride[d] = d < missing ? 0 : strides[lead + d - missing];
  }
  pool.shape.channels_innermost = pool.channels_last && pool.shape.in.channel_stride == 1 && pool.shape.channels > 1;
}

Pool sliding(const char* op, const Tensor& input, std::int64_t n, DimSpan kernel, DimSpan stride, DimSpan padding,
             DimSpan dilation, bool ceil_mode, bool keep_channels_last) {
  Pool pool = start(op, input, n);
  const auto k = expand_list(kernel, n, op, "kernel_size");
  const auto s = stride.empty() ? k : expand_list(stride, n, op, "stride");
  const auto p = expand_list(padding, n, op, "padding");
  const auto d = expand_list(dilation, n, op, "dilation");
  pool.shape.windows.fill(kernels::sliding_windows(1, 1, 1, 1, 0, 1));
  pool.shape.output = {1, 1, 1};
  for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
    const std::size_t at = 3 - static_cast<std::size_t>(n) + i;
    check(k[i] > 0, op, ": argument 'kernel_size' must be positive, got ", to_string(kernel));
    check(s[i] > 0, op, ": argument 'stride' must be positive, got ", to_string(stride));
    check(d[i] > 0, op, ": argument 'dilation' must be positive, got ", to_string(dilation));
    check(p[i] >= 0 && p[i] <= ((k[i] - 1) * d[i] + 1) / 2, op,
          ": argument 'padding' must be between 0 and half the kernel, got ", to_string(padding), " with kernel ",
          to_string(kernel));
    const std::int64_t size = kernels::pooled_size(pool.shape.input[at], k[i], s[i], p[i], d[i], ceil_mode);
    check(size > 0, op, ": the output is empty for input ", to_string(input.sizes()), " and kernel ",
          to_string(kernel));
    pool.shape.output[at] = size;
    pool.shape.windows[at] = kernels::sliding_windows(pool.shape.input[at], size, k[i], s[i], p[i], d[i]);
  }
  finish(pool, n, keep_channels_last);
  return pool;
}

Pool adaptive(const char* op, const Tensor& input, std::int64_t n, DimSpan output, bool keep_channels_last) {
  Pool pool = start(op, input, n);
  check(static_cast<std::int64_t>(output.size()) == n, op, ": argument 'output_size' must have ", n, " values, got ",
        to_string(output));
  pool.shape.windows.fill(kernels::adaptive_windows(1, 1));
  pool.shape.output = {1, 1, 1};
  for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
    const std::size_t at = 3 - static_cast<std::size_t>(n) + i;
    check(output[i] >= 0, op, ": argument 'output_size' must not be negative, got ", to_string(output));
    pool.shape.output[at] = output[i];
    pool.shape.windows[at] = kernels::adaptive_windows(pool.shape.input[at], output[i]);
  }
  finish(pool, n, keep_channels_last);
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
    const Pool pool = sliding(op, input, n, kernel, stride, padding, DimSpan{kOne}, ceil_mode, n == 2);
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
    give(ret0, average(op, input, adaptive(op, input, n, output, n == 2), Divisor::kWindow, 0), op);
  });
}

AOTITorchError adaptive_max_shim(const char* op, std::int64_t n, AtenTensorHandle self, DimSpan output,
                                 AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  return guarded(op, [&] {
    const Tensor& input = cpu_input(self, op, "self");
    maximum(op, input, adaptive(op, input, n, output, n == 2), ret0, ret1);
  });
}

AOTITorchError max_pool_shim(const char* op, std::int64_t n, AtenTensorHandle self, DimSpan kernel, DimSpan stride,
                             DimSpan padding, DimSpan dilation, bool ceil_mode, AtenTensorHandle* ret0,
                             AtenTensorHandle* ret1) {
  return guarded(op, [&] {
    const Tensor& input = cpu_input(self, op, "self");
    maximum(op, input, sliding(op, input, n, kernel, stride, padding, dilation, ceil_mode, true), ret0, ret1);
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
