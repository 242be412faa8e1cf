// Results that go to memory of the caller: for the functions that eager PyTorch calls (src/untorch/ops/native.py).
#pragma once

#include <optional>

#include "cuda/stream.h"
#include "shims/op.h"
#include "tensor/copy.h"
#include "tensor/tensor.h"

namespace untorch::shims {

// While it lives, a GPU operator may allocate and load code although the caller captures the stream: PyTorch's captures
// forbid both to the thread.
class FromTorch {
 public:
  explicit FromTorch(const Op& op) {
    if (op.on_cuda()) relaxed_.emplace();
  }

 private:
  std::optional<cuda::RelaxedCapture> relaxed_;
};

// `into`, which must be what the operator gives, dense and aligned to 16 bytes; where it is null, new memory.
inline TensorPtr destination(const char* op, const Tensor* into, DimSpan sizes, DType dtype, Device device) {
  if (into == nullptr) return Tensor::empty(sizes, dtype, device);
  check(into->dtype() == dtype && into->sizes() == sizes && into->is_contiguous() && into->device() == device, op,
        ": argument 'out' must be contiguous ", dtype_name(dtype), to_string(sizes), " on ", device_name(device),
        ", got ", dtype_name(into->dtype()), to_string(into->sizes()), " with strides ", to_string(into->strides()),
        " on ", device_name(into->device()));
  check(reinterpret_cast<std::uintptr_t>(into->raw()) % 16 == 0, op, ": argument 'out' must be aligned to 16 bytes");
  return std::make_unique<Tensor>(*into);
}

// A result that was computed on the CPU in memory of its own; gives `into` with its values where that is not null.
inline TensorPtr delivered(const char* op, const Tensor* into, TensorPtr result) {
  if (into == nullptr) return result;
  TensorPtr out = destination(op, into, result->sizes(), result->dtype(), result->device());
  copy(*out, *result);
  return out;
}

}  // namespace untorch::shims
