// The registry of device tables, and the tensor operations that dispatch through it.
#include "tensor/device.h"

#include <cstring>

#include "tensor/copy.h"

namespace untorch {
namespace {

const DeviceTable* cuda_table = nullptr;

}  // namespace

void register_device(DeviceType type, const DeviceTable& table) noexcept {
  if (type == DeviceType::kCUDA) cuda_table = &table;
}

const DeviceTable& device_table(DeviceType type) {
  if (type == DeviceType::kCUDA && cuda_table != nullptr) return *cuda_table;
  throw_error(ErrorKind::kUnsupported, "cannot work on ", device_name({type, -1}),
              ": this build of untorch does not serve that device");
}

void copy(const Tensor& dst, const Tensor& src) {
  const DeviceType to = dst.device().type, from = src.device().type;
  if (to == DeviceType::kCPU && from == DeviceType::kCPU) {
    copy_cpu(dst, src);
  } else {
    device_table(to != DeviceType::kCPU ? to : from).copy(dst, src);
  }
}

void copy_bytes(void* dst, Device dst_device, const void* src, Device src_device, std::size_t nbytes) {
  const DeviceType to = dst_device.type, from = src_device.type;
  if (to == DeviceType::kCPU && from == DeviceType::kCPU) {
    std::memcpy(dst, src, nbytes);
  } else {
    device_table(to != DeviceType::kCPU ? to : from).copy_bytes(dst, dst_device, src, src_device, nbytes);
  }
}

TensorPtr clone_contiguous(const Tensor& src) {
  TensorPtr out = Tensor::empty(src.sizes(), src.dtype(), src.device());
  copy(*out, src);
  return out;
}

TensorPtr contiguous(const Tensor& src) {
  return src.is_contiguous() ? std::make_unique<Tensor>(src) : clone_contiguous(src);
}

TensorPtr to_dtype(const Tensor& src, DType dtype) {
  if (src.dtype() == dtype) return contiguous(src);
  TensorPtr out = Tensor::empty(src.sizes(), dtype, src.device());
  copy(*out, src);
  return out;
}

TensorPtr Tensor::zeros(DimSpan sizes, DType dtype, Device device) {
  TensorPtr out = empty(sizes, dtype, device);
  if (device.type == DeviceType::kCPU) {
    std::memset(out->raw(), 0, out->storage()->nbytes());
  } else {
    device_table(device.type).zero(out->raw(), out->storage()->nbytes(), out->device());
  }
  return out;
}

}  // namespace untorch
