// H2D and D2H copies: small tensors are staged in pinned memory, which is quicker to enqueue; large ones by the driver.
#include "cuda/transfer.h"

#include <cstring>

#include "cuda/device.h"
#include "cuda/device_error.h"
#include "cuda/memory_pool.h"
#include "cuda/pinned_pool.h"
#include "cuda/stream.h"
#include "tensor/copy.h"
#include "tensor/device.h"

namespace untorch::cuda {
namespace {

constexpr std::size_t kStaged = 256u << 10;

bool is_dense(const Tensor& t) { return t.numel() == storage_extent(t.sizes(), t.strides()); }
std::size_t bytes_of(const Tensor& t) { return static_cast<std::size_t>(t.numel()) * element_size(t.dtype()); }

bool is_pinned(const void* data) {
  unsigned type = 0;
  return driver().pointer_attribute(&type, kPointerMemoryType, reinterpret_cast<DevicePtr>(data)) == kSuccess;
}

// Dense bytes to the device.
void send(void* to, const void* from, std::size_t nbytes, int device) {
  if (nbytes == 0) return;
  const Driver& api = driver();
  const Stream stream = current_stream(device);
  const auto address = reinterpret_cast<DevicePtr>(to);
  if (nbytes <= kStaged) {
    const StorageRef staged = allocate_pinned(nbytes, device);
    std::memcpy(staged->data(), from, nbytes);
    check_driver(api.memcpy_h2d_async(address, staged->data(), nbytes, stream), "copying an input to the device");
    return;
  }
  check_driver(api.memcpy_h2d_async(address, from, nbytes, stream), "copying an input to the device");
  // The driver has read pageable memory when it returns; pinned memory it reads when the stream gets there.
  if (is_pinned(from)) check_driver(api.stream_synchronize(stream), "copying an input to the device");
}

}  // namespace

TensorPtr to_device(const Tensor& source, int device) {
  const Device target{DeviceType::kCUDA, device};
  TensorPtr out = is_dense(source) ? Tensor::empty_strided(source.sizes(), source.strides(), source.dtype(), target)
                                   : Tensor::empty(source.sizes(), source.dtype(), target);
  to_device(*out, source);
  return out;
}

void to_device(const Tensor& destination, const Tensor& source) {
  const int device = destination.device().index;
  if (destination.strides() == source.strides() && is_dense(source)) {
    send(destination.raw(), source.raw(), bytes_of(source), device);
    return;
  }
  // Into the destination's layout on the CPU first, then one run of bytes.
  check(is_dense(destination), "cannot copy into strided memory on the device");
  const TensorPtr laid_out = Tensor::empty_strided(destination.sizes(), destination.strides(), destination.dtype());
  copy_cpu(*laid_out, source);
  send(destination.raw(), laid_out->raw(), bytes_of(*laid_out), device);
}

TensorPtr to_host(const Tensor& source) {
  const int device = source.device().index;
  const DeviceGuard guard(device);
  const Driver& api = driver();
  if (!is_dense(source)) {
    const TensorPtr dense = Tensor::empty(source.sizes(), source.dtype(), source.device());
    copy(*dense, source);
    return to_host(*dense);
  }
  const Stream stream = current_stream(device);
  TensorPtr out = Tensor::empty_strided(source.sizes(), source.strides(), source.dtype());
  const std::size_t nbytes = bytes_of(source);
  if (nbytes == 0) return out;
  const auto address = reinterpret_cast<DevicePtr>(source.raw());
  if (nbytes <= kStaged) {
    const StorageRef staged = allocate_pinned(nbytes, device);
    check_driver(api.memcpy_d2h_async(staged->data(), address, nbytes, stream), "copying an output to the CPU");
    check_driver(api.stream_synchronize(stream), "waiting for the outputs");
    DeviceErrors::check(device);
    std::memcpy(out->raw(), staged->data(), nbytes);
    return out;
  }
  check_driver(api.memcpy_d2h_async(out->raw(), address, nbytes, stream), "copying an output to the CPU");
  check_driver(api.stream_synchronize(stream), "waiting for the outputs");
  DeviceErrors::check(device);
  return out;
}

TensorPtr to_host_async(const Tensor& source) {
  const int device = source.device().index;
  const DeviceGuard guard(device);
  if (!is_dense(source)) {
    const TensorPtr dense = Tensor::empty(source.sizes(), source.dtype(), source.device());
    copy(*dense, source);
    return to_host_async(*dense);
  }
  const std::size_t nbytes = bytes_of(source);
  StorageRef pinned = allocate_pinned(nbytes, device);
  if (nbytes != 0) {
    check_driver(driver().memcpy_d2h_async(pinned->data(), reinterpret_cast<DevicePtr>(source.raw()), nbytes,
                                           current_stream(device)),
                 "copying an output to the CPU");
  }
  return std::make_unique<Tensor>(std::move(pinned), 0, source.dtype(), source.sizes(), source.strides());
}

}  // namespace untorch::cuda
