// The block is laid out when a graph is captured, and staged in pinned memory at a call.
#include "model/packed_inputs.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "cuda/device_error.h"
#include "cuda/memory_pool.h"
#include "cuda/pinned_pool.h"
#include "cuda/stream.h"
#include "tensor/copy.h"

namespace untorch {
namespace {

constexpr std::size_t kLargest = 16u << 10;  // bytes of an input; larger ones take longer than their launch
constexpr std::size_t kAlignment = 64;

}  // namespace

PackedInputs::PackedInputs(std::span<const std::size_t> bytes, int device)
    : places_(bytes.size(), kElsewhere), bytes_(bytes.begin(), bytes.end()), device_(device) {
  std::size_t total = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] == 0 || bytes[i] > kLargest) continue;
    places_[i] = total;
    total += (bytes[i] + kAlignment - 1) / kAlignment * kAlignment;
  }
  if (total > 0) block_ = cuda::allocate(total, device);
}

StorageRef PackedInputs::storage(std::size_t input) const {
  auto keep = std::make_unique<StorageRef>(block_);
  StorageRef part(new Storage(
      static_cast<std::byte*>(block_->data()) + places_[input], bytes_[input], block_->device(),
      [](void*, void* context) noexcept { delete static_cast<StorageRef*>(context); }, keep.get()));
  (void)keep.release();
  return part;
}

void PackedInputs::send(std::span<const Source> sources) const {
  std::size_t first = kElsewhere, end = 0;
  for (const Source& source : sources) {
    first = std::min(first, places_[source.input]);
    end = std::max(end, places_[source.input] + bytes_[source.input]);
  }
  if (first >= end) return;
  const StorageRef staged = cuda::allocate_pinned(end - first, device_);
  for (const Source& source : sources) {
    std::byte* const to = static_cast<std::byte*>(staged->data()) + (places_[source.input] - first);
    const Tensor& own = *source.own;
    const Tensor laid_out(StorageRef::borrow(to, bytes_[source.input], Device{}), 0, own.dtype(), own.sizes(),
                          own.strides());
    copy_cpu(laid_out, *source.given);
  }
  const auto address = reinterpret_cast<cuda::DevicePtr>(block_->data()) + first;
  cuda::check_driver(
      cuda::driver().memcpy_h2d_async(address, staged->data(), end - first, cuda::current_stream(device_)),
      "copying inputs to the device");
}

}  // namespace untorch
