// Element-wise operators that compiled models leave to shims (aoti_torch_cuda_*): abs, angle, add, mul, pow, gcd,
// polar, fill_. Promotion, broadcasting and layouts are the CPU's. A 0-D operand may be on the CPU; it goes to the
// kernel by value, so that a graph keeps it.
#include "kernels/cuda/elementwise/elementwise.h"

#include "kernels/cuda/elementwise/copy.h"
#include "shims/cpu/elementwise.h"
#include "shims/cuda/shim.h"
#include "shims/device_ops.h"

using namespace untorch;
using namespace untorch::shims;
using kernels::cuda::Operand;

namespace {

bool is_host_scalar(const Tensor& t) { return t.device().type == DeviceType::kCPU && t.dim() == 0; }

Tensor& operand_input(AtenTensorHandle handle, const char* op, const char* argument) {
  Tensor& t = input(handle, op, argument);
  return is_host_scalar(t) ? t : cuda_input(handle, op, argument);
}

void check_number(DType dtype, const char* op) {
  if (is_floating(dtype) || is_integral(dtype) || dtype == DType::kBool || dtype == DType::kComplex64 ||
      dtype == DType::kComplex128) {
    return;
  }
  throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(dtype), " is not supported");
}

// launch(space, out, a, b, stream) over two operands converted to `dtype`, at least one of them on a GPU.
template <class Launch>
TensorPtr binary(const Tensor& a, const Tensor& b, DType dtype, const char* op, Launch&& launch) {
  check_number(dtype, op);
  check(!is_host_scalar(a) || !is_host_scalar(b), op, ": both operands are on cpu, expected one on cuda");
  broadcast_shapes(a.sizes(), b.sizes(), op);
  const Tensor& leader = is_host_scalar(a) ? b : a;
  const Tensor& other = is_host_scalar(a) ? a : b;
  const OnDevice on(op, leader, {is_host_scalar(other) ? nullptr : &other});
  TensorPtr out = binary_result(a, b, dtype, op);
  const auto converted = [&](const Tensor& t) {
    if (is_host_scalar(t)) return to_dtype(t, dtype);
    return t.dtype() == dtype ? std::make_unique<Tensor>(t) : to_dtype(t, dtype);
  };
  const TensorPtr ca = converted(a), cb = converted(b);
  const auto operand = [](const Tensor& t) {
    return is_host_scalar(t) ? Operand{nullptr, t.raw()} : Operand{t.raw(), nullptr};
  };
  // An operand without an element is not read, but its address may be null.
  if (out->numel() != 0) {
    on.launched(launch(strided<3>(op, out->sizes(), {out.get(), ca.get(), cb.get()}), out->raw(), operand(*ca),
                       operand(*cb), on.stream()));
  }
  return out;
}

TensorPtr add(const Tensor& a, const Tensor& b, double alpha, DType dtype, const char* op) {
  check_alpha(dtype, alpha, op);
  return binary(a, b, dtype, op, [&](const auto& space, void* out, Operand x, Operand y, kernels::cuda::Stream stream) {
    return kernels::cuda::add(space, out, x, y, alpha, dtype, stream);
  });
}

TensorPtr multiply(const Tensor& a, const Tensor& b, DType dtype) {
  return binary(a, b, dtype, "mul",
                [&](const auto& space, void* out, Operand x, Operand y, kernels::cuda::Stream stream) {
                  return kernels::cuda::multiply(space, out, x, y, dtype, stream);
                });
}

TensorPtr power(const Tensor& a, const Tensor& b, DType dtype) {
  if (dtype == DType::kBool) throw_error(ErrorKind::kUnsupported, "pow: dtype bool is not supported");
  return binary(a, b, dtype, "pow",
                [&](const auto& space, void* out, Operand x, Operand y, kernels::cuda::Stream stream) {
                  return kernels::cuda::power(space, out, x, y, dtype, stream);
                });
}

AOTITorchError add_shim(AtenTensorHandle self, AtenTensorHandle other, double alpha, AtenTensorHandle* ret0,
                        const char* op, bool subtract) {
  return guarded(op, [&] {
    const Tensor& a = operand_input(self, op, "self");
    const Tensor& b = operand_input(other, op, "other");
    check(!subtract || (a.dtype() != DType::kBool && b.dtype() != DType::kBool), op,
          ": subtraction of bool tensors is not supported; use logical_xor or logical_not");
    give(ret0, add(a, b, subtract ? -alpha : alpha, result_type(a, b), op), op);
  });
}

AOTITorchError subtract_shim(AtenTensorHandle self, AtenTensorHandle other, double alpha, AtenTensorHandle* ret0) {
  return add_shim(self, other, alpha, ret0, "subtract", true);
}

AOTITorchError fill_shim(AtenTensorHandle self, double value) {
  const char* op = "fill_";
  return guarded(op, [&] {
    const Tensor& t = cuda_input(self, op, "self");
    const TensorPtr scalar = scalar_tensor(value, t.dtype());
    check(element_size(t.dtype()) <= 16, op, ": dtype ", dtype_name(t.dtype()), " is not supported");
    const OnDevice on(op, t);
    on.launched(kernels::cuda::fill(strided<1>(op, t.sizes(), {&t}), t.raw(), scalar->raw(),
                                    static_cast<int>(element_size(t.dtype())), on.stream()));
  });
}

// The dtype of |z| and of the angle of z, for complex z.
DType part_of(DType dtype, DType otherwise) {
  return dtype == DType::kComplex64 ? DType::kFloat32 : dtype == DType::kComplex128 ? DType::kFloat64 : otherwise;
}

[[maybe_unused]] const bool registered = [] {
  cuda_ops.subtract = subtract_shim;
  cuda_ops.fill = fill_shim;
  return true;
}();

}  // namespace

UNTORCH_SHIM aoti_torch_cuda_abs(AtenTensorHandle self, AtenTensorHandle* ret0) {
  return guarded("abs", [&] {
    const Tensor& t = cuda_input(self, "abs", "self");
    check_number(t.dtype(), "abs");
    if (t.dtype() == DType::kBool) throw_error(ErrorKind::kUnsupported, "abs: dtype bool is not supported");
    const OnDevice on("abs", t);
    TensorPtr out = empty_like(t, part_of(t.dtype(), t.dtype()));
    on.launched(kernels::cuda::absolute(strided<2>("abs", t.sizes(), {out.get(), &t}), out->raw(), t.raw(), t.dtype(),
                                        on.stream()));
    give(ret0, std::move(out), "abs");
  });
}

UNTORCH_SHIM aoti_torch_cuda_angle(AtenTensorHandle self, AtenTensorHandle* ret0) {
  return guarded("angle", [&] {
    const Tensor& t = cuda_input(self, "angle", "self");
    check_number(t.dtype(), "angle");
    const DType dtype = part_of(t.dtype(), result_type_with_double(t));
    const OnDevice on("angle", t);
    TensorPtr out = empty_like(t, dtype);
    on.launched(kernels::cuda::angle(strided<2>("angle", t.sizes(), {out.get(), &t}), out->raw(), t.raw(), t.dtype(),
                                     on.stream()));
    give(ret0, std::move(out), "angle");
  });
}

UNTORCH_SHIM aoti_torch_cuda_add_Tensor(AtenTensorHandle self, AtenTensorHandle other, double alpha,
                                        AtenTensorHandle* ret0) {
  return add_shim(self, other, alpha, ret0, "add", false);
}

// The scalar arrives as a double, so an integer tensor gives a floating one, as with a Python float.
UNTORCH_SHIM aoti_torch_cuda_add_Scalar(AtenTensorHandle self, double other, double alpha, AtenTensorHandle* ret0) {
  return guarded("add", [&] {
    const Tensor& t = cuda_input(self, "add", "self");
    const DType dtype = result_type_with_double(t);
    give(ret0, add(t, *scalar_tensor(other, dtype), alpha, dtype, "add"), "add");
  });
}

UNTORCH_SHIM aoti_torch_cuda_mul_Tensor(AtenTensorHandle self, AtenTensorHandle other, AtenTensorHandle* ret0) {
  return guarded("mul", [&] {
    const Tensor& a = operand_input(self, "mul", "self");
    const Tensor& b = operand_input(other, "mul", "other");
    give(ret0, multiply(a, b, result_type(a, b)), "mul");
  });
}

UNTORCH_SHIM aoti_torch_cuda_mul_Scalar(AtenTensorHandle self, double other, AtenTensorHandle* ret0) {
  return guarded("mul", [&] {
    const Tensor& t = cuda_input(self, "mul", "self");
    const DType dtype = result_type_with_double(t);
    give(ret0, multiply(t, *scalar_tensor(other, dtype), dtype), "mul");
  });
}

UNTORCH_SHIM aoti_torch_cuda_pow_Tensor_Tensor(AtenTensorHandle self, AtenTensorHandle exponent,
                                               AtenTensorHandle* ret0) {
  return guarded("pow", [&] {
    const Tensor& a = operand_input(self, "pow", "self");
    const Tensor& b = operand_input(exponent, "pow", "exponent");
    give(ret0, power(a, b, result_type(a, b)), "pow");
  });
}

UNTORCH_SHIM aoti_torch_cuda_pow_Tensor_Scalar(AtenTensorHandle self, double exponent, AtenTensorHandle* ret0) {
  return guarded("pow", [&] {
    const Tensor& t = cuda_input(self, "pow", "self");
    const DType dtype = result_type_with_double(t);
    give(ret0, power(t, *scalar_tensor(exponent, dtype), dtype), "pow");
  });
}

UNTORCH_SHIM aoti_torch_cuda_pow_Scalar(double self, AtenTensorHandle exponent, AtenTensorHandle* ret0) {
  return guarded("pow", [&] {
    const Tensor& t = cuda_input(exponent, "pow", "exponent");
    const DType dtype = result_type_with_double(t);
    give(ret0, power(*scalar_tensor(self, dtype), t, dtype), "pow");
  });
}

UNTORCH_SHIM aoti_torch_cuda_gcd(AtenTensorHandle self, AtenTensorHandle other, AtenTensorHandle* ret0) {
  return guarded("gcd", [&] {
    const Tensor& a = operand_input(self, "gcd", "self");
    const Tensor& b = operand_input(other, "gcd", "other");
    const DType dtype = result_type(a, b);
    if (!is_integral(dtype)) {
      throw_error(ErrorKind::kUnsupported, "gcd: dtype ", dtype_name(dtype),
                  " is not supported, expected an integer type");
    }
    give(ret0,
         binary(a, b, dtype, "gcd",
                [&](const auto& space, void* out, Operand x, Operand y, kernels::cuda::Stream stream) {
                  return kernels::cuda::gcd(space, out, x, y, dtype, stream);
                }),
         "gcd");
  });
}

UNTORCH_SHIM aoti_torch_cuda_polar(AtenTensorHandle abs, AtenTensorHandle angle, AtenTensorHandle* ret0) {
  const char* op = "polar";
  return guarded(op, [&] {
    const Tensor& a = cuda_input(abs, op, "abs");
    const Tensor& b = cuda_input(angle, op, "angle");
    check(a.dtype() == b.dtype() && (a.dtype() == DType::kFloat32 || a.dtype() == DType::kFloat64), op,
          ": 'abs' and 'angle' must both be float32 or float64, got ", dtype_name(a.dtype()), " and ",
          dtype_name(b.dtype()));
    broadcast_shapes(a.sizes(), b.sizes(), op);
    const OnDevice on(op, a, {&b});
    const DType dtype = a.dtype() == DType::kFloat32 ? DType::kComplex64 : DType::kComplex128;
    TensorPtr out = binary_result(a, b, dtype, op);
    if (out->numel() != 0) {
      on.launched(kernels::cuda::polar(strided<3>(op, out->sizes(), {out.get(), &a, &b}), out->raw(), a.raw(), b.raw(),
                                       a.dtype(), on.stream()));
    }
    give(ret0, std::move(out), op);
  });
}

UNTORCH_SHIM aoti_torch_cuda_fill__Scalar(AtenTensorHandle self, double value) { return fill_shim(self, value); }
