// Max unpooling and fractional max pooling.
#include "kernels/unpooling.h"

#include "shims/nn.h"
#include "shims/op.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

void check_unpool_dtype(const Op& op, const Tensor& input) {
  if (is_floating(input.dtype())) return;
  throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(input.dtype()),
              " is not supported, expected a floating type");
}

void check_spatial(const Op& op, const Tensor& input, std::int64_t n) {
  check(input.dim() == n + 1 || input.dim() == n + 2, op, ": argument 'self' must be ", n + 1, "-D or ", n + 2,
        "-D, got shape ", to_string(input.sizes()));
}

void unpool(const Op& op, std::int64_t n, AtenTensorHandle self, AtenTensorHandle index, DimSpan output_size,
            AtenTensorHandle* ret0) {
  const Tensor &input = op.input(self, "self"), &indices = op.input(index, "indices");
  check_unpool_dtype(op, input);
  check_spatial(op, input, n);
  check(indices.sizes() == input.sizes(), op, ": argument 'indices' must have shape ", to_string(input.sizes()),
        ", got ", to_string(indices.sizes()));
  check(indices.dtype() == DType::kInt64, op, ": argument 'indices' must be int64, got ", dtype_name(indices.dtype()));
  check(static_cast<std::int64_t>(output_size.size()) == n, op, ": argument 'output_size' must have ", n,
        " values, got ", to_string(output_size));
  Dims sizes(input.sizes());
  for (std::size_t d = 0; d < output_size.size(); ++d) {
    sizes[sizes.size() - output_size.size() + d] = output_size[d];
  }
  op.check_same_device({&input, &indices});
  kernels::Unpool p;
  p.image = checked_numel(output_size);
  p.planes = p.pixels = 1;
  for (std::int64_t d = 0; d < input.dim(); ++d) (d < input.dim() - n ? p.planes : p.pixels) *= input.size(d);
  p.element_bytes = static_cast<int>(element_size(input.dtype()));
  const TensorPtr x = contiguous(input), at = contiguous(indices);
  p.input = x->raw(), p.indices = at->data<std::int64_t>();
  TensorPtr out;
  run(
      op, {&input, &indices},
      [&] {
        out = Tensor::zeros(sizes, input.dtype());
        p.out = out->raw();
        const std::optional<std::int64_t> outside = kernels::cpu::max_unpool(p);
        check(!outside, op, ": index ", outside.value_or(0), " is outside of output_size ", to_string(output_size));
        // Two-dimensional unpooling keeps the channels-last format, three-dimensional and CUDA's do not.
        if (n == 2 && suggests_channels_last(input)) out = channels_last_contiguous(*out);
      },
      [&](const auto& on) {
        out = Tensor::empty(sizes, input.dtype(), input.device());
        p.out = out->raw();
        const TensorPtr winners = Tensor::zeros(Dims{out->numel()}, DType::kUInt64, input.device());
        return kernels::cuda::max_unpool(p, winners->data<unsigned long long>(), on.faults(), on.stream());
      });
  give(ret0, std::move(out), op);
}

void fractional(const Op& op, std::int64_t n, AtenTensorHandle self, DimSpan kernel_size, DimSpan output_size,
                AtenTensorHandle samples, AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  const Tensor &input = op.input(self, "self"), &random = op.input(samples, "random_samples");
  check(ret0 != nullptr && ret1 != nullptr, op, ": output pointer is null");
  check_unpool_dtype(op, input);
  check_spatial(op, input, n);
  check(static_cast<std::int64_t>(kernel_size.size()) == n && static_cast<std::int64_t>(output_size.size()) == n, op,
        ": arguments 'kernel_size' and 'output_size' must have ", n, " values, got ", to_string(kernel_size), " and ",
        to_string(output_size));
  check(random.dtype() == input.dtype(), op, ": argument 'random_samples' must be ", dtype_name(input.dtype()),
        " like self, got ", dtype_name(random.dtype()));
  kernels::FractionalPool pool;
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
  for (std::int64_t d = 3 - n; d < 3; ++d) {
    const std::int64_t from = d - (3 - n);
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
  op.check_same_device({&input, &random});
  TensorPtr out = Tensor::empty(sizes, input.dtype(), input.device());
  TensorPtr indices = Tensor::empty(sizes, DType::kInt64, input.device());
  auto* const at = indices->data<std::int64_t>();
  run(
      op, {&input, &random},
      [&] { kernels::cpu::fractional_max_pool(pool, input.dtype(), input.raw(), random.raw(), out->raw(), at); },
      [&](const auto& on) {
        return kernels::cuda::fractional_max_pool(pool, input.dtype(), input.raw(), random.raw(), out->raw(), at,
                                                  on.stream());
      });
  give(ret0, std::move(out), op);
  give(ret1, std::move(indices), op);
}

}  // namespace

UNTORCH_OP(max_unpool2d,
           (AtenTensorHandle self, AtenTensorHandle indices, const std::int64_t* output_size,
            std::int64_t output_size_len, AtenTensorHandle* ret0),
           self, indices, output_size, output_size_len, ret0) {
  unpool(op, 2, self, indices, ints(output_size, output_size_len), ret0);
}

// Stride and padding are in the signature only: the indices say everything.
UNTORCH_OP(max_unpool3d,
           (AtenTensorHandle self, AtenTensorHandle indices, const std::int64_t* output_size,
            std::int64_t output_size_len, const std::int64_t* stride, std::int64_t stride_len,
            const std::int64_t* padding, std::int64_t padding_len, AtenTensorHandle* ret0),
           self, indices, output_size, output_size_len, stride, stride_len, padding, padding_len, ret0) {
  static_cast<void>(stride), static_cast<void>(stride_len);
  static_cast<void>(padding), static_cast<void>(padding_len);
  unpool(op, 3, self, indices, ints(output_size, output_size_len), ret0);
}

#define UNTORCH_FRACTIONAL(N)                                                                                       \
  UNTORCH_OP(fractional_max_pool##N##d,                                                                             \
             (AtenTensorHandle self, const std::int64_t* kernel_size, std::int64_t kernel_size_len,                 \
              const std::int64_t* output_size, std::int64_t output_size_len, AtenTensorHandle random_samples,       \
              AtenTensorHandle* ret0, AtenTensorHandle* ret1),                                                      \
             self, kernel_size, kernel_size_len, output_size, output_size_len, random_samples, ret0, ret1) {        \
    fractional(op, N, self, ints(kernel_size, kernel_size_len), ints(output_size, output_size_len), random_samples, \
               ret0, ret1);                                                                                         \
  }
UNTORCH_FRACTIONAL(2)
UNTORCH_FRACTIONAL(3)
#undef UNTORCH_FRACTIONAL
