// Max unpooling and fractional max pooling.
#include <limits>

#include "kernels/cpu/items.h"
#include "shims/nn.h"

using namespace untorch;
using namespace untorch::shims;
using kernels::for_each_item;
using kernels::kParallelWork;

namespace {

void unpool(const char* op, std::int64_t n, AtenTensorHandle self, AtenTensorHandle index, DimSpan output_size,
            AtenTensorHandle* ret0) {
  const Tensor &input = cpu_input(self, op, "self"), &indices = cpu_input(index, op, "indices");
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
  const TensorPtr x = contiguous(input), at = contiguous(indices);
  TensorPtr out = Tensor::zeros(sizes, input.dtype());
  std::int64_t pixels = 1;
  for (std::int64_t d = -n; d < 0; ++d) pixels *= input.size(d);
  const std::int64_t planes = pixels == 0 ? 0 : input.numel() / pixels;
  dispatch_floating(op, input.dtype(), [&]<class T>() {
    for_each_item(planes, static_cast<double>(input.numel()) > kParallelWork, [&](std::int64_t p) {
      const T* from = x->data<T>() + p * pixels;
      const std::int64_t* index_row = at->data<std::int64_t>() + p * pixels;
      T* to = out->data<T>() + p * image;
      for (std::int64_t i = 0; i < pixels; ++i) {
        check(index_row[i] >= 0 && index_row[i] < image, op, ": index ", index_row[i], " is outside of output_size ",
              to_string(output_size));
        to[index_row[i]] = from[i];
      }
    });
  });
  // Two-dimensional unpooling keeps the channels-last format, three-dimensional does not.
  if (n == 2 && suggests_channels_last(input)) out = channels_last_contiguous(*out);
  give(ret0, std::move(out), op);
}

// Where the windows of one dimension start: pseudo-random steps from one sample in [0, 1). Every step of the arithmetic
// rounds to T, also for the half types: a start one off would be another window.
template <class T>
std::vector<std::int64_t> fractional_starts(T sample, std::int64_t input, std::int64_t output, std::int64_t kernel) {
  std::vector<std::int64_t> starts(static_cast<std::size_t>(output));
  if (output > 1) {
    using C = compute_t<T>;
    const auto rounded = [](C value) { return static_cast<C>(T(value)); };
    const C seed = static_cast<C>(sample);
    const C alpha = rounded(rounded(static_cast<C>(input - kernel)) / rounded(static_cast<C>(output - 1)));
    const auto origin = static_cast<std::int64_t>(rounded(seed * alpha));
    for (std::int64_t i = 0; i < output - 1; ++i) {
      const C at = rounded(rounded(rounded(static_cast<C>(i)) + seed) * alpha);
      starts[static_cast<std::size_t>(i)] = static_cast<std::int64_t>(at) - origin;
    }
  }
  if (output > 0) starts.back() = input - kernel;
  return starts;
}

void fractional(const char* op, std::int64_t n, AtenTensorHandle self, DimSpan kernel_size, DimSpan output_size,
                AtenTensorHandle samples_handle, AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  const Tensor &input = cpu_input(self, op, "self"), &random = cpu_input(samples_handle, op, "random_samples");
  check(input.dim() == n + 1 || input.dim() == n + 2, op, ": argument 'self' must be ", n + 1, "-D or ", n + 2,
        "-D, got shape ", to_string(input.sizes()));
  check(static_cast<std::int64_t>(kernel_size.size()) == n && static_cast<std::int64_t>(output_size.size()) == n, op,
        ": arguments 'kernel_size' and 'output_size' must have ", n, " values, got ", to_string(kernel_size), " and ",
        to_string(output_size));
  check(random.dtype() == input.dtype(), op, ": argument 'random_samples' must be ", dtype_name(input.dtype()),
        " like self, got ", dtype_name(random.dtype()));
  const std::int64_t channels = input.size(-n - 1), batch = input.dim() == n + 2 ? input.size(0) : 1;
  check(random.dim() == 3 && random.size(0) >= batch && random.size(1) >= channels && random.size(2) == n, op,
        ": argument 'random_samples' must have shape ", to_string(Dims{batch, channels, n}), ", got ",
        to_string(random.sizes()));
  std::array<std::int64_t, 3> in{1, 1, 1}, out_size{1, 1, 1}, kernel{1, 1, 1};
  Dims sizes(input.sizes());
  for (std::int64_t d = 0; d < n; ++d) {
    const auto from = static_cast<std::size_t>(d), to = static_cast<std::size_t>(3 - n + d);
    in[to] = input.size(d - n);
    kernel[to] = kernel_size[from];
    out_size[to] = output_size[from];
    check(kernel[to] > 0 && out_size[to] >= 0 && out_size[to] + kernel[to] - 1 <= in[to], op, ": kernel ",
          to_string(kernel_size), " with output ", to_string(output_size), " does not fit into input ",
          to_string(input.sizes()));
    sizes[sizes.size() - static_cast<std::size_t>(n - d)] = out_size[to];
  }
  const TensorPtr x = contiguous(input);
  TensorPtr out = Tensor::empty(sizes, input.dtype()), indices = Tensor::empty(sizes, DType::kInt64);
  const std::int64_t pixels = in[0] * in[1] * in[2], out_pixels = out_size[0] * out_size[1] * out_size[2];
  dispatch_floating(op, input.dtype(), [&]<class T>() {
    using C = compute_t<T>;
    for_each_item(batch * channels, static_cast<double>(input.numel()) > kParallelWork, [&](std::int64_t plane) {
      const T* sample = random.data<T>() + plane / channels * random.stride(0) + plane % channels * random.stride(1);
      std::array<std::vector<std::int64_t>, 3> starts;
      for (std::int64_t d = 0; d < 3; ++d) {
        const auto i = static_cast<std::size_t>(d);
        if (d < 3 - n) {
          starts[i] = {0};
          continue;
        }
        // Two-dimensional samples come as (width, height), three-dimensional ones as (time, height, width).
        const std::int64_t slot = n == 2 ? 2 - d : d;
        starts[i] = fractional_starts<T>(sample[slot * random.stride(2)], in[i], out_size[i], kernel[i]);
      }
      const T* from = x->data<T>() + plane * pixels;
      std::int64_t to = plane * out_pixels;
      for (const std::int64_t d0 : starts[0]) {
        for (const std::int64_t h0 : starts[1]) {
          for (const std::int64_t w0 : starts[2]) {
            C best = -std::numeric_limits<C>::infinity();
            std::int64_t at = (d0 * in[1] + h0) * in[2] + w0;
            for (std::int64_t d = d0; d < d0 + kernel[0]; ++d) {
              for (std::int64_t h = h0; h < h0 + kernel[1]; ++h) {
                for (std::int64_t w = w0; w < w0 + kernel[2]; ++w) {
                  const std::int64_t here = (d * in[1] + h) * in[2] + w;
                  const C value = static_cast<C>(from[here]);
                  if (value > best || value != value) {
                    best = value;
                    at = here;
                  }
                }
              }
            }
            out->data<T>()[to] = T(best);
            indices->data<std::int64_t>()[to++] = at;
          }
        }
      }
    });
  });
  check(ret1 != nullptr, op, ": output pointer is null");
  give(ret0, std::move(out), op);
  give(ret1, std::move(indices), op);
}

}  // namespace

UNTORCH_SHIM aoti_torch_cpu_max_unpool2d(AtenTensorHandle self, AtenTensorHandle indices,
                                         const std::int64_t* output_size, std::int64_t output_size_len,
                                         AtenTensorHandle* ret0) {
  return guarded("max_unpool2d",
                 [&] { unpool("max_unpool2d", 2, self, indices, ints(output_size, output_size_len), ret0); });
}

// Stride and padding are in the signature only: the indices say everything.
UNTORCH_SHIM aoti_torch_cpu_max_unpool3d(AtenTensorHandle self, AtenTensorHandle indices,
                                         const std::int64_t* output_size, std::int64_t output_size_len,
                                         const std::int64_t* /*stride*/, std::int64_t /*stride_len*/,
                                         const std::int64_t* /*padding*/, std::int64_t /*padding_len*/,
                                         AtenTensorHandle* ret0) {
  return guarded("max_unpool3d",
                 [&] { unpool("max_unpool3d", 3, self, indices, ints(output_size, output_size_len), ret0); });
}

UNTORCH_SHIM aoti_torch_cpu_fractional_max_pool2d(AtenTensorHandle self, const std::int64_t* kernel_size,
                                                  std::int64_t kernel_size_len, const std::int64_t* output_size,
                                                  std::int64_t output_size_len, AtenTensorHandle random_samples,
                                                  AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  return guarded("fractional_max_pool2d", [&] {
    fractional("fractional_max_pool2d", 2, self, ints(kernel_size, kernel_size_len), ints(output_size, output_size_len),
               random_samples, ret0, ret1);
  });
}

UNTORCH_SHIM aoti_torch_cpu_fractional_max_pool3d(AtenTensorHandle self, const std::int64_t* kernel_size,
                                                  std::int64_t kernel_size_len, const std::int64_t* output_size,
                                                  std::int64_t output_size_len, AtenTensorHandle random_samples,
                                                  AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  return guarded("fractional_max_pool3d", [&] {
    fractional("fractional_max_pool3d", 3, self, ints(kernel_size, kernel_size_len), ints(output_size, output_size_len),
               random_samples, ret0, ret1);
  });
}
