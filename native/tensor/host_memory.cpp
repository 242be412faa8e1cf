// Size classes with two caches: thread-local lists for small blocks, one process-wide list for large ones.
//
// Why not malloc alone: its aligned blocks miss the per-thread cache (about 100 ns each, more when a free consolidates
// the heap), and the large ones are unmapped at every free, so that each call of a model would page-fault its
// activations in again (a third of the time of a GEMM with a 12 MiB result).
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
constexpr bool kCaching = false;  // exact sizes and no caching: either would hide an invalid access
#else
constexpr bool kCaching = true;
#endif

constexpr std::size_t kSmallest = kHostAlignment;
constexpr std::size_t kSmall = std::size_t{64} << 10;       // up to here: the thread's own blocks
constexpr std::size_t kLargeTotal = std::size_t{64} << 20;  // cached by the process
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
