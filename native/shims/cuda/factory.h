// The dtype, layout and device arguments of operators that make a tensor on the GPU.
#pragma once

#include "shims/cuda/shim.h"

namespace untorch::shims {

struct Factory {
  std::int32_t *dtype, *layout, *device;
  std::int32_t device_index;

  // The dtype, once everything is checked: a known dtype, strided, on a GPU.
  DType checked(const char* op, DType fallback) const {
    if (layout != nullptr && *layout != 0) {
      throw_error(ErrorKind::kUnsupported, op, ": layout code ", *layout, " is not supported, expected strided (0)");
    }
    if (device != nullptr && *device != static_cast<std::int32_t>(DeviceType::kCUDA)) {
      throw_error(ErrorKind::kUnsupported, op, ": argument 'device' is ",
                  device_name({static_cast<DeviceType>(*device), -1}), ", expected cuda");
    }
    const DType wanted = dtype_or(dtype, fallback);
    check(is_known(wanted), op, ": unknown dtype code ", static_cast<std::int32_t>(wanted));
    return wanted;
  }
  Device where() const noexcept { return {DeviceType::kCUDA, device == nullptr ? -1 : device_index}; }
};

}  // namespace untorch::shims
