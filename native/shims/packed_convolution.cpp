// untorch::packed_convolution on the CPU: checks the arguments, brings operands into NHWC, calls the packed kernels.
#include <utility>

#include "kernels/cpu/convolution/packed.h"
#include "shims/activation.h"
#include "shims/convolution_operands.h"
#include "shims/shim.h"

namespace untorch::shims {
namespace {

using kernels::PackedConvolution;

constexpr const char* kOp = "packed_convolution";

void check_float(const Tensor& tensor, const char* name) {
  check(tensor.dtype() == DType::kFloat32, kOp, ": argument '", name, "' must be float32, got ",
        dtype_name(tensor.dtype()));
}

}  // namespace

// x [n, c, h, w]; weight packed [groups, ceil(o/16), kernel·c, 16] with o outputs and c channels of a group, or, of a
// depthwise convolution, [ceil(c/16), kernel, 16], or, winograd, [16, o/16, c, 16], or, of small groups, [1,
// out_channels/16, kernel·c, 16]; bfloat16 [groups, ceil(o/16), kernel·c/2, 16, 2]; bias [out_channels]; residual [n,
// out_channels, h', w'].
UNTORCH_SHIM aoti_torch_cpu_untorch_packed_convolution(
    AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* bias, AtenTensorHandle* residual,
    std::int64_t out_channels, const std::int64_t* kernel, std::int64_t kernel_len, const std::int64_t* stride,
    std::int64_t stride_len, const std::int64_t* padding, std::int64_t padding_len, const std::int64_t* dilation,
    std::int64_t dilation_len, std::int64_t groups, const char* activation, std::int32_t residual_first,
    std::int32_t channels_last, std::int32_t winograd, AtenTensorHandle* ret0) {
  return guarded(kOp, [&] {
    const Tensor& input = cpu_input(x, kOp, "x");
    const Tensor& packed = cpu_input(weight, kOp, "weight");
    const Tensor* const added = optional_cpu_input(bias, kOp, "bias");
    const Tensor* rest = optional_cpu_input(residual, kOp, "residual");
    check_float(input, "x");
    const bool bf16 = packed.dtype() == DType::kBFloat16;
    check(bf16 || packed.dtype() == DType::kFloat32, kOp, ": argument 'weight' must be float32 or bfloat16, got ",
          dtype_name(packed.dtype()));
    check(input.dim() == 4, kOp, ": argument 'x' must be 4-D, got shape ", to_string(input.sizes()));
    check(groups > 0 && input.size(1) % groups == 0 && out_channels >= 0 && out_channels % groups == 0, kOp, ": ",
          input.size(1), " → ", out_channels, " channels do not divide into ", groups, " groups");
    PackedConvolution p{};
    p.batch = input.size(0), p.groups = groups;
    p.in_channels = input.size(1) / groups, p.out_channels = out_channels / groups;
    p.input = {input.size(2), input.size(3)};
    p.kernel = pair_of(kOp, kernel, kernel_len, 1, "kernel");
    p.stride = pair_of(kOp, stride, stride_len, 1, "stride");
    p.padding = pair_of(kOp, padding, padding_len, 0, "padding");
    p.dilation = pair_of(kOp, dilation, dilation_len, 1, "dilation");
    p.epilogue = {activation_of(kOp, activation), residual_first != 0};
    for (std::size_t d = 0; d < 2; ++d) {
      const std::int64_t room = p.input[d] + 2 * p.padding[d] - p.dilation[d] * (p.kernel[d] - 1) - 1;
      check(room >= 0, kOp, ": the kernel is larger than the padded input ", to_string(input.sizes()));
      p.output[d] = room / p.stride[d] + 1;
    }
    p.winograd = winograd != 0;
    check(!p.winograd || kernels::serves_winograd(p), kOp,
          ": argument 'winograd' needs a 3×3 kernel, stride and dilation 1, no groups and multiples of 16 channels");
    p.bf16 = bf16;
    p.small_groups = !bf16 && packed.dim() == 4 && packed.size(0) == 1 && groups > 1 && kernels::serves_small_groups(p);
    check(!bf16 || kernels::serves_bf16(p), kOp,
          ": argument 'weight' of bfloat16 needs an even number of channels, more than 8 unless the kernel is 1 wide, "
          "no Winograd, and not one channel a group");
    check(packed.numel() == kernels::packed_convolution_size(p), kOp, ": argument 'weight' must have ",
          kernels::packed_convolution_size(p), " elements for ", input.size(1), " → ", out_channels, " channels, got ",
          to_string(packed.sizes()));
    const Dims sizes{input.size(0), out_channels, p.output[0], p.output[1]};
    const TensorPtr dense_weight = contiguous(packed);
    TensorPtr dense_bias, dense_residual, dense_input;
    if (added != nullptr) {
      check_float(*added, "bias");
      check(added->dim() == 1 && added->size(0) == out_channels, kOp, ": argument 'bias' must have shape [",
            out_channels, "], got ", to_string(added->sizes()));
      dense_bias = contiguous(*added);
    }
    if (rest != nullptr) {
      check_float(*rest, "residual");
      check(rest->sizes() == sizes, kOp, ": argument 'residual' must have shape ", to_string(sizes), ", got ",
            to_string(rest->sizes()));
      if (!is_nhwc(*rest)) dense_residual = nhwc_copy(*rest), rest = dense_residual.get();
    }
    const Tensor* from = &input;
    if (!has_dense_pixels(input) && !kernels::pads_beforehand(p)) {
      dense_input = nhwc_copy(input), from = dense_input.get();
    }
    // The stride of a dimension of one element says nothing.
    const std::int64_t c = from->size(1), h = from->size(2), w = from->size(3);
    const std::int64_t pixel = w > 1 ? from->stride(3) : c;
    const std::int64_t row = h > 1 ? from->stride(2) : w * pixel;
    const kernels::ImageStrides strides{p.batch > 1 ? from->stride(0) : h * row, c > 1 ? from->stride(1) : 1, row,
                                        pixel};
    TensorPtr out = empty_nhwc(sizes, DType::kFloat32);
    if (out->numel() != 0) {
      kernels::convolution_packed(p, from->data<float>(), strides, dense_weight->raw(),
                                  dense_bias ? dense_bias->data<float>() : nullptr,
                                  rest != nullptr ? rest->data<float>() : nullptr, out->data<float>());
    }
    give(ret0, channels_last != 0 ? std::move(out) : contiguous(*out), kOp);
  });
}

}  // namespace untorch::shims
