// Opens cuBLASLt and makes its handles.
#include "cuda/blas_library.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <mutex>

#include "cuda/device.h"
#include "cuda/library_search.h"
#include "cuda/stream.h"

namespace untorch::cuda::lt {
namespace {

constexpr int kMaxDevices = 64;

void open_into(Functions& out) {
  void* const library = open_library({"libcublasLt.so.13", "libcublasLt.so.12"}, kCublas, out.reason);
  if (library == nullptr) return;
  std::size_t (*version)() = nullptr;
#define UNTORCH_RESOLVE(member, symbol)                                                  \
  out.member = reinterpret_cast<decltype(out.member)>(dlsym(library, #symbol));          \
  if (out.member == nullptr) {                                                           \
    out.reason = "the cuBLASLt that was found has no " #symbol ": update nvidia-cublas"; \
    return;                                                                              \
  }
#define UNTORCH_RESOLVE_STATUS(member, symbol, arguments) UNTORCH_RESOLVE(member, symbol)
  UNTORCH_CUBLASLT(UNTORCH_RESOLVE_STATUS)
  UNTORCH_RESOLVE(status_text, cublasLtGetStatusString)
#undef UNTORCH_RESOLVE_STATUS
#undef UNTORCH_RESOLVE
  version = reinterpret_cast<decltype(version)>(dlsym(library, "cublasLtGetVersion"));
  const std::size_t number = version != nullptr ? version() : 0;
  // 130101, and 120904 in CUDA 12.
  out.version =
      std::to_string(number / 10000) + "." + std::to_string(number / 100 % 100) + "." + std::to_string(number % 100);
}

}  // namespace

const Functions& opened() noexcept {
  // Never freed: a GEMM may be called while the process ends.
  static const Functions& made = *[] {
    auto* library = new Functions;
    open_into(*library);
    return library;
  }();
  return made;
}

const Functions& functions() {
  const Functions& library = opened();
  if (!library.reason.empty()) [[unlikely]]
    throw_error(ErrorKind::kUnsupported, "a GEMM of this size needs cuBLAS: ", library.reason);
  return library;
}

[[noreturn]] void throw_status(const char* op, const char* what, Status status) {
  const char* const text = opened().status_text != nullptr ? opened().status_text(status) : nullptr;
  throw_error(status == 3 ? ErrorKind::kOutOfMemory : ErrorKind::kInternal, op, ": cuBLAS failed at ", what, ": ",
              text != nullptr ? text : "unknown status", " (", status, ")");
}

Handle handle_for(int device) {
  struct Slot {
    std::mutex mutex;
    std::atomic<Handle> handle{nullptr};
  };
  static auto& slots = *new std::array<Slot, kMaxDevices>;
  check(device >= 0 && device < kMaxDevices, "cuda:", device, " is beyond the ", kMaxDevices, " devices there may be");
  Slot& slot = slots[static_cast<std::size_t>(device)];
  Handle handle = slot.handle.load(std::memory_order_acquire);
  if (handle != nullptr) [[likely]]
    return handle;
  const std::lock_guard lock(slot.mutex);
  handle = slot.handle.load(std::memory_order_relaxed);
  if (handle == nullptr) {
    const Functions& library = functions();
    const RelaxedCapture relaxed;
    if (const Status status = library.create(&handle); status != kOk) {
      throw_error(ErrorKind::kUnsupported, "cuBLASLt ", library.version, " cannot be started on ",
                  device_properties(device).name, ": ", library.status_text(status),
                  status == kNotInitialized ? "; is NVIDIA's driver new enough for it?" : "");
    }
    slot.handle.store(handle, std::memory_order_release);
  }
  return handle;
}

}  // namespace untorch::cuda::lt
