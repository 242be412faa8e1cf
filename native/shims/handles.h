// Tensor handles that a model library leaks: torch's container does so with weights that it does not own.
#pragma once

#include <unordered_set>

#include "tensor/tensor.h"

namespace untorch::shims {

// While it lives, handles that this thread makes with aoti_torch_new_tensor_handle are put into `handles`, and those
// that it deletes are taken out: the rest was leaked by the model library.
class HandleTracker {
 public:
  explicit HandleTracker(std::unordered_set<Tensor*>& handles) noexcept : before_(current()) { current() = &handles; }
  ~HandleTracker() { current() = before_; }
  HandleTracker(const HandleTracker&) = delete;
  HandleTracker& operator=(const HandleTracker&) = delete;
  static std::unordered_set<Tensor*>*& current() noexcept;

 private:
  std::unordered_set<Tensor*>* before_;
};

}  // namespace untorch::shims
