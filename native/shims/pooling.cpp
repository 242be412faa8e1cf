// Average and maximum pooling, sliding and adaptive, in two and three dimensions.
#include "kernels/pooling.h"

#include "shims/nn.h"
#include "shims/op.h"

using namespace untorch;
using namespace untorch::shims;
using kernels::PoolDivisor;

namespace {

// A pooling operator's problem, and its output.
struct Pooling {
  kernels::Pool pool;
  Dims sizes;
};

// Output size of a sliding window; with ceil_mode the last window may start inside the input only.
std::int64_t pooled_size(std::int64_t input, std::int64_t kernel, std::int64_t stride, std::int64_t padding,
                         std::int64_t dilation, bool ceil_mode) {
  const std::int64_t room = input + 2 * padding - dilation * (kernel - 1) - 1 + (ceil_mode ? stride - 1 : 0);
  std::int64_t size = (room >= 0 ? room / stride : -((-room + stride - 1) / stride)) + 1;
  if (ceil_mode && (size - 1) * stride >= input + padding) --size;
  return size;
}

// The GPU's kernels have floating dtypes alone; the CPU's also uint8 to int64.
void check_pool_dtype(const Op& op, DType dtype) {
  const bool narrow = dtype == DType::kUInt8 || dtype == DType::kInt8 || dtype == DType::kInt16 ||
                      dtype == DType::kInt32 || dtype == DType::kInt64;
  if (is_floating(dtype) || (narrow && !op.on_cuda())) return;
  throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(dtype), " is not supported",
              op.on_cuda() ? " on CUDA, expected float16, bfloat16, float32 or float64" : ", expected a floating type");
}

// The input's part of a problem over `n` spatial dimensions; [c, …] and [n, c, …] are taken.
Pooling problem_of(const Op& op, const Tensor& input, std::int64_t n, bool keep_channels_last) {
  check_pool_dtype(op, input.dtype());
  const std::int64_t ndim = input.dim();
  check(ndim == n + 1 || ndim == n + 2, op, ": argument 'self' must be ", n + 1, "-D or ", n + 2, "-D, got shape ",
        to_string(input.sizes()));
  for (std::int64_t d = ndim - n - 1; d < ndim; ++d) {
    check(input.size(d) > 0, op, ": argument 'self' must not be empty but for the batch, got shape ",
          to_string(input.sizes()));
  }
  Pooling out{{}, input.sizes()};
  kernels::Pool& pool = out.pool;
  const bool batched = ndim == n + 2;
  pool.batch = batched ? input.size(0) : 1;
  pool.channels = input.size(-n - 1);
  pool.in_batch = batched ? input.stride(0) : 0;
  pool.in_channel = input.stride(-n - 1);
  for (std::int64_t d = 3 - n; d < 3; ++d) {
    pool.input[d] = input.size(d - 3);
    pool.in_at[d] = input.stride(d - 3);
  }
  pool.channels_last = keep_channels_last && batched && suggests_channels_last(input);
  return out;
}

void set_output(Pooling& p, std::int64_t d, std::int64_t size) {
  p.pool.output[d] = size;
  p.sizes[p.sizes.size() - 3 + static_cast<std::size_t>(d)] = size;
}

// An empty stride is the kernel's.
Pooling sliding_pool(const Op& op, const Tensor& input, std::int64_t n, DimSpan kernel, DimSpan stride, DimSpan padding,
                     DimSpan dilation, bool ceil_mode, bool keep_channels_last) {
  Pooling out = problem_of(op, input, n, keep_channels_last);
  kernels::Pool& pool = out.pool;
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
    pool.kernel[at] = k[i];
    pool.stride[at] = s[i];
    pool.padding[at] = p[i];
    pool.dilation[at] = d[i];
    set_output(out, static_cast<std::int64_t>(at), size);
  }
  return out;
}

Pooling adaptive_pool(const Op& op, const Tensor& input, std::int64_t n, DimSpan output) {
  Pooling out = problem_of(op, input, n, n == 2);
  check(static_cast<std::int64_t>(output.size()) == n, op, ": argument 'output_size' must have ", n, " values, got ",
        to_string(output));
  out.pool.adaptive = true;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t size = output[static_cast<std::size_t>(i)];
    check(size >= 0, op, ": argument 'output_size' must not be negative, got ", to_string(output));
    set_output(out, 3 - n + i, size);
  }
  return out;
}

void average(const Op& op, const Tensor& input, const Pooling& p, PoolDivisor divisor, std::int64_t fixed,
             AtenTensorHandle* ret0) {
  TensorPtr out = empty_format(p.sizes, input.dtype(), p.pool.channels_last, input.device());
  if (out->numel() != 0) {
    run(
        op, {&input}, [&] { kernels::cpu::avg_pool(p.pool, divisor, fixed, input.dtype(), input.raw(), out->raw()); },
        [&](const auto& on) {
          return kernels::cuda::avg_pool(p.pool, divisor, fixed, input.dtype(), input.raw(), out->raw(), on.stream());
        });
  }
  give(ret0, std::move(out), op);
}

void maximum(const Op& op, const Tensor& input, const Pooling& p, AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  check(ret0 != nullptr && ret1 != nullptr, op, ": output pointer is null");
  TensorPtr out = empty_format(p.sizes, input.dtype(), p.pool.channels_last, input.device());
  TensorPtr indices = empty_format(p.sizes, DType::kInt64, p.pool.channels_last, input.device());
  auto* const at = indices->data<std::int64_t>();
  if (out->numel() != 0) {
    run(
        op, {&input}, [&] { kernels::cpu::max_pool(p.pool, input.dtype(), input.raw(), out->raw(), at); },
        [&](const auto& on) {
          return kernels::cuda::max_pool(p.pool, input.dtype(), input.raw(), out->raw(), at, on.stream());
        });
  }
  give(ret0, std::move(out), op);
  give(ret1, std::move(indices), op);
}

constexpr std::int64_t kOne[] = {1};

}  // namespace

// Three-dimensional averages are row-major whatever comes in, as in PyTorch.
#define UNTORCH_POOLING(N)                                                                                            \
  UNTORCH_OP(avg_pool##N##d,                                                                                          \
             (AtenTensorHandle self, const std::int64_t* kernel_size, std::int64_t kernel_size_len,                   \
              const std::int64_t* stride, std::int64_t stride_len, const std::int64_t* padding,                       \
              std::int64_t padding_len, std::int32_t ceil_mode, std::int32_t count_include_pad,                       \
              std::int64_t* divisor_override, AtenTensorHandle* ret0),                                                \
             self, kernel_size, kernel_size_len, stride, stride_len, padding, padding_len, ceil_mode,                 \
             count_include_pad, divisor_override, ret0) {                                                             \
    const Tensor& input = op.input(self, "self");                                                                     \
    check(divisor_override == nullptr || *divisor_override != 0, op, ": argument 'divisor_override' must not be 0");  \
    const PoolDivisor divisor = divisor_override != nullptr ? PoolDivisor::kFixed                                     \
                                : count_include_pad != 0    ? PoolDivisor::kCovered                                   \
                                                            : PoolDivisor::kWindow;                                      \
    average(op, input,                                                                                                \
            sliding_pool(op, input, N, ints(kernel_size, kernel_size_len), ints(stride, stride_len),                  \
                         ints(padding, padding_len), kOne, ceil_mode != 0, N == 2),                                   \
            divisor, divisor_override == nullptr ? 0 : *divisor_override, ret0);                                      \
  }                                                                                                                   \
  UNTORCH_OP(                                                                                                         \
      _adaptive_avg_pool##N##d,                                                                                       \
      (AtenTensorHandle self, const std::int64_t* output_size, std::int64_t output_size_len, AtenTensorHandle* ret0), \
      self, output_size, output_size_len, ret0) {                                                                     \
    const Tensor& input = op.input(self, "self");                                                                     \
    average(op, input, adaptive_pool(op, input, N, ints(output_size, output_size_len)), PoolDivisor::kWindow, 0,      \
            ret0);                                                                                                    \
  }                                                                                                                   \
  UNTORCH_OP(adaptive_max_pool##N##d,                                                                                 \
             (AtenTensorHandle self, const std::int64_t* output_size, std::int64_t output_size_len,                   \
              AtenTensorHandle* ret0, AtenTensorHandle* ret1),                                                        \
             self, output_size, output_size_len, ret0, ret1) {                                                        \
    const Tensor& input = op.input(self, "self");                                                                     \
    maximum(op, input, adaptive_pool(op, input, N, ints(output_size, output_size_len)), ret0, ret1);                  \
  }                                                                                                                   \
  UNTORCH_OP(max_pool##N##d_with_indices,                                                                             \
             (AtenTensorHandle self, const std::int64_t* kernel_size, std::int64_t kernel_size_len,                   \
              const std::int64_t* stride, std::int64_t stride_len, const std::int64_t* padding,                       \
              std::int64_t padding_len, const std::int64_t* dilation, std::int64_t dilation_len,                      \
              std::int32_t ceil_mode, AtenTensorHandle* ret0, AtenTensorHandle* ret1),                                \
             self, kernel_size, kernel_size_len, stride, stride_len, padding, padding_len, dilation, dilation_len,    \
             ceil_mode, ret0, ret1) {                                                                                 \
    const Tensor& input = op.input(self, "self");                                                                     \
    maximum(op, input,                                                                                                \
            sliding_pool(op, input, N, ints(kernel_size, kernel_size_len), ints(stride, stride_len),                  \
                         ints(padding, padding_len), ints(dilation, dilation_len), ceil_mode != 0, true),             \
            ret0, ret1);                                                                                              \
  }
UNTORCH_POOLING(2)
UNTORCH_POOLING(3)
#undef UNTORCH_POOLING
