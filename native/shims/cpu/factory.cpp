// New tensors by value: full, new_empty, new_zeros, hann_window, _efficientzerotensor, and fill_.
#include <cmath>
#include <numbers>

#include "shims/cpu/elementwise.h"
#include "shims/device_ops.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

AOTITorchError fill_shim(AtenTensorHandle self, double value) {
  return guarded("fill_", [&] { fill(cpu_input(self, "fill_", "self"), value); });
}

}  // namespace

UNTORCH_SHIM aoti_torch_cpu_fill__Scalar(AtenTensorHandle self, double value) { return fill_shim(self, value); }
UNTORCH_SHIM aoti_torch_aten_fill__Scalar(AtenTensorHandle self, double value) {
  return on_cuda(self) && cuda_ops.fill != nullptr ? cuda_ops.fill(self, value) : fill_shim(self, value);
}

UNTORCH_SHIM aoti_torch_aten_full(const std::int64_t* size, std::int64_t size_len_, double fill_value,
                                  std::int32_t* dtype, std::int32_t* layout, std::int32_t* device, std::int32_t,
                                  std::int32_t*, AtenTensorHandle* ret0) {
  return guarded("full", [&] {
    check_factory(layout, device, "full");
    TensorPtr out = Tensor::empty(ints(size, size_len_), dtype_or(dtype, DType::kFloat32));
    fill(*out, fill_value);
    give(ret0, std::move(out), "full");
  });
}

UNTORCH_SHIM aoti_torch_aten_new_empty(AtenTensorHandle self, const std::int64_t* size, std::int64_t size_len_,
                                       std::int32_t* dtype, std::int32_t* layout, std::int32_t* device, std::int32_t,
                                       std::int32_t*, AtenTensorHandle* ret0) {
  return guarded("new_empty", [&] {
    const Tensor& t = cpu_input(self, "new_empty", "self");
    check_factory(layout, device, "new_empty");
    give(ret0, Tensor::empty(ints(size, size_len_), dtype_or(dtype, t.dtype())), "new_empty");
  });
}

UNTORCH_SHIM aoti_torch_aten_new_zeros(AtenTensorHandle self, const std::int64_t* size, std::int64_t size_len_,
                                       std::int32_t* dtype, std::int32_t* layout, std::int32_t* device, std::int32_t,
                                       std::int32_t*, AtenTensorHandle* ret0) {
  return guarded("new_zeros", [&] {
    const Tensor& t = cpu_input(self, "new_zeros", "self");
    check_factory(layout, device, "new_zeros");
    give(ret0, Tensor::zeros(ints(size, size_len_), dtype_or(dtype, t.dtype())), "new_zeros");
  });
}

UNTORCH_SHIM aoti_torch_cpu__efficientzerotensor(const std::int64_t* size, std::int64_t size_len_, std::int32_t* dtype,
                                                 std::int32_t* layout, std::int32_t* device, std::int32_t,
                                                 std::int32_t*, AtenTensorHandle* ret0) {
  return guarded("_efficientzerotensor", [&] {
    check_factory(layout, device, "_efficientzerotensor");
    // PyTorch's has no memory and exists for autograd only; a compiled model reads it as plain zeros.
    give(ret0, Tensor::zeros(ints(size, size_len_), dtype_or(dtype, DType::kFloat32)), "_efficientzerotensor");
  });
}

UNTORCH_SHIM aoti_torch_cpu_hann_window(std::int64_t window_length, std::int32_t* dtype, std::int32_t* layout,
                                        std::int32_t* device, std::int32_t, std::int32_t*, AtenTensorHandle* ret0) {
  return guarded("hann_window", [&] {
    check_factory(layout, device, "hann_window");
    check(window_length >= 0, "hann_window: 'window_length' is ", window_length, ", expected 0 or more");
    TensorPtr out = Tensor::empty(DimSpan(&window_length, 1), dtype_or(dtype, DType::kFloat32));
    dispatch_floating("hann_window", out->dtype(), [&]<class T>() {
      T* to = out->data<T>();
      // The periodic window: one period of the raised cosine, its last point left out.
      for (std::int64_t i = 0; i < window_length; ++i) {
        const double phase = 2 * std::numbers::pi * static_cast<double>(i) / static_cast<double>(window_length);
        to[i] = static_cast<T>(static_cast<compute_t<T>>(window_length == 1 ? 1.0 : 0.5 - 0.5 * std::cos(phase)));
      }
    });
    give(ret0, std::move(out), "hann_window");
  });
}
