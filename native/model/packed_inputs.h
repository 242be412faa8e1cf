// Small inputs of a CUDA graph, side by side on the GPU: one copy brings those that a call has on the CPU.
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "tensor/tensor.h"

namespace untorch {

class PackedInputs {
 public:
  PackedInputs() = default;
  // bytes: of each input; 0 for one that lies elsewhere.
  PackedInputs(std::span<const std::size_t> bytes, int device);

  // Whether the input has a place here.
  bool has(std::size_t input) const noexcept { return input < places_.size() && places_[input] != kElsewhere; }
  // Memory of its own within the block, which it keeps alive.
  StorageRef storage(std::size_t input) const;

  struct Source {
    std::size_t input;
    const Tensor* own;  // the input's tensor here
    TensorPtr given;    // on the CPU
  };
  // Copies them, in the order of the current stream. The gaps are overwritten: other inputs are filled afterwards.
  void send(std::span<const Source> sources) const;

 private:
  static constexpr std::size_t kElsewhere = static_cast<std::size_t>(-1);

  std::vector<std::size_t> places_, bytes_;
  StorageRef block_;
  int device_ = 0;
};

}  // namespace untorch
