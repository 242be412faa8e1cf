// The marks of lost devices and their texts.
#include "cuda/lost_device.h"

#include <array>
#include <atomic>
#include <mutex>

#include "cuda/device.h"

namespace untorch::cuda {
namespace {

// CUresult
constexpr Result kIllegalAddress = 700, kLaunchTimeout = 702, kContextDestroyed = 709, kAssert = 710,
                 kHardwareStackError = 714, kLaunchFailed = 719, kEccUncorrectable = 214, kNvlinkUncorrectable = 220;
constexpr std::size_t kMaxDevices = 64;

struct Mark {
  std::atomic<bool> lost{false};
  std::string text;  // written once, before `lost`
};

struct Marks {
  std::array<Mark, kMaxDevices> devices;
  std::mutex mutex;
};
Marks& marks() {
  static auto& made = *new Marks;  // looked at while the process ends
  return made;
}

std::atomic<Diagnosis> diagnosis{nullptr};

std::string diagnosed(bool assertion) noexcept {
  try {
    const Diagnosis diagnose = diagnosis.load();
    return diagnose != nullptr ? diagnose(assertion) : std::string();
  } catch (...) {  // a file that cannot be read any more
    return {};
  }
}

}  // namespace

bool is_fatal(Result code) noexcept {
  return code == kIllegalAddress || code == kLaunchTimeout || code == kContextDestroyed || code == kAssert ||
         (code >= kHardwareStackError && code <= kLaunchFailed) || code == kEccUncorrectable ||
         code == kNvlinkUncorrectable;
}

void set_lost_diagnosis(Diagnosis function) noexcept { diagnosis.store(function); }

std::string mark_lost(Result code, const char* what) noexcept {
  try {
    Context context = nullptr;  // the question for its device is one of those that fail now
    (void)driver().context_current(&context);
    const int device = device_of(context);
    if (device < 0 || static_cast<std::size_t>(device) >= kMaxDevices) return {};
    Mark& mark = marks().devices[static_cast<std::size_t>(device)];
    const std::lock_guard lock(marks().mutex);
    if (!mark.lost.load(std::memory_order_relaxed)) {
      mark.text = "cuda:" + std::to_string(device) + " is lost to this process: " + error_text(code) +
                  ", seen at: " + what + diagnosed(code == kAssert) +
                  ". CUDA has destroyed the context with all memory in it, which other libraries of the process share; "
                  "every later use of the device fails: start the process anew";
      mark.lost.store(true, std::memory_order_release);
    }
    return mark.text;
  } catch (...) {
    return {};
  }
}

void check_not_lost(int device) {
  if (device < 0 || static_cast<std::size_t>(device) >= kMaxDevices) return;
  const Mark& mark = marks().devices[static_cast<std::size_t>(device)];
  if (mark.lost.load(std::memory_order_acquire)) [[unlikely]]
    throw Error(ErrorKind::kDeviceLost, mark.text);
}

void probe_lost(int device, const char* what) {
  check_not_lost(device);
  std::size_t free_bytes = 0, total = 0;
  const DeviceGuard guard(device);
  const Result code = driver().mem_info(&free_bytes, &total);
  if (is_fatal(code)) throw_driver_error(code, what);
}

}  // namespace untorch::cuda
