// A process-wide setting over one a thread.
#include "cuda/tf32.h"

#include <atomic>
#include <cstdlib>
#include <string_view>

namespace untorch::cuda {
namespace {

enum : int { kUnset = -1, kNever, kAlways };

std::atomic<int>& process_setting() noexcept {
  static std::atomic<int> setting{[] {
    const char* const text = std::getenv("UNTORCH_ALLOW_TF32");
    const std::string_view value = text != nullptr ? text : "";
    return value == "1" ? kAlways : value == "0" ? kNever : kUnset;
  }()};
  return setting;
}

thread_local constinit Tf32 of_call{};

}  // namespace

Tf32 tf32() noexcept {
  const int setting = process_setting().load(std::memory_order_relaxed);
  if (setting == kUnset) return of_call;
  return {setting == kAlways, setting == kAlways};
}

void allow_tf32(bool allowed) noexcept {
  process_setting().store(allowed ? kAlways : kNever, std::memory_order_relaxed);
}

Tf32Scope::Tf32Scope(Tf32 allowed) noexcept : before_(of_call) { of_call = allowed; }
Tf32Scope::~Tf32Scope() { of_call = before_; }

}  // namespace untorch::cuda
