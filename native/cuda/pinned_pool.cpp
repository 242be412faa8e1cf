#include "cuda/pinned_pool.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/device.h"
#include "cuda/size_class.h"
#include "cuda/stream.h"

namespace untorch::cuda {
namespace {

// Pinned blocks and the event after their last use.
struct PinnedBlock {
  void* data = nullptr;
  std::size_t bytes = 0;
  int device = 0;
  Event done = nullptr;
};

class PinnedPool {
 public:
  PinnedBlock* take(std::size_t nbytes, int device) {
    const std::size_t bytes = size_class(std::max<std::size_t>(nbytes, 1)).bytes;
    {
      const std::lock_guard lock(mutex_);
      for (auto it = free_.begin(); it != free_.end(); ++it) {
        PinnedBlock* const block = *it;
        if (block->bytes != bytes || block->device != device) continue;
        if (driver().event_query(block->done) != kSuccess) continue;
        free_.erase(it);
        return block;
      }
    }
    const RelaxedCapture relaxed;
    auto block = std::make_unique<PinnedBlock>();
    block->bytes = bytes;
    block->device = device;
    if (driver().mem_host_alloc(&block->data, bytes, kHostAllocPortable) != kSuccess) return nullptr;
    if (driver().event_create(&block->done, kEventDisableTiming) != kSuccess) {
      (void)driver().mem_host_free(block->data);
      return nullptr;
    }
    return block.release();
  }
  void put(PinnedBlock* block) noexcept {
    const DeviceGuard guard(block->device);
    // Work that was given to this thread's stream may still read it.
    const Stream stream = current_stream(block->device);
    if (!is_capturing(stream)) (void)driver().event_record(block->done, stream);
    const std::lock_guard lock(mutex_);
    free_.push_back(block);
  }
  static PinnedPool& instance() {
    static auto& made = *new PinnedPool;
    return made;
  }

 private:
  std::mutex mutex_;
  std::vector<PinnedBlock*> free_;
};

}  // namespace

StorageRef allocate_pinned(std::size_t nbytes, int device) {
  const DeviceGuard guard(device);
  PinnedBlock* const block = PinnedPool::instance().take(nbytes, device);
  if (block == nullptr) {
    throw_error(ErrorKind::kOutOfMemory, "out of pinned host memory: could not pin ", gib(nbytes));
  }
  return StorageRef(new Storage(
      block->data, nbytes, Device{},
      [](void*, void* context) noexcept { PinnedPool::instance().put(static_cast<PinnedBlock*>(context)); }, block));
}

}  // namespace untorch::cuda
