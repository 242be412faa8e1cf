// Size classes with free lists: eight classes an octave, so that internal fragmentation is at most an eighth; blocks of
// up to 1 MiB are split from 2 MiB slabs, larger ones are driver allocations of their own.
#include "cuda/memory_pool.h"

#include <algorithm>
#include <array>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "cuda/device.h"
#include "cuda/size_class.h"
#include "cuda/stream.h"

namespace untorch::cuda {
namespace {

constexpr std::size_t kSmallLimit = 1u << 20;  // up to here blocks are split from slabs
constexpr std::size_t kSlabBytes = 2u << 20;
constexpr std::size_t kNumClasses = 8 * 48;

struct Slab {
  DevicePtr base = 0;
  std::size_t used = 0;  // bytes split off so far
  std::size_t live = 0;  // blocks that tensors hold
};

struct Block {
  Arena* arena = nullptr;
  DevicePtr base = 0;
  std::size_t bytes = 0;
  std::size_t class_index = 0;
  Slab* slab = nullptr;  // null: from the driver
};

}  // namespace

class Arena {
 public:
  Arena(int device, std::uint64_t key) : device_(device), key_(key) {}

  int device() const noexcept { return device_; }
  std::uint64_t key() const noexcept { return key_; }

  // Null when the driver has no memory left.
  Block* take(std::size_t nbytes);
  void put(Block* block) noexcept;
  void release_unused() noexcept;
  MemoryUse use() const {
    const std::lock_guard lock(mutex_);
    return {in_use_, reserved_};
  }
  // The graph is destroyed: no replay writes into the blocks any more. Called where CUDA calls are forbidden.
  void retire() noexcept { retired_.store(true, std::memory_order_release); }
  bool retired() const noexcept { return retired_.load(std::memory_order_acquire); }
  // Larger blocks serve a request for which there is none of its size.
  void take_larger(bool takes) {
    const std::lock_guard lock(mutex_);
    takes_larger_ = takes;
  }
  // Logs allocations from now on, in order, so that two captures of one call can be compared.
  void start_log() {
    const std::lock_guard lock(mutex_);
    logging_ = true;
    log_.clear();
  }
  std::vector<AllocationRecord> log() const {
    const std::lock_guard lock(mutex_);
    return log_;
  }
  bool idle() const {
    const std::lock_guard lock(mutex_);
    return in_use_ == 0;
  }

 private:
  int device_;
  std::uint64_t key_;
  mutable std::mutex mutex_;
  std::array<std::vector<Block*>, kNumClasses> free_{};
  std::deque<Slab> slabs_;
  std::deque<Block> blocks_;   // stable addresses
  std::vector<Block*> blank_;  // entries of blocks_ without memory
  std::size_t in_use_ = 0, reserved_ = 0;
  std::atomic<bool> retired_{false};
  bool logging_ = false, takes_larger_ = false;
  std::vector<AllocationRecord> log_;

  Block* blank() {
    if (blank_.empty()) return &blocks_.emplace_back();
    Block* const block = blank_.back();
    blank_.pop_back();
    return block;
  }
};

Block* Arena::take(std::size_t nbytes) {
  const SizeClass wanted = size_class(nbytes);
  if (wanted.index >= kNumClasses) return nullptr;
  const std::lock_guard lock(mutex_);
  std::size_t index = wanted.index;
  if (takes_larger_ && wanted.bytes > kSmallLimit) {
    while (index + 1 < kNumClasses && free_[index].empty()) ++index;
    if (free_[index].empty()) index = wanted.index;
  }
  auto& list = free_[index];
  Block* block = nullptr;
  if (!list.empty()) {
    block = list.back();
    list.pop_back();
  } else if (wanted.bytes <= kSmallLimit) {
    if (slabs_.empty() || slabs_.back().used + wanted.bytes > kSlabBytes) {
      const RelaxedCapture relaxed;
      DevicePtr base = 0;
      if (driver().mem_alloc(&base, kSlabBytes) != kSuccess) return nullptr;
      slabs_.push_back({base, 0, 0});
      reserved_ += kSlabBytes;
    }
    Slab& slab = slabs_.back();
    block = blank();
    *block = {this, slab.base + slab.used, wanted.bytes, wanted.index, &slab};
    slab.used += wanted.bytes;
  } else {
    const RelaxedCapture relaxed;
    DevicePtr base = 0;
    if (driver().mem_alloc(&base, wanted.bytes) != kSuccess) return nullptr;
    block = blank();
    *block = {this, base, wanted.bytes, wanted.index, nullptr};
    reserved_ += wanted.bytes;
  }
  if (block->slab != nullptr) ++block->slab->live;
  in_use_ += block->bytes;
  if (logging_) log_.push_back({block->base, block->bytes});
  return block;
}

void Arena::put(Block* block) noexcept {
  const std::lock_guard lock(mutex_);
  if (block->slab != nullptr) --block->slab->live;
  in_use_ -= block->bytes;
  free_[block->class_index].push_back(block);
}

void Arena::release_unused() noexcept {
  const std::lock_guard lock(mutex_);
  for (auto& list : free_) {
    std::erase_if(list, [&](Block* block) {
      if (block->slab != nullptr && block->slab->live != 0) return false;
      if (block->slab == nullptr) {
        (void)driver().mem_free(block->base);
        reserved_ -= block->bytes;
      }
      blank_.push_back(block);
      return true;
    });
  }
  for (Slab& slab : slabs_) {
    if (slab.live != 0 || slab.base == 0) continue;
    (void)driver().mem_free(slab.base);
    reserved_ -= kSlabBytes;
    slab = {0, kSlabBytes, 0};  // full: nothing more is split from it
  }
  while (!slabs_.empty() && slabs_.back().base == 0) slabs_.pop_back();
}

namespace {

// The arenas of one device.
class DevicePool {
 public:
  explicit DevicePool(int device) : device_(device) {}

  Arena& of_stream(Stream stream) {
    // A stream's ID is never reused, its handle is.
    unsigned long long id = 0;
    check_driver(driver().stream_id(stream, &id), "asking for a stream's id");
    return find(id * 2);
  }

  Arena& of_capture(Stream stream) {
    int status = 0;
    std::uint64_t id = 0;
    Graph graph = nullptr;
    const GraphNode* dependencies = nullptr;
    std::size_t count = 0;
    check_driver(driver().capture_info(stream, &status, &id, &graph, &dependencies, &count), "asking for a capture");
    const std::uint64_t key = id * 2 + 1;
    {
      const std::lock_guard lock(mutex_);
      if (const auto it = arenas_.find(key); it != arenas_.end()) return *it->second;
    }
    auto arena = std::make_shared<Arena>(device_, key);
    // The graph keeps the arena's blocks from other use as long as it or an executable made from it lives.
    auto keep = std::make_unique<std::shared_ptr<Arena>>(arena);
    UserObject object = nullptr;
    check_driver(driver().user_object_create(
                     &object, keep.get(),
                     [](void* data) {
                       const std::unique_ptr<std::shared_ptr<Arena>> held(static_cast<std::shared_ptr<Arena>*>(data));
                       (*held)->retire();
                     },
                     1, kUserObjectNoDestructorSync),
                 "making a user object");
    (void)keep.release();
    check_driver(driver().graph_retain_user_object(graph, object, 1, kGraphUserObjectMove),
                 "giving a graph its memory");
    const std::lock_guard lock(mutex_);
    arenas_.emplace(key, arena);
    return *arena;
  }

  std::shared_ptr<Arena> make_private(bool recycled) {
    static std::atomic<std::uint64_t> serial{0};
    if (recycled) {
      const std::lock_guard lock(mutex_);
      if (!spare_.empty()) {
        std::shared_ptr<Arena> arena = std::move(spare_.back());
        spare_.pop_back();
        arenas_.emplace(arena->key(), arena);
        return arena;
      }
    }
    // Far above any stream's ID.
    auto arena = std::make_shared<Arena>(device_, (std::uint64_t{1} << 63) + serial.fetch_add(1));
    const std::lock_guard lock(mutex_);
    arenas_.emplace(arena->key(), arena);
    return arena;
  }

  void recycle(std::shared_ptr<Arena> arena) {
    const std::lock_guard lock(mutex_);
    if (!arena->idle()) return;
    arenas_.erase(arena->key());
    spare_.push_back(std::move(arena));
  }

  MemoryUse use() {
    MemoryUse total;
    const std::lock_guard lock(mutex_);
    for (const auto& arena : spare_) total.reserved += arena->use().reserved;
    for (const auto& [key, arena] : arenas_) {
      const MemoryUse use = arena->use();
      total.in_use += use.in_use;
      total.reserved += use.reserved;
    }
    return total;
  }

  void release_unused() {
    const DeviceGuard guard(device_);
    (void)driver().context_synchronize();
    release(true);
  }

  void release_gone_graphs() {
    const DeviceGuard guard(device_);
    release(false);  // freeing memory waits for the work that may use it
  }

 private:
  int device_;
  std::mutex mutex_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Arena>> arenas_;
  std::vector<std::shared_ptr<Arena>> spare_;  // of graphs that were never launched, idle

  void release(bool streams_too) {
    const std::lock_guard lock(mutex_);
    for (const auto& arena : spare_) arena->release_unused();
    spare_.clear();
    for (auto it = arenas_.begin(); it != arenas_.end();) {
      // A graph's arena keeps everything until the graph is destroyed.
      const bool of_graph = (it->first & 1) != 0 || it->first >> 63 != 0;
      const bool gone = of_graph && (it->second->retired() || it->second.use_count() == 1);
      if (gone || (streams_too && !of_graph)) it->second->release_unused();
      if (gone && it->second->idle()) {
        it = arenas_.erase(it);
      } else {
        ++it;
      }
    }
  }

  Arena& find(std::uint64_t key) {
    const std::lock_guard lock(mutex_);
    auto& arena = arenas_[key];
    if (!arena) arena = std::make_shared<Arena>(device_, key);
    return *arena;
  }
};

DevicePool& pool(int device) {
  static std::mutex mutex;
  static auto& pools = *new std::deque<std::unique_ptr<DevicePool>>;  // blocks may be freed by static destructors
  const auto index = static_cast<std::size_t>(device);
  const std::lock_guard lock(mutex);
  while (pools.size() <= index) pools.push_back(std::make_unique<DevicePool>(static_cast<int>(pools.size())));
  return *pools[index];
}

// The arena that a thread used last, so that a run of allocations needs no lookup.
struct Recent {
  Arena* forced = nullptr;  // by an ArenaScope
  int forced_device = -1;
};
thread_local Recent recent;

[[noreturn]] void out_of_memory(std::size_t nbytes, int device) {
  std::size_t free_bytes = 0, total = 0;
  (void)driver().mem_info(&free_bytes, &total);
  const MemoryUse use = memory_use(device);
  throw_error(ErrorKind::kOutOfMemory, "out of memory on cuda:", device, ": asked for ", gib(nbytes), ", free are ",
              gib(free_bytes), " of ", gib(total), "; untorch's tensors hold ", gib(use.in_use), ", ",
              gib(use.reserved - std::min(use.in_use, use.reserved)), " are kept for reuse");
}

StorageRef wrap_block(Block* block, std::size_t nbytes, int device) {
  return StorageRef(new Storage(
      reinterpret_cast<void*>(block->base), nbytes, {DeviceType::kCUDA, device},
      [](void*, void* context) noexcept {
        auto* const held = static_cast<Block*>(context);
        held->arena->put(held);
      },
      block));
}

}  // namespace

Arena& arena_for(int device, Stream stream) {
  return is_capturing(stream) ? pool(device).of_capture(stream) : pool(device).of_stream(stream);
}

std::shared_ptr<Arena> make_private_arena(int device, bool recycled) { return pool(device).make_private(recycled); }
void take_larger_blocks(Arena& arena, bool takes) { arena.take_larger(takes); }
void recycle_private_arena(int device, std::shared_ptr<Arena> arena) { pool(device).recycle(std::move(arena)); }
void release_gone_graphs(int device) { pool(device).release_gone_graphs(); }
void start_log(Arena& arena) { arena.start_log(); }
std::vector<AllocationRecord> allocation_log(const Arena& arena) { return arena.log(); }

StorageRef allocate(std::size_t nbytes, int device, Arena& arena) {
  const DeviceGuard guard(device);
  Block* block = arena.take(nbytes);
  if (block == nullptr) {
    // Synchronizing with the device would invalidate a capture in progress.
    if (!is_capturing(current_stream(device))) {
      pool(device).release_unused();
      block = arena.take(nbytes);
    }
    if (block == nullptr) out_of_memory(nbytes, device);
  }
  return wrap_block(block, nbytes, device);
}

StorageRef allocate(std::size_t nbytes, int device) {
  if (recent.forced != nullptr && recent.forced_device == device) return allocate(nbytes, device, *recent.forced);
  return allocate(nbytes, device, arena_for(device, current_stream(device)));
}

ArenaScope::ArenaScope(int device, Arena& arena)
    : device_(device), before_(recent.forced), device_before_(recent.forced_device) {
  recent = {&arena, device_};
}
ArenaScope::~ArenaScope() { recent = {before_, device_before_}; }

MemoryUse memory_use(int device) { return pool(device).use(); }
void release_unused(int device) { pool(device).release_unused(); }

StorageRef allocate_unpooled(std::size_t nbytes, int device) {
  const DeviceGuard guard(device);
  DevicePtr base = 0;
  const std::size_t size = std::max<std::size_t>(nbytes, 1);
  if (driver().mem_alloc(&base, size) != kSuccess) {
    pool(device).release_unused();
    if (driver().mem_alloc(&base, size) != kSuccess) out_of_memory(nbytes, device);
  }
  return StorageRef(new Storage(
      reinterpret_cast<void*>(base), nbytes, {DeviceType::kCUDA, device},
      [](void* data, void* context) noexcept {
        const DeviceGuard on(static_cast<int>(reinterpret_cast<std::intptr_t>(context)));
        (void)driver().mem_free(reinterpret_cast<DevicePtr>(data));
      },
      reinterpret_cast<void*>(static_cast<std::intptr_t>(device))));
}

}  // namespace untorch::cuda
