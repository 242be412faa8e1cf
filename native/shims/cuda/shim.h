// What CUDA shims are written with.
//
//   UNTORCH_SHIM aoti_torch_cuda_cumsum(AtenTensorHandle self, std::int64_t dim, std::int32_t* dtype,
//                                       AtenTensorHandle* ret0) {
//     return guarded("cumsum", [&] {
//       const Tensor& t = cuda_input(self, "cumsum", "self");
//       const OnDevice on("cumsum", t);              // current device, the stream to launch on
//       TensorPtr out = Tensor::empty(t.sizes(), dtype, t.device());
//       on.launched(kernels::cuda::cumsum(…, on.stream()), "cumsum");
//       give(ret0, std::move(out), "cumsum");
//     });
//   }
#pragma once

#include <initializer_list>

#include "cuda/device.h"
#include "cuda/device_error.h"
#include "cuda/memory_pool.h"
#include "cuda/stream.h"
#include "kernels/cuda/scalar.h"
#include "kernels/cuda/strided.h"
#include "shims/shim.h"
#include "tensor/device.h"

namespace untorch::shims {

// The tensor behind a required handle: defined and on a GPU.
inline Tensor& cuda_input(AtenTensorHandle handle, const char* op, const char* argument) {
  Tensor& tensor = required(handle, op, argument);
  check(tensor.defined(), op, ": argument '", argument, "' is undefined");
  check(tensor.device().type == DeviceType::kCUDA, op, ": argument '", argument, "' is on ",
        device_name(tensor.device()), ", expected cuda");
  return tensor;
}

// An optional tensor argument: null, or a pointer to null, means absent.
inline const Tensor* optional_cuda_input(AtenTensorHandle* handle, const char* op, const char* argument) {
  if (handle == nullptr || *handle == nullptr || !unwrap(*handle)->defined()) return nullptr;
  return &cuda_input(*handle, op, argument);
}

// The device and stream that an operator runs on: its operands', which must agree, and the current one of that device.
class OnDevice {
 public:
  OnDevice(const char* op, const Tensor& first, std::initializer_list<const Tensor*> others = {})
      : OnDevice(op, common_device(op, first, others)) {}
  // Index -1 is the current device.
  OnDevice(const char* op, Device device)
      : op_(op),
        index_(device.index < 0 ? cuda::current_device() : device.index),
        guard_(index_),
        stream_(cuda::current_stream(index_)) {
    cuda::DeviceErrors::check(index_);  // what a kernel before this one reported
  }

  Device device() const noexcept { return {DeviceType::kCUDA, index_}; }
  int index() const noexcept { return index_; }
  cuda::Stream stream() const noexcept { return stream_; }
  // Device memory for the length of the operator; the pool is in stream order, so it may go out of scope at once.
  StorageRef scratch(std::size_t nbytes) const { return cuda::allocate(nbytes, index_); }
  // Throws when a launcher's code says that nothing was enqueued.
  void launched(int code) const {
    if (code != 0) [[unlikely]]
      cuda::throw_driver_error(code, op_);
  }
  const cuda::DeviceProperties& properties() const { return cuda::device_properties(index_); }

 private:
  // Before the driver is touched.
  static Device common_device(const char* op, const Tensor& first, std::initializer_list<const Tensor*> others) {
    for (const Tensor* other : others) {
      check(other == nullptr || other->device() == first.device(), op, ": operands are on ",
            device_name(first.device()), " and ", other == nullptr ? "" : device_name(other->device()),
            ", expected one device");
    }
    return first.device();
  }

  const char* op_;
  int index_;
  cuda::DeviceGuard guard_;
  cuda::Stream stream_;
};

inline kernels::cuda::Scalar scalar_of(DType dtype) noexcept { return static_cast<kernels::cuda::Scalar>(dtype); }
inline kernels::cuda::Scalar scalar_of(const Tensor& tensor) noexcept { return scalar_of(tensor.dtype()); }

// The iteration space over tensors that broadcast to `sizes`. Throws when it has too many dimensions.
template <int N>
kernels::cuda::Strided<N> strided(const char* op, DimSpan sizes, const Tensor* const (&tensors)[N]) {
  Dims strides[N];
  DimSpan spans[N];
  for (int n = 0; n < N; ++n) {
    const Tensor& t = *tensors[n];
    const std::size_t lead = sizes.size() - t.sizes().size();
    check(t.sizes().size() <= sizes.size(), op, ": shape ", to_string(t.sizes()), " does not broadcast to ",
          to_string(sizes));
    strides[n].resize(sizes.size());
    for (std::size_t d = lead; d < sizes.size(); ++d) {
      const std::int64_t size = t.sizes()[d - lead];
      check(size == sizes[d] || size == 1, op, ": shape ", to_string(t.sizes()), " does not broadcast to ",
            to_string(sizes));
      strides[n][d] = size == 1 ? 0 : t.strides()[d - lead];
    }
    spans[n] = strides[n];
  }
  kernels::cuda::Strided<N> space;
  check(kernels::cuda::make_strided<N>(sizes, spans, space), op, ": shape ", to_string(sizes),
        " has more dimensions than the kernels take (", kernels::cuda::kMaxDims, " after merging)");
  return space;
}

// A row-major copy, or another handle on src when it is row-major already.
TensorPtr contiguous_cuda(const Tensor& src);
// A row-major tensor of another dtype; another handle on src when there is nothing to convert or move.
TensorPtr to_dtype_cuda(const Tensor& src, DType dtype);

}  // namespace untorch::shims
