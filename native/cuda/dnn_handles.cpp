// Hands cuDNN's handles out.
#include "cuda/dnn_handles.h"

namespace untorch::cuda::dnn {

std::size_t KeyHash::operator()(const Key& key) const noexcept {
  std::uint64_t hash = 0;
  for (const std::int64_t value : key) {
    hash = (hash ^ static_cast<std::uint64_t>(value)) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  }
  return static_cast<std::size_t>(hash);
}

void HandleState::use_stream(Stream wanted) {
  if (has_stream && stream == wanted) return;
  check_status(functions().set_stream(handle, wanted), "cudnnSetStream");
  stream = wanted;
  has_stream = true;
}

HandlePool<HandleState>::Lease take_handle(int device) {
  static auto& pool = *new HandlePool<HandleState>;
  return pool.take(device, [] {
    auto made = std::make_unique<HandleState>();
    check_status(functions().create(&made->handle), "cudnnCreate");
    return made;
  });
}

}  // namespace untorch::cuda::dnn
