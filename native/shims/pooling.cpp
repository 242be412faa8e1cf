// The arguments of pooling operators, as PyTorch checks them.
#include "shims/pooling.h"

#include "shims/nn.h"

namespace untorch::shims {
namespace {

// Output size of a sliding window; with ceil_mode the last window may start inside the input only.
std::int64_t pooled_size(std::int64_t input, std::int64_t kernel, std::int64_t stride, std::int64_t padding,
                         std::int64_t dilation, bool ceil_mode) {
  const std::int64_t room = input + 2 * padding - dilation * (kernel - 1) - 1 + (ceil_mode ? stride - 1 : 0);
  std::int64_t size = (room >= 0 ? room / stride : -((-room + stride - 1) / stride)) + 1;
  if (ceil_mode && (size - 1) * stride >= input + padding) --size;
  return size;
}

// The input's part of a pooling problem over `n` spatial dimensions; [c, …] and [n, c, …] are taken.
PoolProblem start(const char* op, const Tensor& input, std::int64_t n) {
  const std::int64_t ndim = input.dim();
  check(ndim == n + 1 || ndim == n + 2, op, ": argument 'self' must be ", n + 1, "-D or ", n + 2, "-D, got shape ",
        to_string(input.sizes()));
  for (std::int64_t d = ndim - n - 1; d < ndim; ++d) {
    check(input.size(d) > 0, op, ": argument 'self' must not be empty but for the batch, got shape ",
          to_string(input.sizes()));
  }
  PoolProblem pool;
  const bool batched = ndim == n + 2;
  pool.spatial = static_cast<std::size_t>(n);
  pool.batch = batched ? input.size(0) : 1;
  pool.channels = input.size(-n - 1);
  pool.batch_stride = batched ? input.stride(0) : 0;
  pool.channel_stride = input.stride(-n - 1);
  for (std::int64_t d = 3 - n; d < 3; ++d) {
    pool.input[static_cast<std::size_t>(d)] = input.size(d - 3);
    pool.input_stride[static_cast<std::size_t>(d)] = input.stride(d - 3);
  }
  pool.sizes = input.sizes();
  pool.channels_last = batched && suggests_channels_last(input);
  return pool;
}

void finish(PoolProblem& pool, bool keep_channels_last) {
  pool.channels_last = pool.channels_last && keep_channels_last;
  const std::size_t lead = pool.sizes.size() - pool.spatial;
  for (std::size_t d = 0; d < pool.spatial; ++d) pool.sizes[lead + d] = pool.output[3 - pool.spatial + d];
}

}  // namespace

PoolProblem sliding_pool(const char* op, const Tensor& input, std::int64_t n, DimSpan kernel, DimSpan stride,
                         DimSpan padding, DimSpan dilation, bool ceil_mode, bool keep_channels_last) {
  PoolProblem pool = start(op, input, n);
  const auto k = expand_list(kernel, n, op, "kernel_size");
  const auto s = stride.empty() ? k : expand_list(stride, n, op, "stride");
  const auto p = expand_list(padding, n, op, "padding");
  const auto d = expand_list(dilation, n, op, "dilation");
  for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
    const std::size_t at = 3 - static_cast<std::size_t>(n) + i;
    check(k[i] > 0, op, ": argument 'kernel_size' must be positive, got ", to_string(kernel));
    check(s[i] > 0, op, ": argument 'stride' must be positive, got ", to_string(stride));
    check(d[i] > 0, op, ": argument 'dilation' must be positive, got ", to_string(dilation));
    check(p[i] >= 0 && p[i] <= ((k[i] - 1) * d[i] + 1) / 2, op,
          ": argument 'padding' must be between 0 and half the kernel, got ", to_string(padding), " with kernel ",
          to_string(kernel));
    const std::int64_t size = pooled_size(pool.input[at], k[i], s[i], p[i], d[i], ceil_mode);
    check(size > 0, op, ": the output is empty for input ", to_string(input.sizes()), " and kernel ",
          to_string(kernel));
    pool.output[at] = size;
    pool.kernel[at] = k[i];
    pool.stride[at] = s[i];
    pool.padding[at] = p[i];
    pool.dilation[at] = d[i];
  }
  finish(pool, keep_channels_last);
  return pool;
}

PoolProblem adaptive_pool(const char* op, const Tensor& input, std::int64_t n, DimSpan output,
                          bool keep_channels_last) {
  PoolProblem pool = start(op, input, n);
  check(static_cast<std::int64_t>(output.size()) == n, op, ": argument 'output_size' must have ", n, " values, got ",
        to_string(output));
  pool.adaptive = true;
  for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
    check(output[i] >= 0, op, ": argument 'output_size' must not be negative, got ", to_string(output));
    pool.output[3 - static_cast<std::size_t>(n) + i] = output[i];
  }
  finish(pool, keep_channels_last);
  return pool;
}

}  // namespace untorch::shims
