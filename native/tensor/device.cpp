// The registry of devices.
#include "tensor/device.h"

#include <cstring>

#include "tensor/copy.h"

namespace untorch {
namespace {

const DeviceHooks* cuda_hooks = nullptr;

}  // namespace

void register_device(DeviceType type, const DeviceHooks& hooks) noexcept {
  if (type == DeviceType::kCUDA) cuda_hooks = &hooks;
}

const DeviceHooks& device_hooks(DeviceType type) {
  if (type == DeviceType::kCUDA && cuda_hooks != nullptr) return *cuda_hooks;
  throw_error(ErrorKind::kUnsupported, "cannot work on ", device_name({type, -1}),
              ": this build of untorch does not serve that device");
}

void copy(const Tensor& dst, const Tensor& src) {
  const DeviceType to = dst.device().type, from = src.device().type;
  if (to == DeviceType::kCPU && from == DeviceType::kCPU) {
    copy_cpu(dst, src);
  } else {
    device_hooks(to != DeviceType::kCPU ? to : from).copy(dst, src);
  }
}

TensorPtr zeros(DimSpan sizes, DType dtype, Device device) {
  TensorPtr out = Tensor::empty(sizes, dtype, device);
  if (device.type == DeviceType::kCPU) {
    std::memset(out->raw(), 0, out->storage()->nbytes());
  } else {
    device_hooks(device.type).zero(out->raw(), out->storage()->nbytes(), out->device());
  }
  return out;
}

}  // namespace untorch
