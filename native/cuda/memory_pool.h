// A stream-ordered caching allocator for device memory: allocating and freeing move blocks between lists and never
// synchronize with the GPU.
//
// An arena belongs to one stream (its blocks are reused in stream order) or to one CUDA graph (a private pool: its
// blocks stay the graph's until the graph is destroyed, because every replay writes into them).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/driver.h"
#include "tensor/tensor.h"

namespace untorch::cuda {

class Arena;

// The arena that allocations for `stream` come from: that of the graph while the stream is captured, else the
// stream's.
Arena& arena_for(int device, Stream stream);
// An arena for a graph that untorch captures itself. The caller keeps it while the graph may be replayed. It may bring
// recycled memory, unless it is for something small.
std::shared_ptr<Arena> make_private_arena(int device, bool recycled = true);
// Whether what is free serves smaller requests, too: graphs of several sizes are captured into the arena one by one.
void take_larger_blocks(Arena& arena, bool takes);
// Keeps the memory of a graph that was never launched for the next make_private_arena: freeing it would wait for the
// device. What still holds a tensor is left to release_gone_graphs.
void recycle_private_arena(int device, std::shared_ptr<Arena> arena);
// Frees what the arenas of destroyed graphs still hold, and what is kept for the next one. Synchronizes with the device
// when there is something to free.
void release_gone_graphs(int device);
// The allocations of an arena since start_log, in order.
struct AllocationRecord {
  DevicePtr base;
  std::size_t bytes;
};
void start_log(Arena& arena);
std::vector<AllocationRecord> allocation_log(const Arena& arena);

// Device memory from the arena, 512-byte aligned, uninitialised. Throws kOutOfMemory that names the requested and the
// free bytes.
StorageRef allocate(std::size_t nbytes, int device, Arena& arena);
// The same from the arena of the device's current stream.
StorageRef allocate(std::size_t nbytes, int device);

// Allocations of this thread on the device come from `arena` while it lives: for captures.
class ArenaScope {
 public:
  ArenaScope(int device, Arena& arena);
  ~ArenaScope();
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

 private:
  int device_;
  Arena* before_;
  int device_before_;
};

struct MemoryUse {
  std::size_t in_use = 0;    // bytes of blocks that tensors hold
  std::size_t reserved = 0;  // bytes allocated from the driver, cached blocks included
};
MemoryUse memory_use(int device);
// Returns cached blocks to the driver. Synchronizes with the device.
void release_unused(int device);

// Memory straight from the driver, outside the pool, for long-lived data (weights). Same errors as allocate.
StorageRef allocate_unpooled(std::size_t nbytes, int device);

}  // namespace untorch::cuda
