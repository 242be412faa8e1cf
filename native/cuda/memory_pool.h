// Device memory for tensors: blocks are kept for the next tensor on the same stream, so that allocating and freeing
// is a matter of lists and never waits for the GPU.
//
// An arena belongs to one stream (its blocks are used again in the stream's order, which needs no waiting) or to one
// graph (its blocks stay the graph's until the graph is gone, because every replay writes into them).
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

// The arena that allocations for `stream` come from now: that of the graph being captured when the stream is, else
// the stream's.
Arena& arena_for(int device, Stream stream);
// A fresh arena for a graph that untorch captures itself. The caller keeps it while the graph may be replayed.
std::shared_ptr<Arena> make_private_arena(int device);
// Frees what the arenas of graphs that are gone still hold. Waits for the device when there is something to free.
void release_gone_graphs(int device);
// What an arena handed out since start_log, in order.
struct AllocationRecord {
  DevicePtr base;
  std::size_t bytes;
};
void start_log(Arena& arena);
std::vector<AllocationRecord> allocation_log(const Arena& arena);

// Device memory from the arena, 512-byte aligned, uninitialised. Throws kOutOfMemory that names what was asked for and
// what is free.
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
  std::size_t reserved = 0;  // bytes taken from the driver, those kept for reuse included
};
MemoryUse memory_use(int device);
// Gives blocks that nobody uses back to the driver. Waits for the device.
void release_unused(int device);

// Memory straight from the driver, outside the pool, for what lives long (weights). Same errors as allocate.
StorageRef allocate_unpooled(std::size_t nbytes, int device);

}  // namespace untorch::cuda
