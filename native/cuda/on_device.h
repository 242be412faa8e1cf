// The device and stream that an operator runs on.
#pragma once

#include <initializer_list>

#include "cuda/device.h"
#include "cuda/device_error.h"
#include "cuda/memory_pool.h"
#include "cuda/stream.h"
#include "tensor/tensor.h"

namespace untorch {

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
  // Where kernels report values that only they can see, such as an index out of range.
  kernels::cuda::FaultWord* faults() const { return cuda::DeviceErrors::word(index_); }
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

}  // namespace untorch
