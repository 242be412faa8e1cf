// Where the random numbers of CUDA kernels come from: Philox4x32-10, a function of a seed and a position, so that the
// state is two integers. The seed is the generator's (untorch_manual_seed seeds the CPU and every GPU); the position is
// counted for each GPU and starts over with the seed, as in PyTorch.
//
// In a graph the two must change from replay to replay, so they are read from device memory: the capture owns a cell
// of two words {seed, position}, kernels add what they were given relative to it, and before each replay the graph's
// owner writes what reserve_replay() gave (model/cuda_graph.cpp).
//
//   RandomCapture random(device, cell);              // while the graph is captured, in this thread
//   …
//   total = random.total_offset();                   // 0: the graph draws nothing
//   // before each replay:
//   const RandomBase base = reserve_replay(device, total);
//   // base.seed and base.offset into the cell, on the stream
#pragma once

#include <cstdint>

#include "cuda/driver.h"
#include "kernels/cpu/random/mt19937.h"
#include "kernels/random.h"

namespace untorch::cuda {

using kernels::cuda::PhiloxState;

// Counts what a capture draws. Captures do not nest in a thread.
class RandomCapture {
 public:
  // `cell`: 16 bytes of device memory that live as long as the graph.
  RandomCapture(int device, DevicePtr cell);
  ~RandomCapture();
  RandomCapture(const RandomCapture&) = delete;
  RandomCapture& operator=(const RandomCapture&) = delete;

  // Positions that one replay uses.
  std::uint64_t total_offset() const noexcept { return offset_; }
  int device() const noexcept { return device_; }
  DevicePtr cell() const noexcept { return cell_; }

 private:
  friend PhiloxState reserve_random(kernels::Generator*, int, Stream, std::uint64_t, const char*);
  int device_;
  DevicePtr cell_;
  std::uint64_t offset_ = 0;
};

// `count` positions (rounded up to a multiple of 4) for a kernel on the stream. A null generator is the process's.
// Throws while the stream is captured without a RandomCapture, whose graph would repeat its numbers, and while it is
// captured with a generator of the caller's.
PhiloxState reserve_random(kernels::Generator* generator, int device, Stream stream, std::uint64_t count,
                           const char* op);

struct RandomBase {
  std::uint64_t seed, offset;
};
// The seed and the first position for one replay that uses `total` positions.
RandomBase reserve_replay(int device, std::uint64_t total);

}  // namespace untorch::cuda
