// Opens libcuda.so.1 and resolves the driver's functions, once.
#include "cuda/driver.h"

#include <dlfcn.h>

#include "cuda/lost_device.h"

namespace untorch::cuda {
namespace {

struct Opened {
  Driver table;
  std::string reason;  // why it cannot be used; empty when it was opened
};

std::string open_into(Driver& table) {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return "no NVIDIA driver was found (libcuda.so.1 cannot be opened): install NVIDIA's driver, or run the container "
           "with its GPU support";
  }
#define UNTORCH_RESOLVE(member, symbol, arguments)                                                                 \
  if (void* const found = dlsym(library, #symbol); found != nullptr) {                                             \
    table.member = reinterpret_cast<decltype(table.member)>(found);                                                \
  } else {                                                                                                         \
    return "NVIDIA's driver is too old: it has no " #symbol ", which CUDA 12.4 and newer have: update the driver"; \
  }
  UNTORCH_CUDA_DRIVER(UNTORCH_RESOLVE)
#undef UNTORCH_RESOLVE
  if (const Result code = table.init(0); code != kSuccess) {
    const char* name = nullptr;
    (void)table.error_name(code, &name);
    if (code == kErrorNoDevice) return "NVIDIA's driver is installed, but reports no GPU (CUDA_ERROR_NO_DEVICE)";
    return std::string("NVIDIA's driver cannot be started: ") + (name != nullptr ? name : "unknown error") + " (" +
           std::to_string(code) + ")";
  }
  return {};
}

const Opened& opened() {
  static const Opened result = [] {
    Opened made;
    made.reason = open_into(made.table);
    return made;
  }();
  return result;
}

// Of `extra`: a key and its value, one after the other, and the end.
void* const kEnd = nullptr;
void* const kBufferPointer = reinterpret_cast<void*>(std::uintptr_t{1});
void* const kBufferSize = reinterpret_cast<void*>(std::uintptr_t{2});

}  // namespace

std::span<const std::byte> argument_buffer(void* const* extra) noexcept {
  const void* buffer = nullptr;
  std::size_t bytes = 0;
  for (; extra != nullptr && *extra != kEnd; extra += 2) {
    if (*extra == kBufferPointer) buffer = extra[1];
    if (*extra == kBufferSize) bytes = *static_cast<const std::size_t*>(extra[1]);
  }
  return {static_cast<const std::byte*>(buffer), buffer == nullptr ? 0 : bytes};
}

void set_argument_buffer(void* (&extra)[5], void* buffer, std::size_t* bytes) noexcept {
  extra[0] = kBufferPointer, extra[1] = buffer;
  extra[2] = kBufferSize, extra[3] = bytes;
  extra[4] = kEnd;
}

const Driver& driver() {
  const Opened& result = opened();
  if (!result.reason.empty()) [[unlikely]]
    throw_error(ErrorKind::kUnsupported, "CUDA is not available: ", result.reason);
  return result.table;
}

const Driver* try_driver(std::string* reason) noexcept {
  const Opened& result = opened();
  if (result.reason.empty()) return &result.table;
  if (reason != nullptr) *reason = result.reason;
  return nullptr;
}

std::string error_text(Result code) {
  const Driver* const api = try_driver(nullptr);
  const char *name = nullptr, *text = nullptr;
  if (api != nullptr) {
    (void)api->error_name(code, &name);
    (void)api->error_string(code, &text);
  }
  if (name == nullptr) return "CUDA error " + std::to_string(code);
  return std::string(name) + " (" + (text != nullptr ? text : "no text") + ")";
}

void throw_driver_error(Result code, const char* what) {
  if (is_fatal(code)) {
    const std::string text = mark_lost(code, what);
    throw_error(ErrorKind::kDeviceLost, text.empty() ? what + (": " + error_text(code)) : text);
  }
  throw_error(code == kErrorOutOfMemory ? ErrorKind::kOutOfMemory : ErrorKind::kInternal, what, ": ", error_text(code));
}

}  // namespace untorch::cuda
