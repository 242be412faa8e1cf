// Thread-local current streams, the streams that threads own, and events between streams.
#include "cuda/stream.h"

#include <mutex>
#include <vector>

#include "cuda/device.h"
#include "untorch/caller_stream.h"

namespace untorch::cuda {
namespace {

constexpr int kFewDevices = 8;

// A thread's current streams by device. Trivially destructible up to eight devices; larger machines use the vector.
struct Settings {
  StreamSetting few[kFewDevices];
  std::vector<StreamSetting> more;
  StreamSetting& of(int device) {
    if (device < kFewDevices) return few[device];
    const auto index = static_cast<std::size_t>(device - kFewDevices);
    if (more.size() <= index) more.resize(index + 1);
    return more[index];
  }
};
thread_local Settings settings;

// Streams of threads that have ended, reused by new ones.
class SpareStreams {
 public:
  Stream take(int device) {
    {
      const std::lock_guard lock(mutex_);
      if (static_cast<std::size_t>(device) < spare_.size() && !spare_[static_cast<std::size_t>(device)].empty()) {
        const Stream stream = spare_[static_cast<std::size_t>(device)].back();
        spare_[static_cast<std::size_t>(device)].pop_back();
        return stream;
      }
    }
    const DeviceGuard guard(device);
    Stream stream = nullptr;
    check_driver(driver().stream_create(&stream, kStreamNonBlocking), "creating a stream");
    return stream;
  }
  void give_back(int device, Stream stream) {
    const std::lock_guard lock(mutex_);
    if (spare_.size() <= static_cast<std::size_t>(device)) spare_.resize(static_cast<std::size_t>(device) + 1);
    spare_[static_cast<std::size_t>(device)].push_back(stream);
  }
  static SpareStreams& instance() {
    static auto& spare = *new SpareStreams;  // threads may end after static destructors have run
    return spare;
  }

 private:
  std::mutex mutex_;
  std::vector<std::vector<Stream>> spare_;
};

struct OwnStreams {
  std::vector<Stream> by_device;
  ~OwnStreams() {
    for (std::size_t i = 0; i < by_device.size(); ++i) {
      if (by_device[i] != nullptr) SpareStreams::instance().give_back(static_cast<int>(i), by_device[i]);
    }
  }
};
thread_local OwnStreams own_streams;

// Events for ordering streams, reused at once: cuStreamWaitEvent copies the event's state.
struct OrderEvents {
  std::vector<Event> by_device;
  ~OrderEvents() {
    const Driver* const api = try_driver(nullptr);
    for (const Event event : by_device) {
      if (event != nullptr && api != nullptr) (void)api->event_destroy(event);
    }
  }
};
thread_local OrderEvents order_events;

Event order_event(int device) {
  const auto index = static_cast<std::size_t>(device);
  if (order_events.by_device.size() <= index) order_events.by_device.resize(index + 1, nullptr);
  Event& event = order_events.by_device[index];
  if (event == nullptr) check_driver(driver().event_create(&event, kEventDisableTiming), "creating an event");
  return event;
}

}  // namespace

Stream current_stream(int device) {
  const StreamSetting& setting = settings.of(device);
  return setting.set ? setting.stream : call_stream(device);
}

StreamSetting exchange_current_stream(int device, StreamSetting setting) {
  StreamSetting& slot = settings.of(device);
  const StreamSetting before = slot;
  slot = setting;
  return before;
}

Stream thread_stream(int device) {
  const auto index = static_cast<std::size_t>(device);
  if (own_streams.by_device.size() <= index) own_streams.by_device.resize(index + 1, nullptr);
  Stream& stream = own_streams.by_device[index];
  if (stream == nullptr) stream = SpareStreams::instance().take(device);
  return stream;
}

Stream call_stream(int device) {
  const untorch_caller_stream caller = untorch_caller_stream_peek();
  return caller.is_set != 0 ? caller.stream : thread_stream(device);
}

bool is_capturing(Stream stream) {
  int status = 0;
  // The legacy stream cannot be asked while another is captured; it is never captured itself.
  return driver().stream_capturing(stream, &status) == kSuccess && status != 0;
}

void order_after(Stream consumer, Stream producer) {
  if (consumer == producer) return;
  const Driver& api = driver();
  const Event event = order_event(current_device());
  check_driver(api.event_record(event, producer), "recording an event");
  check_driver(api.stream_wait_event(consumer, event, 0), "waiting for an event");
}

}  // namespace untorch::cuda
