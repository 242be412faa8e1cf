// Size classes with two caches: thread-local lists for small blocks, one process-wide list for large ones.
//
// Why not malloc alone: its aligned blocks miss the per-thread cache (about 100 ns each, more when a free consolidates
// the heap), and the large ones are unmapped at every free, so that each call of a model would page-fault its
// activations in again (a third of the time of a GEMM with a 12 MiB result).
//
// Large blocks are kept as long as they and those in use are not more than were ever in use at a time, or than 64 MiB:
// a process needs no more memory than without them. `trim_host_memory` gives them back.
#include "tensor/host_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <mutex>

namespace untorch {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kCaching = false;  // exact sizes and no caching: either would hide an invalid access
#else
constexpr bool kCaching = true;
#endif

constexpr std::size_t kSmallest = kHostAlignment;
constexpr std::size_t kSmall = std::size_t{64} << 10;       // up to here: the thread's own blocks
constexpr std::size_t kLargeTotal = std::size_t{64} << 20;  // in use and kept: always allowed
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kHuge = std::size_t{4} << 20;  // from here: whole huge pages, where the system has them

std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

// The size class: powers of two, with eight steps between them from kSmall on. 0: more than can be addressed.
std::size_t capacity_of(std::size_t nbytes) {
  if (nbytes <= kSmallest) return kSmallest;
  if (nbytes > SIZE_MAX / 4) return 0;
  if (!kCaching) return round_up(nbytes, kHostAlignment);
  if (nbytes <= kSmall) return std::bit_ceil(nbytes);
  return round_up(nbytes,
                  nbytes >= kHuge ? std::max(kHugePage, std::bit_floor(nbytes) / 8) : std::bit_floor(nbytes) / 8);
}

void* allocate_new(std::size_t capacity) {
  // aligned_alloc needs a multiple of the alignment, which the size classes are.
  const bool huge = kCaching && capacity >= kHuge;
  void* const data = std::aligned_alloc(huge ? kHugePage : kHostAlignment, capacity);
  // Only a hint.
  if (data != nullptr && huge) (void)madvise(data, capacity, MADV_HUGEPAGE);
  return data;
}

// Up to eight blocks of each power of two; at most 1 MiB a thread. Plain data: still valid when the
// thread's other objects are destroyed, for arrays that are freed last.
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

// The large blocks in the order in which they were freed. The lock is only tried: a thread that finds it taken, and the
// child of a fork that copied it locked, allocate from the system.
class LargeBlocks {
 public:
  // The smallest block of at least `capacity` and at most twice that, which `capacity` then is; the latest of equals,
  // whose lines may still be in the cache.
  void* take(std::size_t& capacity) noexcept {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    void* data = nullptr;
    if (lock) {
      std::size_t best = count_;
      for (std::size_t i = count_; i-- > 0;) {
        const std::size_t size = blocks_[i].capacity;
        if (size < capacity || size > 2 * capacity || (best != count_ && size >= blocks_[best].capacity)) continue;
        best = i;
      }
      if (best != count_) {
        data = blocks_[best].data, capacity = blocks_[best].capacity;
        erase(best);
      }
    }
    const std::size_t used = used_.fetch_add(capacity, std::memory_order_relaxed) + capacity;
    std::size_t most = most_used_.load(std::memory_order_relaxed);
    while (used > most && !most_used_.compare_exchange_weak(most, used, std::memory_order_relaxed)) {
    }
    if (lock && data == nullptr) make_room(0, 0);
    return data;
  }
  // Makes room by giving the oldest blocks back.
  bool keep(void* data, std::size_t capacity) noexcept {
    used_.fetch_sub(capacity, std::memory_order_relaxed);
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) return false;
    make_room(capacity, 1);
    if (count_ == kMost || total_ + capacity + used_.load(std::memory_order_relaxed) > limit()) return false;
    blocks_[count_++] = {data, capacity};
    total_ += capacity;
    return true;
  }
  // After a take that gave nothing, and no memory elsewhere either.
  void failed(std::size_t capacity) noexcept { used_.fetch_sub(capacity, std::memory_order_relaxed); }
  // Gives all of them back, and forgets how many there were.
  void trim() noexcept {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) return;
    while (count_ > 0) drop_oldest();
    most_used_.store(used_.load(std::memory_order_relaxed), std::memory_order_relaxed);
  }

 private:
  std::size_t limit() const noexcept { return std::max(kLargeTotal, most_used_.load(std::memory_order_relaxed)); }
  void make_room(std::size_t bytes, std::size_t blocks) noexcept {
    const std::size_t used = used_.load(std::memory_order_relaxed);
    while (count_ > 0 && (count_ + blocks > kMost || used + total_ + bytes > limit())) drop_oldest();
  }
  void drop_oldest() noexcept {
    std::free(blocks_[0].data);
    erase(0);
  }
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
  static constexpr std::size_t kMost = 128;
  std::mutex mutex_;
  std::array<Block, kMost> blocks_{};
  std::size_t count_ = 0, total_ = 0;
  std::atomic<std::size_t> used_{0}, most_used_{0};  // bytes of large blocks that are not here
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
  if (void* const data = allocate_new(capacity)) return data;
  if (kCaching && capacity > kSmall) {
    large_blocks.trim();
    if (void* const data = allocate_new(capacity)) return data;
    large_blocks.failed(capacity);
  }
  return nullptr;
}

void free_host(void* data, std::size_t capacity) noexcept {
  if (kCaching && (capacity <= kSmall ? keep_small(data, capacity) : large_blocks.keep(data, capacity))) return;
  std::free(data);
}

void trim_host_memory() noexcept { large_blocks.trim(); }

TensorPtr zeros_on_demand(DimSpan sizes, DType dtype) {
  constexpr std::size_t kSmallestMapping = std::size_t{1} << 20;
  const std::size_t itemsize = element_size(dtype);
  const std::int64_t numel = checked_numel(sizes);
  std::size_t nbytes = 0;
  check(!__builtin_mul_overflow(static_cast<std::size_t>(numel), itemsize, &nbytes), "shape ", to_string(sizes),
        " needs too much memory");
  if (nbytes < kSmallestMapping) return Tensor::zeros(sizes, dtype);
  void* const data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    throw_error(ErrorKind::kOutOfMemory, "out of memory: could not allocate ", nbytes, " bytes");
  }
  if (kCaching && nbytes >= kHuge) (void)madvise(data, nbytes, MADV_HUGEPAGE);
  const Storage::Deleter unmap = [](void* memory, void* length) noexcept {
    (void)munmap(memory, reinterpret_cast<std::size_t>(length));
  };
  StorageRef storage(new Storage(data, nbytes, {}, unmap, reinterpret_cast<void*>(nbytes)));
  return std::make_unique<Tensor>(std::move(storage), 0, dtype, sizes, contiguous_strides(sizes));
}

}  // namespace untorch
