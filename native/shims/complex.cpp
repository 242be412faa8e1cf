// aten::complex on a GPU: the two parts are copied beside each other. Models reach it where they scale a spectrum.
#include "shims/broadcast.h"
#include "shims/op.h"
#include "shims/proxy_op.h"
#include "shims/view.h"

using namespace untorch;
using namespace untorch::shims;

UNTORCH_PROXY_OP(complex_of, "aten::complex", kOnCuda) {
  const Tensor &real = call.tensor("real"), &imag = call.tensor("imag");
  check(real.dtype() == imag.dtype(), op, ": argument 'imag' is ", dtype_name(imag.dtype()), ", expected ",
        dtype_name(real.dtype()), " as 'real'");
  if (real.dtype() != DType::kFloat32 && real.dtype() != DType::kFloat64) {
    throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(real.dtype()),
                " is not supported, expected float32 or float64");
  }
  const auto shape = broadcast_shapes(real.sizes(), imag.sizes(), op);
  const DType dtype = real.dtype() == DType::kFloat32 ? DType::kComplex64 : DType::kComplex128;
  TensorPtr out = Tensor::empty(shape, dtype, real.device());
  const TensorPtr parts = view_as_real(*out);
  const auto part = [&](std::int64_t i) {
    const auto &sizes = parts->sizes(), &strides = parts->strides();
    return parts->view(DimSpan(sizes).first(sizes.size() - 1), DimSpan(strides).first(strides.size() - 1),
                       parts->storage_offset() + i);
  };
  copy(*part(0), expand(real, shape, op, "real"));
  copy(*part(1), expand(imag, shape, op, "imag"));
  call.give(0, std::move(out));
}
