// MutableBuffers: a session's copy of the buffers that a model changes (a KV cache). Weights are shared by all
// sessions.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/stream.h"
#include "model/archive.h"
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
  StorageRef make(std::size_t index, bool filled) const;
  void wait(cuda::Stream stream);
  void note(cuda::Stream stream);

  std::shared_ptr<const Archive> archive_;
  std::shared_ptr<const Manifest> manifest_;
  int device_index_;  // of the GPU, -1: none
  mutable std::mutex buffers_mutex_;
  std::vector<Buffer> buffers_;
  std::mutex run_mutex_;
  cuda::Event last_ = nullptr;
  bool has_run_ = false;
};

class MutableBuffers::RunLock {
 public:
  // Null: there is nothing to serialise.
  RunLock(MutableBuffers* buffers, Device device, cuda::Stream stream);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  MutableBuffers* buffers_;
  bool on_cuda_;
  cuda::Stream stream_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace untorch
