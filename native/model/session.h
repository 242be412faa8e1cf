// Sessions: buffers that a model changes (a KV cache), in copies of their own, with the weights shared by all.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/stream.h"
#include "model/archive.h"
#include "model/manifest.h"

namespace untorch {

// One copy of every buffer that methods change. Methods that name the same buffer share it, and run one at a time.
class States {
 public:
  States(std::shared_ptr<const Archive> archive, std::shared_ptr<const Manifest> manifest, int device_index);
  ~States();
  States(const States&) = delete;
  States& operator=(const States&) = delete;

  // The buffer's memory, with its initial value when it is first asked for. Throws kOutOfMemory.
  StorageRef storage(std::size_t index);
  // Everything as it was in the file again. On a GPU in the order of the call stream.
  void reset();
  // A copy with the values of now; likewise.
  std::shared_ptr<States> fork();
  // Bytes that it holds.
  std::size_t nbytes() const;

  // A call's turn: nobody else's is meanwhile. On a GPU `stream` comes after the last turn's, whatever that was, except
  // while it is captured: a capture takes no events from outside, and who replays the graph takes a turn for it.
  class Turn;

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
  std::mutex turn_;
  cuda::Event last_ = nullptr;
  bool has_run_ = false;
};

class States::Turn {
 public:
  // A null `states` is nobody's turn.
  Turn(States* states, Device device, cuda::Stream stream);
  ~Turn();
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  States* states_;
  bool on_cuda_;
  cuda::Stream stream_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace untorch
