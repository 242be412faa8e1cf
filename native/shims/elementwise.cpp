// The elementwise operators that compiled models leave to shims: abs, angle, add, subtract, mul, pow, gcd, polar; amax.
#include "kernels/elementwise.h"

#include <cmath>

#include "shims/broadcast.h"
#include "shims/layout.h"
#include "shims/op.h"
#include "shims/promotion.h"
#include "tensor/iteration.h"

using namespace untorch;
using namespace untorch::shims;
using kernels::BinaryFunction;

namespace {

// CUDA's binary operators take a 0-D operand from the CPU; it goes to the kernel by value, so that a graph keeps it.
bool is_host_scalar(const Op& op, const Tensor& t) {
  return op.on_cuda() && t.device().type == DeviceType::kCPU && t.dim() == 0;
}

Tensor& operand_input(const Op& op, AtenTensorHandle handle, const char* argument) {
  Tensor& t = input(handle, op, argument);
  return is_host_scalar(op, t) ? t : op.input(handle, argument);
}

void check_number(const Op& op, DType dtype) {
  if (is_floating(dtype) || is_integral(dtype) || dtype == DType::kBool || dtype == DType::kComplex64 ||
      dtype == DType::kComplex128) {
    return;
  }
  throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(dtype), " is not supported");
}

// The dtype of |z| and of the angle of z, for complex z.
DType part_of(DType dtype, DType otherwise) {
  return dtype == DType::kComplex64 ? DType::kFloat32 : dtype == DType::kComplex128 ? DType::kFloat64 : otherwise;
}

// fn(a, b) of operands that are converted to `dtype`; the result's dtype is `result`.
TensorPtr binary(const Op& op, BinaryFunction fn, const Tensor& a, const Tensor& b, DType dtype, DType result,
                 double alpha = 1) {
  check_number(op, dtype);
  const bool host_a = is_host_scalar(op, a), host_b = is_host_scalar(op, b);
  check(!host_a || !host_b, op, ": both operands are on cpu, expected one on cuda");
  if (op.on_cuda()) broadcast_shapes(a.sizes(), b.sizes(), op);  // before the driver is touched
  kernels::Binary p;
  p.function = fn;
  p.dtype = dtype;
  p.alpha = alpha;
  TensorPtr out, ca, cb;
  const auto prepare = [&] {
    out = binary_result(a, b, result, op);
    ca = a.dtype() == dtype ? std::make_unique<Tensor>(a) : to_dtype(a, dtype);
    cb = b.dtype() == dtype ? std::make_unique<Tensor>(b) : to_dtype(b, dtype);
    p.space = strided<3>(op, out->sizes(), {out.get(), ca.get(), cb.get()});
    p.out = out->raw();
    p.a = host_a ? kernels::Operand{nullptr, ca->raw()} : kernels::Operand{ca->raw(), nullptr};
    p.b = host_b ? kernels::Operand{nullptr, cb->raw()} : kernels::Operand{cb->raw(), nullptr};
  };
  run(
      op, {host_a ? &b : &a, host_a || host_b ? nullptr : &b}, [&] { prepare(), kernels::cpu::binary(p); },
      [&](const auto& on) { return prepare(), kernels::cuda::binary(p, on.stream()); });
  return out;
}

TensorPtr add(const Op& op, const Tensor& a, const Tensor& b, double alpha, DType dtype) {
  check(is_floating(dtype) || is_complex(dtype) || alpha == std::floor(alpha), op, ": 'alpha' is ", alpha,
        ", expected a whole number for dtype ", dtype_name(dtype));
  return binary(op, BinaryFunction::kAdd, a, b, dtype, dtype, alpha);
}

TensorPtr multiply(const Op& op, const Tensor& a, const Tensor& b, DType dtype) {
  return binary(op, BinaryFunction::kMultiply, a, b, dtype, dtype);
}

TensorPtr power(const Op& op, const Tensor& a, const Tensor& b, DType dtype) {
  if (dtype == DType::kBool) throw_error(ErrorKind::kUnsupported, op, ": dtype bool is not supported");
  return binary(op, BinaryFunction::kPower, a, b, dtype, dtype);
}

}  // namespace

UNTORCH_OP(abs, (AtenTensorHandle self, AtenTensorHandle* ret0), self, ret0) {
  const Tensor& t = op.input(self, "self");
  check_number(op, t.dtype());
  if (t.dtype() == DType::kBool) throw_error(ErrorKind::kUnsupported, op, ": dtype bool is not supported");
  TensorPtr out = empty_like(t, part_of(t.dtype(), t.dtype()));
  const kernels::Unary p{strided<2>(op, t.sizes(), {out.get(), &t}), t.dtype(), out->raw(), t.raw()};
  run(
      op, {&t}, [&] { kernels::cpu::absolute(p); },
      [&](const auto& on) { return kernels::cuda::absolute(p, on.stream()); });
  give(ret0, std::move(out), op);
}

UNTORCH_OP(angle, (AtenTensorHandle self, AtenTensorHandle* ret0), self, ret0) {
  const Tensor& t = op.input(self, "self");
  check_number(op, t.dtype());
  TensorPtr out = empty_like(t, part_of(t.dtype(), result_type_with_double(t)));
  const kernels::Unary p{strided<2>(op, t.sizes(), {out.get(), &t}), t.dtype(), out->raw(), t.raw()};
  run(op, {&t}, [&] { kernels::cpu::angle(p); }, [&](const auto& on) { return kernels::cuda::angle(p, on.stream()); });
  give(ret0, std::move(out), op);
}

UNTORCH_OP_AS("add", add_Tensor, (AtenTensorHandle self, AtenTensorHandle other, double alpha, AtenTensorHandle* ret0),
              self, other, alpha, ret0) {
  const Tensor &a = operand_input(op, self, "self"), &b = operand_input(op, other, "other");
  give(ret0, add(op, a, b, alpha, result_type(a, b)), op);
}

UNTORCH_SHIM aoti_torch_aten_subtract_Tensor(AtenTensorHandle self, AtenTensorHandle other, double alpha,
                                             AtenTensorHandle* ret0) {
  return guarded("subtract", [&] {
    const Op op = Op::of("subtract", self, "self");
    const Tensor &a = operand_input(op, self, "self"), &b = operand_input(op, other, "other");
    check(a.dtype() != DType::kBool && b.dtype() != DType::kBool, op,
          ": subtraction of bool tensors is not supported; use logical_xor or logical_not");
    give(ret0, add(op, a, b, -alpha, result_type(a, b)), op);
  });
}

// Scalars arrive as doubles, so an integer tensor gives a floating one, as with a Python float.
UNTORCH_OP_AS("add", add_Scalar, (AtenTensorHandle self, double other, double alpha, AtenTensorHandle* ret0), self,
              other, alpha, ret0) {
  const Tensor& t = op.input(self, "self");
  const DType dtype = result_type_with_double(t);
  give(ret0, add(op, t, *scalar_tensor(other, dtype), alpha, dtype), op);
}

UNTORCH_OP_AS("mul", mul_Tensor, (AtenTensorHandle self, AtenTensorHandle other, AtenTensorHandle* ret0), self, other,
              ret0) {
  const Tensor &a = operand_input(op, self, "self"), &b = operand_input(op, other, "other");
  give(ret0, multiply(op, a, b, result_type(a, b)), op);
}

UNTORCH_OP_AS("mul", mul_Scalar, (AtenTensorHandle self, double other, AtenTensorHandle* ret0), self, other, ret0) {
  const Tensor& t = op.input(self, "self");
  const DType dtype = result_type_with_double(t);
  give(ret0, multiply(op, t, *scalar_tensor(other, dtype), dtype), op);
}

UNTORCH_OP_AS("pow", pow_Tensor_Tensor, (AtenTensorHandle self, AtenTensorHandle exponent, AtenTensorHandle* ret0),
              self, exponent, ret0) {
  const Tensor &a = operand_input(op, self, "self"), &b = operand_input(op, exponent, "exponent");
  give(ret0, power(op, a, b, result_type(a, b)), op);
}

UNTORCH_OP_AS("pow", pow_Tensor_Scalar, (AtenTensorHandle self, double exponent, AtenTensorHandle* ret0), self,
              exponent, ret0) {
  const Tensor& t = op.input(self, "self");
  const DType dtype = result_type_with_double(t);
  give(ret0, power(op, t, *scalar_tensor(exponent, dtype), dtype), op);
}

UNTORCH_OP_AS("pow", pow_Scalar, (double self, AtenTensorHandle exponent, AtenTensorHandle* ret0), self, exponent,
              ret0) {
  const Tensor& t = op.input(exponent, "exponent");
  const DType dtype = result_type_with_double(t);
  give(ret0, power(op, *scalar_tensor(self, dtype), t, dtype), op);
}

UNTORCH_OP(gcd, (AtenTensorHandle self, AtenTensorHandle other, AtenTensorHandle* ret0), self, other, ret0) {
  const Tensor &a = operand_input(op, self, "self"), &b = operand_input(op, other, "other");
  const DType dtype = result_type(a, b);
  if (!is_integral(dtype)) {
    throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(dtype),
                " is not supported, expected an integer type");
  }
  give(ret0, binary(op, BinaryFunction::kGcd, a, b, dtype, dtype), op);
}

UNTORCH_OP(polar, (AtenTensorHandle abs, AtenTensorHandle angle, AtenTensorHandle* ret0), abs, angle, ret0) {
  const Tensor &a = op.input(abs, "abs"), &b = op.input(angle, "angle");
  check(a.dtype() == b.dtype() && (a.dtype() == DType::kFloat32 || a.dtype() == DType::kFloat64), op,
        ": 'abs' and 'angle' must both be float32 or float64, got ", dtype_name(a.dtype()), " and ",
        dtype_name(b.dtype()));
  const DType result = a.dtype() == DType::kFloat32 ? DType::kComplex64 : DType::kComplex128;
  give(ret0, binary(op, BinaryFunction::kPolar, a, b, a.dtype(), result), op);
}

UNTORCH_SHIM aoti_torch_aten_amax(AtenTensorHandle self, const std::int64_t* dim, std::int64_t dim_len,
                                  std::int32_t keepdim, AtenTensorHandle* ret0) {
  const char* op = "amax";
  return guarded(op, [&] {
    const Tensor& t = cpu_input(self, op, "self");
    const DimSpan dims = ints(dim, dim_len);
    std::vector<bool> reduced(t.sizes().size(), dims.empty());
    for (const std::int64_t named : dims) {
      const auto d = static_cast<std::size_t>(normalize_dim(named, t.dim(), op));
      if (reduced.empty()) continue;
      check(!reduced[d], op, ": dimension ", d, " appears twice in ", to_string(dims));
      reduced[d] = true;
    }
    std::vector<std::int64_t> kept, shape;
    for (std::size_t d = 0; d < reduced.size(); ++d) {
      check(!reduced[d] || t.sizes()[d] != 0, op, ": dimension ", d, " of shape ", to_string(t.sizes()),
            " is empty and has no maximum");
      kept.push_back(reduced[d] ? 1 : t.sizes()[d]);
      if (!reduced[d] || keepdim != 0) shape.push_back(kept.back());
    }
    const TensorPtr out = Tensor::empty(kept, t.dtype());
    kernels::cpu::amax(t.sizes(), broadcast_strides(*out, t.sizes(), op, "out"), t.strides(), out->numel(), t.dtype(),
                       out->raw(), t.raw());
    give(ret0, out->view(shape, contiguous_strides(shape), 0), op);
  });
}
