// untorch::byte_max_pool on the CPU: maximum pooling of uint8 images, channels last.
#include "kernels/cpu/w8a8/max_pool.h"

#include <utility>

#include "shims/convolution_operands.h"

namespace untorch::shims {
namespace {

constexpr const char* kOp = "byte_max_pool";

}  // namespace

// x uint8 [n, c, h, w]; output: the result's height and width.
UNTORCH_SHIM aoti_torch_cpu_untorch_byte_max_pool(AtenTensorHandle x, const std::int64_t* output,
                                                  std::int64_t output_len, const std::int64_t* kernel,
                                                  std::int64_t kernel_len, const std::int64_t* stride,
                                                  std::int64_t stride_len, const std::int64_t* padding,
                                                  std::int64_t padding_len, const std::int64_t* dilation,
                                                  std::int64_t dilation_len, std::int32_t channels_last,
                                                  AtenTensorHandle* ret0) {
  return guarded(kOp, [&] {
    const Tensor& input = cpu_input(x, kOp, "x");
    check(input.dtype() == DType::kUInt8 && input.dim() == 4, kOp, ": argument 'x' must be uint8 and 4-D, got ",
          dtype_name(input.dtype()), " of shape ", to_string(input.sizes()));
    kernels::ByteMaxPool p{};
    p.batch = input.size(0), p.channels = input.size(1), p.input = {input.size(2), input.size(3)};
    p.output = pair_of(kOp, output, output_len, 0, "output");
    p.kernel = pair_of(kOp, kernel, kernel_len, 1, "kernel");
    p.stride = pair_of(kOp, stride, stride_len, 1, "stride");
    p.padding = pair_of(kOp, padding, padding_len, 0, "padding");
    p.dilation = pair_of(kOp, dilation, dilation_len, 1, "dilation");
    const TensorPtr copied = is_nhwc(input) ? nullptr : nhwc_copy(input);
    const Dims sizes{input.size(0), input.size(1), p.output[0], p.output[1]};
    TensorPtr out = empty_nhwc(sizes, DType::kUInt8);
    if (out->numel() != 0) {
      p.x = (copied ? *copied : input).data<std::uint8_t>(), p.out = out->data<std::uint8_t>();
      kernels::byte_max_pool(p);
    }
    give(ret0, channels_last != 0 ? std::move(out) : contiguous(*out), kOp);
  });
}

}  // namespace untorch::shims
