// untorch::int4_linear on the CPU.
#include "kernels/cpu/w4a16/int4.h"

#include "shims/int4_checks.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

kernels::ScaleType scale_type_of(DType dtype) {
  return dtype == DType::kBFloat16  ? kernels::ScaleType::kBFloat16
         : dtype == DType::kFloat16 ? kernels::ScaleType::kFloat16
                                    : kernels::ScaleType::kFloat32;
}

}  // namespace

// x [.., k_in] · weightᵀ + bias, the weight in four bits: see kernels/cpu/int4.h.
UNTORCH_SHIM aoti_torch_cpu_int4_linear(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle scale_and_zero,
                                        std::int64_t group_size, AtenTensorHandle* bias, AtenTensorHandle* ret0) {
  constexpr const char* op = "int4_linear";
  return guarded(op, [&] {
    const Tensor& input = cpu_input(x, op, "x");
    const Tensor& packed = cpu_input(weight, op, "weight");
    const Tensor& scales = cpu_input(scale_and_zero, op, "scale_and_zero");
    const Tensor* added = optional_cpu_input(bias, op, "bias");
    check(ret0 != nullptr, op, ": output pointer is null");
    const Int4Shape shape = check_int4_linear(op, input, packed, scales, group_size, added);
    TensorPtr rows =
        input.dtype() == DType::kFloat32 ? std::make_unique<Tensor>(input) : to_dtype(input, DType::kFloat32);
    std::optional<std::int64_t> stride = row_stride_of(*rows);
    if (!stride) {
      rows = clone_contiguous(*rows);
      stride = shape.x_width;
    }
    const TensorPtr dense_bias = added == nullptr ? nullptr : contiguous(*to_dtype(*added, DType::kFloat32));
    TensorPtr out = Tensor::empty(shape.out_sizes, DType::kFloat32);
    kernels::Int4Linear product;
    product.m = shape.m, product.n = shape.n, product.k = shape.k;
    product.x = rows->data<float>(), product.x_width = shape.x_width, product.x_stride = *stride;
    product.weight = packed.data<std::int32_t>(), product.inner_k_tiles = shape.inner_k_tiles;
    product.scales = scales.raw(), product.scale_type = scale_type_of(scales.dtype()), product.group = shape.group;
    product.bias = dense_bias == nullptr ? nullptr : dense_bias->data<float>();
    product.out = out->data<float>();
    kernels::int4_linear(product);
    give(ret0, to_dtype(*out, input.dtype()), op);
  });
}
