// MutableBuffers: a session's copy of the buffers that a model changes (a KV cache). Weights are shared by all
// sessions.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "base/fork.h"
#include "cuda/stream.h"
#include "model/archive.h"
#include "model/call_slots.h"
#include "model/manifest.h"

namespace untorch {

// One copy of every buffer that methods change. Methods that name the same buffer share it; their runs are serialised.
class MutableBuffers {
 public:
  MutableBuffers(std::shared_ptr<const Archive> archive, std::shared_ptr<const Manifest> manifest, int device_index);
  ~MutableBuffers();
  MutableBuffers(const MutableBuffers&) = delete;
  MutableBuffers& operator=(const MutableBuffers&) = delete;

  // The buffer's memory, with its initial value when it is first asked for. Throws kOutOfMemory.
  StorageRef storage(std::size_t index);
  // Everything as it was in the file again. On a GPU in the order of the call stream.
  void reset();
  // An independent copy of the current values; likewise.
  std::shared_ptr<MutableBuffers> fork();
  // Another session's, with the initial values.
  std::shared_ptr<MutableBuffers> fresh() const;
  // Whether a run, a reset or a fork holds them on this thread: another would wait for ever.
  bool in_use_here() const noexcept { return runs_.is_held_here(); }
  // Bytes that it holds.
  std::size_t nbytes() const;

  // Serialises runs. On a GPU `stream` waits for the work of the last run, on any stream, except while it is captured:
  // a capture takes no events from outside, and each replay of the graph holds a RunLock of its own.
  class RunLock;

 private:
  struct Buffer {
    StorageRef storage;
    bool on_cpu = false;
  };
  // What initial values are, by state: found out once for all sessions of a program.
  enum class Initial : signed char { kUnknown, kZero, kOther };
  using InitialValues = std::vector<std::atomic<Initial>>;

  MutableBuffers(const MutableBuffers& other, std::shared_ptr<InitialValues> initial);
  StorageRef make(std::size_t index, bool filled) const;
  bool is_zero(std::size_t index, std::span<const std::byte> bytes) const;
  CallSlots& slots_unless_here();
  void wait(cuda::Stream stream);
  void note(cuda::Stream stream);

  std::shared_ptr<const Archive> archive_;
  std::shared_ptr<const Manifest> manifest_;
  int device_index_;  // of the GPU, -1: none
  std::shared_ptr<InitialValues> initial_;
  mutable fork::Mutex buffers_mutex_;
  std::vector<Buffer> buffers_;
  CallSlots runs_{1};
  cuda::Event last_ = nullptr;
  bool has_run_ = false;
};

class MutableBuffers::RunLock {
 public:
  // Null: there is nothing to serialise. Throws kModel if a fork cut a run on them, unless all of them are written
  // next.
  RunLock(MutableBuffers* buffers, Device device, cuda::Stream stream, bool writes_all = false);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  MutableBuffers* buffers_;
  bool on_cuda_;
  cuda::Stream stream_;
  const CallSlots::Hold hold_;
};

}  // namespace untorch
