// Device properties, read once, and primary contexts, retained at first use.
#include "cuda/device.h"

#include <atomic>
#include <deque>
#include <mutex>

namespace untorch::cuda {
namespace {

struct Slot {
  DeviceId id = 0;
  DeviceProperties properties;
  std::mutex mutex;
  std::atomic<Context> context{nullptr};
};

int attribute(const Driver& api, int name, DeviceId device) {
  int value = 0;
  check_driver(api.device_attribute(&value, name, device), "asking for a device attribute");
  return value;
}

std::deque<Slot>& slots() {
  static std::deque<Slot>& made = *[] {
    const Driver& api = driver();
    auto* list = new std::deque<Slot>;  // never freed: contexts outlive static destructors
    int count = 0;
    check_driver(api.device_count(&count), "counting the devices");
    int version = 0;
    check_driver(api.driver_version(&version), "asking for the driver's version");
    for (int ordinal = 0; ordinal < count; ++ordinal) {
      Slot& slot = list->emplace_back();
      check_driver(api.device_get(&slot.id, ordinal), "opening a device");
      DeviceProperties& p = slot.properties;
      char name[256] = "";
      check_driver(api.device_name(name, sizeof name - 1, slot.id), "asking for a device's name");
      p.name = name;
      p.major = attribute(api, kAttributeComputeCapabilityMajor, slot.id);
      p.minor = attribute(api, kAttributeComputeCapabilityMinor, slot.id);
      p.num_sms = attribute(api, kAttributeMultiprocessorCount, slot.id);
      p.max_threads_per_multiprocessor = attribute(api, kAttributeMaxThreadsPerMultiprocessor, slot.id);
      p.max_shared_per_block = attribute(api, kAttributeMaxSharedMemoryPerBlockOptin, slot.id);
      p.l2_bytes = attribute(api, kAttributeL2CacheSize, slot.id);
      check_driver(api.device_total_memory(&p.total_memory, slot.id), "asking for a device's memory");
      p.has_pdl = p.major >= 9 && version >= 12030;
    }
    return list;
  }();
  return made;
}

Slot& slot(int device) {
  std::deque<Slot>& list = slots();
  if (device < 0 || static_cast<std::size_t>(device) >= list.size()) [[unlikely]] {
    throw_error(ErrorKind::kInvalidArgument, "there is no device cuda:", device, ": this machine has ", list.size(),
                list.size() == 1 ? " GPU, cuda:0" : " GPUs, cuda:0 to cuda:" + std::to_string(list.size() - 1));
  }
  return list[static_cast<std::size_t>(device)];
}

}  // namespace

int device_count() { return static_cast<int>(slots().size()); }

const DeviceProperties& device_properties(int device) { return slot(device).properties; }

Context primary_context(int device) {
  Slot& s = slot(device);
  Context context = s.context.load(std::memory_order_acquire);
  if (context != nullptr) [[likely]]
    return context;
  const std::lock_guard lock(s.mutex);
  context = s.context.load(std::memory_order_relaxed);
  if (context == nullptr) {
    const Result code = driver().primary_context_retain(&context, s.id);
    if (code == kErrorOutOfMemory) {
      // The driver gives the same code when other processes hold all queues of the GPU.
      throw_error(ErrorKind::kOutOfMemory, "creating the device's context: ", error_text(code),
                  ": free some of its memory; if there is enough, many processes share the GPU, and its queues are "
                  "taken: set CUDA_DEVICE_MAX_CONNECTIONS to a smaller number for them, or run fewer");
    }
    check_driver(code, "creating the device's context");
    s.context.store(context, std::memory_order_release);
  }
  return context;
}

int device_of(Context context) noexcept {
  if (context == nullptr || try_driver(nullptr) == nullptr) return -1;
  const std::deque<Slot>& list = slots();
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (list[i].context.load(std::memory_order_acquire) == context) return static_cast<int>(i);
  }
  return -1;
}

int current_device() {
  const Driver& api = driver();
  Context context = nullptr;
  check_driver(api.context_current(&context), "asking for the current context");
  if (context == nullptr) return 0;
  DeviceId id = 0;
  check_driver(api.context_device(&id), "asking for the current device");
  std::deque<Slot>& list = slots();
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (list[i].id == id) return static_cast<int>(i);
  }
  return 0;
}

void set_device(int device) {
  const Driver& api = driver();
  const Context wanted = primary_context(device);
  Context current = nullptr;
  check_driver(api.context_current(&current), "asking for the current context");
  if (current != wanted) check_driver(api.context_set_current(wanted), "changing the current context");
}

DeviceGuard::DeviceGuard(int device) {
  const Driver& api = driver();
  const Context wanted = primary_context(device);
  check_driver(api.context_current(&before_), "asking for the current context");
  changed_ = before_ != wanted;
  if (changed_) check_driver(api.context_set_current(wanted), "changing the current context");
}

DeviceGuard::~DeviceGuard() {
  // A thread that had no context keeps ours: it is what the thread would make next.
  if (changed_ && before_ != nullptr) (void)driver().context_set_current(before_);
}

}  // namespace untorch::cuda
