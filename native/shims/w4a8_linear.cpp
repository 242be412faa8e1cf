// w4a8_linear, nvfp4_int8_linear: linear layers with weights of four bits and int8 activations on the CPU. CUDA has
// none.
#include "kernels/cpu/w4a8/w4a8.h"
#include "shims/destination.h"
#include "shims/int4_linear.h"
#include "shims/matmul_checks.h"
#include "shims/nvfp4_arguments.h"
#include "shims/op.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

constexpr const char *kW4A8Name = "w4a8_linear", *kNvfp4Name = "nvfp4_int8_linear";
constexpr std::int64_t kPanelColumns = kernels::kW4A8Columns;

// What both have, checked but for the scales; in float32, whatever x's dtype.
class FourBitCall {
 public:
  FourBitCall(const char* op, AtenTensorHandle x, AtenTensorHandle weight, std::int64_t n, AtenTensorHandle* bias)
      : op_(op),
        x_(cpu_input(x, op, "x")),
        weight_(cpu_input(weight, op, "weight")),
        bias_(optional_cpu_input(bias, op, "bias")) {
    check_float_rows(op, "x", x_);
    check(n >= 0, op, ": out_features must not be negative, got ", n);
    p_.n = n, p_.x_width = x_.size(-1);
  }

  // Weights of k inputs; `more` is for messages, behind what they are for.
  kernels::W4A8Linear& take_weight(std::int64_t k, const char* more) {
    p_.k = k, more_ = more;
    check(weight_.dtype() == DType::kInt32, op_, ": argument 'weight' must be int32, got ",
          dtype_name(weight_.dtype()));
    check_packed("weight", weight_, {panels(), k / 8, kPanelColumns});
    return p_;
  }

  void check_packed(const char* argument, const Tensor& tensor, const Dims& sizes) const {
    check(tensor.sizes() == sizes && tensor.is_contiguous(), op_, ": argument '", argument,
          "' must be contiguous of shape ", to_string(sizes), " for ", p_.x_width, " features, ", p_.n, " outputs",
          more_, ", got shape ", to_string(tensor.sizes()), " with strides ", to_string(tensor.strides()));
  }

  std::int64_t panels() const { return (p_.n + kPanelColumns - 1) / kPanelColumns; }
  std::int64_t width() const { return p_.x_width; }

  TensorPtr run(const Tensor* into) {
    if (bias_ != nullptr) check_bias(op_, *bias_, p_.n, x_.dtype());
    const FloatRows rows = float_rows(x_);
    const TensorPtr dense_bias = float_bias(bias_);
    Dims sizes = x_.sizes();
    sizes[sizes.size() - 1] = p_.n;
    TensorPtr out = Tensor::empty(sizes, DType::kFloat32);
    p_.m = rows_before_last(x_);
    p_.x = rows.tensor->data<float>(), p_.x_stride = rows.stride;
    p_.weight = weight_.data<std::int32_t>();
    p_.bias = dense_bias == nullptr ? nullptr : dense_bias->data<float>();
    p_.out = out->data<float>();
    kernels::w4a8_linear(p_);
    return delivered(op_, into, to_dtype(*out, x_.dtype()));
  }

 private:
  const char* op_;
  const Tensor &x_, &weight_;
  const Tensor* bias_;
  kernels::W4A8Linear p_;
  const char* more_ = "";
};

TensorPtr w4a8_linear(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle scale_handle, std::int64_t group,
                      std::int64_t n, AtenTensorHandle* bias, const Tensor* into) {
  const Tensor& scales = cpu_input(scale_handle, kW4A8Name, "scale_and_zero");
  FourBitCall call(kW4A8Name, x, weight, n, bias);
  check(group == 32 || group == 64 || group == 128 || group == 256, kW4A8Name,
        ": argument 'group_size' must be 32, 64, 128 or 256, got ", group);
  const std::int64_t k = (call.width() + group - 1) / group * group;
  kernels::W4A8Linear& p = call.take_weight(k, group == 32    ? " and groups of 32"
                                               : group == 64  ? " and groups of 64"
                                               : group == 128 ? " and groups of 128"
                                                              : " and groups of 256");
  check(is_floating(scales.dtype()) && scales.dtype() != DType::kFloat64, kW4A8Name,
        ": argument 'scale_and_zero' must be float32, bfloat16 or float16, got ", dtype_name(scales.dtype()));
  p.has_zeros = scales.dim() != 4 || scales.size(2) != 1;
  call.check_packed("scale_and_zero", scales, {call.panels(), k / group, p.has_zeros ? 2 : 1, kPanelColumns});
  p.scales = scales.raw(), p.scale_type = scale_type_of(scales.dtype()), p.group = group;
  return call.run(into);
}

TensorPtr nvfp4_int8_linear(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle block_scale,
                            AtenTensorHandle global_scale, std::int64_t n, AtenTensorHandle* bias, const Tensor* into) {
  const Tensor &scales = cpu_input(block_scale, kNvfp4Name, "block_scale"),
               &global = cpu_input(global_scale, kNvfp4Name, "global_scale");
  FourBitCall call(kNvfp4Name, x, weight, n, bias);
  constexpr std::int64_t kPart = kernels::kW4A8Part;
  const std::int64_t k = (call.width() + kPart - 1) / kPart * kPart;
  kernels::W4A8Linear& p = call.take_weight(k, "");
  check(scales.dtype() == DType::kFloat8E4M3FN, kNvfp4Name, ": argument 'block_scale' must be float8_e4m3fn, got ",
        dtype_name(scales.dtype()));
  call.check_packed("block_scale", scales, {call.panels(), k / kNvfp4Block, kPanelColumns});
  check(global.dtype() == DType::kFloat32, kNvfp4Name, ": argument 'global_scale' must be float32, got ",
        dtype_name(global.dtype()));
  call.check_packed("global_scale", global, {n});
  p.format = kernels::W4A8Format::kNvfp4;
  p.scales = scales.raw(), p.group = kNvfp4Block, p.global_scales = global.data<float>();
  return call.run(into);
}

}  // namespace

// out = quantized x [.., k] · weightᵀ + bias, for float32, bfloat16 and float16; see kernels/cpu/w4a8/w4a8.h.
UNTORCH_SHIM aoti_torch_cpu_w4a8_linear(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle scale_and_zero,
                                        std::int64_t group_size, std::int64_t out_features, AtenTensorHandle* bias,
                                        AtenTensorHandle* ret0) {
  return guarded(kW4A8Name, [&] {
    check(ret0 != nullptr, kW4A8Name, ": output pointer is null");
    give(ret0, w4a8_linear(x, weight, scale_and_zero, group_size, out_features, bias, nullptr), kW4A8Name);
  });
}

// The same into memory of the caller.
UNTORCH_SHIM untorch_w4a8_linear(AtenTensorHandle out, AtenTensorHandle x, AtenTensorHandle weight,
                                 AtenTensorHandle scale_and_zero, std::int64_t group_size, std::int64_t out_features,
                                 AtenTensorHandle* bias) {
  return guarded(kW4A8Name, [&] {
    (void)w4a8_linear(x, weight, scale_and_zero, group_size, out_features, bias, &cpu_input(out, kW4A8Name, "out"));
  });
}

UNTORCH_SHIM aoti_torch_cpu_nvfp4_int8_linear(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle block_scale,
                                              AtenTensorHandle global_scale, std::int64_t out_features,
                                              AtenTensorHandle* bias, AtenTensorHandle* ret0) {
  return guarded(kNvfp4Name, [&] {
    check(ret0 != nullptr, kNvfp4Name, ": output pointer is null");
    give(ret0, nvfp4_int8_linear(x, weight, block_scale, global_scale, out_features, bias, nullptr), kNvfp4Name);
  });
}

// The same into memory of the caller.
UNTORCH_SHIM untorch_nvfp4_int8_linear(AtenTensorHandle out, AtenTensorHandle x, AtenTensorHandle weight,
                                       AtenTensorHandle block_scale, AtenTensorHandle global_scale,
                                       std::int64_t out_features, AtenTensorHandle* bias) {
  return guarded(kNvfp4Name, [&] {
    (void)nvfp4_int8_linear(x, weight, block_scale, global_scale, out_features, bias,
                            &cpu_input(out, kNvfp4Name, "out"));
  });
}
