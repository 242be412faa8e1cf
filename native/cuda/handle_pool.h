// A pool of library handles (cuDNN, cuBLAS, cuSOLVER), which are expensive to make and used by one thread at a time.
//
// A call takes an idle handle of its device, or makes one, and returns it: as many exist as calls ever ran
// concurrently. Handles are never destroyed: the libraries may be unloaded before us at process exit.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace untorch::cuda {

template <class State>
class HandlePool {
 public:
  class Lease {
   public:
    Lease(HandlePool& pool, int device, std::unique_ptr<State> state)
        : pool_(pool), device_(device), state_(std::move(state)) {}
    ~Lease() {
      const std::lock_guard lock(pool_.mutex_);
      pool_.idle_[device_].push_back(std::move(state_));
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    State* operator->() const noexcept { return state_.get(); }
    State& operator*() const noexcept { return *state_; }

   private:
    HandlePool& pool_;
    int device_;
    std::unique_ptr<State> state_;
  };

  // make() gives a std::unique_ptr<State>, with the device current; it may throw.
  template <class Make>
  Lease take(int device, Make&& make) {
    std::unique_ptr<State> state;
    {
      const std::lock_guard lock(mutex_);
      auto& idle = idle_[device];
      idle.reserve(idle.size() + 1);  // so that giving back cannot fail
      if (!idle.empty()) {
        state = std::move(idle.back());
        idle.pop_back();
      }
    }
    if (state == nullptr) state = make();
    return Lease(*this, device, std::move(state));
  }

 private:
  std::mutex mutex_;
  std::map<int, std::vector<std::unique_ptr<State>>> idle_;
};

}  // namespace untorch::cuda
