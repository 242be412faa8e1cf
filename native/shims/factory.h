// The dtype, layout and device arguments of operators that make a tensor.
#pragma once

#include "shims/op.h"

// These arguments in a C function's signature, and as UNTORCH_OP hands them on. Memory is never pinned.
#define UNTORCH_FACTORY \
  std::int32_t *dtype, std::int32_t *layout, std::int32_t *device, std::int32_t device_index, std::int32_t *
#define UNTORCH_FACTORY_ARGUMENTS dtype, layout, device, device_index, nullptr

namespace untorch::shims {

struct Factory {
  std::int32_t *dtype, *layout, *device;
  std::int32_t device_index;

  // The dtype, once everything is checked: a known dtype, strided, on the operator's device.
  DType checked(const Op &op, DType fallback) const {
    if (layout != nullptr && *layout != 0) {
      throw_error(ErrorKind::kUnsupported, op, ": layout code ", *layout, " is not supported, expected strided (0)");
    }
    if (device != nullptr && *device != static_cast<std::int32_t>(op.device)) {
      throw_error(ErrorKind::kUnsupported, op, ": argument 'device' is ",
                  device_name({static_cast<DeviceType>(*device), -1}), ", expected ", op.on_cuda() ? "cuda" : "cpu");
    }
    const DType wanted = dtype_or(dtype, fallback);
    check(is_known(wanted), op, ": unknown dtype code ", static_cast<std::int32_t>(wanted));
    return wanted;
  }
  Device where(const Op &op) const noexcept {
    return op.on_cuda() ? Device{op.device, device == nullptr ? -1 : device_index} : Device{};
  }
};

}  // namespace untorch::shims
