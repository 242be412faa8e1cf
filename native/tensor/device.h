// The device table: allocation, copies and zero fill of a device other than the CPU. native/cuda registers CUDA's; the
// tensor itself knows no device library.
#pragma once

#include "tensor/tensor.h"

namespace untorch {

struct DeviceTable {
  // Uninitialised memory for work on the device's current stream. Index -1 is the current device.
  StorageRef (*allocate)(std::size_t nbytes, Device device);
  // dst[i] = dtype(src[i]), src broadcasting to dst's shape; either may be on the CPU. On the current stream; with the
  // CPU on one side it returns when that side may be used again.
  void (*copy)(const Tensor& dst, const Tensor& src);
  // Every byte of `nbytes` at `data` becomes 0.
  void (*zero)(void* data, std::size_t nbytes, Device device);
  // Bytes between any two memories of the device or the CPU, as they are.
  void (*copy_bytes)(void* dst, Device dst_device, const void* src, Device src_device, std::size_t nbytes);
};

// Called once, when the library is loaded.
void register_device(DeviceType type, const DeviceTable& table) noexcept;
// Throws kUnsupported when this build has no such device.
const DeviceTable& device_table(DeviceType type);

}  // namespace untorch
