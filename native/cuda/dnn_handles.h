// cuDNN's handles, each with what it has met.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>

#include "cuda/dnn_library.h"
#include "cuda/dnn_problem.h"
#include "cuda/handle_pool.h"

namespace untorch::cuda::dnn {

// Everything that a plan depends on: sizes, then alignments, dtype, flags and device.
using Key = std::array<std::int64_t, 24>;
struct KeyHash {
  std::size_t operator()(const Key& key) const noexcept;
};
using Problems = std::unordered_map<Key, std::shared_ptr<Problem>, KeyHash>;

// A handle, and the problems that it has met: they are looked up without a lock.
struct HandleState {
  Handle handle = nullptr;
  Stream stream = nullptr;
  bool has_stream = false;
  Problems problems;

  void use_stream(Stream wanted);
};

HandlePool<HandleState>::Lease take_handle(int device);

}  // namespace untorch::cuda::dnn
