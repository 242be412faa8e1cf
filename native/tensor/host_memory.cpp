// Free blocks in two places: small ones with the thread that freed them, large ones for the whole process.
//
// Why not malloc alone: its aligned blocks miss the per-thread cache (about 100 ns each, more when a free consolidates
// the heap), and the large ones go back to the system at every free, so that each call of a model would fault its
// activations in again page by page (a third of a 12 MiB matrix product's time).
#include "tensor/host_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <mutex>

namespace untorch {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kCaching = false;  // exact sizes, and no block that is kept: either would hide a wrong access
#else
constexpr bool kCaching = true;
#endif

constexpr std::size_t kSmallest = kHostAlignment;
constexpr std::size_t kSmall = std::size_t{64} << 10;       // up to here: the thread's own blocks
constexpr std::size_t kLargeTotal = std::size_t{64} << 20;  // kept by the process
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kHuge = std::size_t{4} << 20;  // from here: whole huge pages, where the system has them

std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

// The size that a block really gets, so that blocks fit again: powers of two, and eight steps between them from
// kSmall on. 0: more than there can be.
std::size_t capacity_of(std::size_t nbytes) {
  if (nbytes <= kSmallest) return kSmallest;
  if (nbytes > SIZE_MAX / 4) return 0;
  if (!kCaching) return round_up(nbytes, kHostAlignment);
  if (nbytes <= kSmall) return std::bit_ceil(nbytes);
  return round_up(nbytes,
                  nbytes >= kHuge ? std::max(kHugePage, std::bit_floor(nbytes) / 8) : std::bit_floor(nbytes) / 8);
}

void* allocate_new(std::size_t capacity) {
  // aligned_alloc wants whole multiples of the alignment, which only the rounded sizes are.
  const bool huge = kCaching && capacity >= kHuge;
  void* const data = std::aligned_alloc(huge ? kHugePage : kHostAlignment, capacity);
  // Only a hint: where it is refused, the pages are small.
  if (data != nullptr && huge) (void)madvise(data, capacity, MADV_HUGEPAGE);
  return data;
}

// Up to eight blocks of each power of two; at most 1 MiB a thread. Plain data: it can still be looked at when the
// thread's other objects are gone, by arrays that are freed at the very end.
struct ThreadBlocks {
  static constexpr std::size_t kClasses = 11, kEach = 8;
  void* blocks[kClasses][kEach];
  std::uint8_t count[kClasses];
  bool owned, closed;
};
thread_local constinit ThreadBlocks thread_blocks{};

struct ThreadBlocksOwner {
  ThreadBlocksOwner() noexcept { thread_blocks.owned = true; }
  ~ThreadBlocksOwner() {
    thread_blocks.closed = true;
    for (std::size_t c = 0; c < ThreadBlocks::kClasses; ++c) {
      while (thread_blocks.count[c] > 0) std::free(thread_blocks.blocks[c][--thread_blocks.count[c]]);
    }
  }
  void touch() noexcept {}
};
thread_local ThreadBlocksOwner thread_blocks_owner;

std::size_t class_of(std::size_t capacity) { return static_cast<std::size_t>(std::countr_zero(capacity / kSmallest)); }

void* take_small(std::size_t capacity) noexcept {
  ThreadBlocks& own = thread_blocks;
  const std::size_t c = class_of(capacity);
  return own.count[c] == 0 ? nullptr : own.blocks[c][--own.count[c]];
}

bool keep_small(void* data, std::size_t capacity) noexcept {
  ThreadBlocks& own = thread_blocks;
  const std::size_t c = class_of(capacity);
  if (own.closed || own.count[c] == ThreadBlocks::kEach) return false;
  if (!own.owned) thread_blocks_owner.touch();
  own.blocks[c][own.count[c]++] = data;
  return true;
}

// The large blocks in the order in which they were freed. Nobody waits for the lock: whoever finds it taken, or the
// child of a fork that copied it locked, goes to the system.
class LargeBlocks {
 public:
  void* take(std::size_t capacity) noexcept {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) return nullptr;
    for (std::size_t i = count_; i-- > 0;) {
      if (blocks_[i].capacity != capacity) continue;
      void* const data = blocks_[i].data;
      erase(i);
      return data;
    }
    return nullptr;
  }
  // Makes room by giving the oldest blocks back.
  bool keep(void* data, std::size_t capacity) noexcept {
    if (capacity > kLargeTotal) return false;
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) return false;
    while (count_ == kMost || total_ + capacity > kLargeTotal) {
      std::free(blocks_[0].data);
      erase(0);
    }
    blocks_[count_++] = {data, capacity};
    total_ += capacity;
    return true;
  }

 private:
  struct Block {
    void* data;
    std::size_t capacity;
  };
  void erase(std::size_t i) noexcept {
    total_ -= blocks_[i].capacity;
    std::copy(blocks_.begin() + static_cast<std::ptrdiff_t>(i) + 1,
              blocks_.begin() + static_cast<std::ptrdiff_t>(count_), blocks_.begin() + static_cast<std::ptrdiff_t>(i));
    --count_;
  }
  static constexpr std::size_t kMost = 64;
  std::mutex mutex_;
  std::array<Block, kMost> blocks_{};
  std::size_t count_ = 0, total_ = 0;
};
// Never destroyed: arrays may be freed after the end of main.
constinit LargeBlocks large_blocks;

}  // namespace

void* allocate_host(std::size_t nbytes, std::size_t& capacity) noexcept {
  capacity = capacity_of(nbytes);
  if (capacity == 0) return nullptr;
  if (kCaching) {
    if (void* const data = capacity <= kSmall ? take_small(capacity) : large_blocks.take(capacity)) return data;
  }
  return allocate_new(capacity);
}

void free_host(void* data, std::size_t capacity) noexcept {
  if (kCaching && (capacity <= kSmall ? keep_small(data, capacity) : large_blocks.keep(data, capacity))) return;
  std::free(data);
}

}  // namespace untorch
