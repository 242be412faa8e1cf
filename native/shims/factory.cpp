// New tensors by value: full, new_empty, new_zeros, hann_window, _efficientzerotensor; and fill_.
#include "shims/factory.h"

#include "kernels/cat_pad.h"
#include "kernels/cuda/elementwise/copy.h"
#include "shims/promotion.h"
#include "tensor/iteration.h"

using namespace untorch;
using namespace untorch::shims;

UNTORCH_OP_AS("fill_", fill__Scalar, (AtenTensorHandle self, double value), self, value) {
  const Tensor& t = op.input(self, "self");
  const TensorPtr scalar = scalar_tensor(value, t.dtype());
  run(
      op, {&t}, [&] { copy_cpu(t, *scalar); },
      [&](const auto& on) {
        return kernels::cuda::fill(strided<1>(op, t.sizes(), {&t}), t.raw(), scalar->raw(),
                                   static_cast<int>(element_size(t.dtype())), on.stream());
      });
}

UNTORCH_SHIM aoti_torch_aten_fill__Scalar(AtenTensorHandle self, double value) {
  return guarded("fill_", [&] { fill__Scalar_op(Op::of("fill_", self, "self"), self, value); });
}

// These name no device in C and are the CPU's alone.
UNTORCH_SHIM aoti_torch_aten_full(const std::int64_t* size, std::int64_t size_len, double fill_value, UNTORCH_FACTORY,
                                  AtenTensorHandle* ret0) {
  const Op op{"full"};
  return guarded(op, [&] {
    const DType wanted = Factory{dtype, layout, device, device_index}.checked(op, DType::kFloat32);
    TensorPtr out = Tensor::empty(ints(size, size_len), wanted);
    copy_cpu(*out, *scalar_tensor(fill_value, wanted));
    give(ret0, std::move(out), op);
  });
}

UNTORCH_SHIM aoti_torch_aten_new_empty(AtenTensorHandle self, const std::int64_t* size, std::int64_t size_len,
                                       UNTORCH_FACTORY, AtenTensorHandle* ret0) {
  const Op op{"new_empty"};
  return guarded(op, [&] {
    const Tensor& t = op.input(self, "self");
    const DType wanted = Factory{dtype, layout, device, device_index}.checked(op, t.dtype());
    give(ret0, Tensor::empty(ints(size, size_len), wanted), op);
  });
}

UNTORCH_SHIM aoti_torch_aten_new_zeros(AtenTensorHandle self, const std::int64_t* size, std::int64_t size_len,
                                       UNTORCH_FACTORY, AtenTensorHandle* ret0) {
  const Op op{"new_zeros"};
  return guarded(op, [&] {
    const Tensor& t = op.input(self, "self");
    const DType wanted = Factory{dtype, layout, device, device_index}.checked(op, t.dtype());
    give(ret0, Tensor::zeros(ints(size, size_len), wanted), op);
  });
}

UNTORCH_OP(_efficientzerotensor,
           (const std::int64_t* size, std::int64_t size_len, UNTORCH_FACTORY, AtenTensorHandle* ret0), size, size_len,
           UNTORCH_FACTORY_ARGUMENTS, ret0) {
  const Factory f{dtype, layout, device, device_index};
  const DType wanted = f.checked(op, DType::kFloat32);
  // PyTorch's has no memory and exists for autograd only; a compiled model reads it as plain zeros.
  give(ret0, Tensor::zeros(ints(size, size_len), wanted, f.where(op)), op);
}

UNTORCH_OP(hann_window, (std::int64_t window_length, UNTORCH_FACTORY, AtenTensorHandle* ret0), window_length,
           UNTORCH_FACTORY_ARGUMENTS, ret0) {
  const Factory f{dtype, layout, device, device_index};
  const DType wanted = f.checked(op, DType::kFloat32);
  check(window_length >= 0, op, ": 'window_length' is ", window_length, ", expected 0 or more");
  if (!is_floating(wanted)) {
    throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(wanted),
                " is not supported, expected a floating type");
  }
  TensorPtr out = Tensor::empty(DimSpan(&window_length, 1), wanted, f.where(op));
  run(
      op, {out.get()}, [&] { kernels::cpu::hann_window(out->raw(), wanted, window_length); },
      [&](const auto& on) { return kernels::cuda::hann_window(out->raw(), wanted, window_length, on.stream()); });
  give(ret0, std::move(out), op);
}
