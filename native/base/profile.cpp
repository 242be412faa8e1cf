// One list for all threads, behind a mutex: ranges are rare beside what they time.
#include "base/profile.h"

#include <cxxabi.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/fork.h"

namespace untorch::profile {

std::atomic<bool> recording{false};

namespace {

constexpr std::size_t kMostRanges = std::size_t{1} << 21;
constexpr int kGenerationShift = 40;
constexpr std::string_view kCudaPrefix = "aoti_torch_cuda_";
constexpr std::string_view kAccessorPrefix = "aoti_torch_get_";  // of a tensor: quicker than a range

struct Entry {
  const char* name;
  const char* function;
  Kind kind;
  std::uint64_t thread;
  std::int64_t begin_ns, end_ns;  // end 0: not yet
  Mark begin, end;
  CUstream_st* stream;
  bool on_device;
};

struct Recorder {
  fork::Mutex mutex;
  const DeviceTimer* timer = nullptr;
  std::int64_t generation = 0;  // of the entries: a ticket of an earlier one means nothing
  std::int64_t base_ns = 0;     // the host's time of the device's base
  std::vector<Entry> entries, captured;
  std::set<std::string, std::less<>> names;
  std::size_t dropped = 0;

  const char* intern(const char* text) {
    const std::string_view view(text == nullptr ? "?" : text);
    const auto it = names.find(view);
    return (it != names.end() ? it : names.emplace(view).first)->c_str();
  }
  void release(const Entry& entry) const noexcept {
    for (const Mark& mark : {entry.begin, entry.end}) {
      if (mark.event != nullptr) timer->release(mark.event);
    }
  }
};
Recorder& recorder() {
  static auto& made = *new Recorder;
  return made;
}

std::int64_t now_ns() noexcept {
  timespec time{};
  (void)clock_gettime(CLOCK_MONOTONIC, &time);
  return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

std::uint64_t thread_number() noexcept {
  thread_local const auto number = static_cast<std::uint64_t>(syscall(SYS_gettid));
  return number;
}

// Kernels' names are those of the linker.
std::string readable(const char* name) {
  int status = -1;
  char* const text = std::strncmp(name, "_Z", 2) == 0 ? abi::__cxa_demangle(name, nullptr, nullptr, &status) : nullptr;
  std::string made = status == 0 ? text : name;
  std::free(text);
  return made;
}

}  // namespace

std::int64_t begin(Kind kind, const char* name, const char* function, bool on_device, CUstream_st* stream) noexcept {
  try {
    Recorder& all = recorder();
    const std::string shown = kind == Kind::kLaunch ? readable(name == nullptr ? "?" : name) : std::string();
    const std::lock_guard lock(all.mutex);
    if (!is_recording()) return -1;
    if (all.entries.size() >= kMostRanges) {
      ++all.dropped;
      return -1;
    }
    Entry entry{all.intern(shown.empty() ? name : shown.c_str()),
                all.intern(function),
                kind,
                thread_number(),
                0,
                0,
                {},
                {},
                stream,
                on_device && all.timer != nullptr};
    if (entry.on_device) entry.begin = all.timer->mark(stream);
    all.entries.push_back(entry);
    const auto place = static_cast<std::int64_t>(all.entries.size() - 1);
    all.entries.back().begin_ns = now_ns();
    return (all.generation << kGenerationShift) | place;
  } catch (...) {  // no memory for it: the call goes on
    return -1;
  }
}

void end(std::int64_t ticket) noexcept {
  if (ticket < 0) return;
  const std::int64_t end_ns = now_ns();
  try {
    Recorder& all = recorder();
    const std::lock_guard lock(all.mutex);
    const auto place = static_cast<std::size_t>(ticket & ((std::int64_t{1} << kGenerationShift) - 1));
    if (ticket >> kGenerationShift != all.generation || place >= all.entries.size()) return;
    Entry& entry = all.entries[place];
    entry.end_ns = end_ns;
    if (entry.on_device && all.timer != nullptr) entry.end = all.timer->mark(entry.stream);
  } catch (...) {
  }
}

std::int64_t Range::begin_function(const char* name, const char* function) noexcept {
  const std::string_view symbol(function);
  if (symbol.starts_with(kAccessorPrefix)) return -1;
  const DeviceTimer* const timer = recorder().timer;
  const bool on_device = timer != nullptr && symbol.starts_with(kCudaPrefix);
  return begin(Kind::kFunction, name, function, on_device, on_device ? timer->current_stream() : nullptr);
}

void start(const DeviceTimer* timer) {
  Recorder& all = recorder();
  const std::lock_guard lock(all.mutex);
  if (is_recording()) {
    throw_error(ErrorKind::kUnsupported, "a profile is being recorded already: one at a time in a process");
  }
  all.timer = timer;
  ++all.generation;
  all.dropped = 0;
  if (timer != nullptr) timer->rebase(all.base_ns);
  recording.store(true, std::memory_order_relaxed);
}

std::size_t collect(void (*visit)(void* context, const Collected& range), void* context) {
  Recorder& all = recorder();
  const std::lock_guard lock(all.mutex);
  if (all.timer != nullptr) all.timer->synchronize();
  const auto time = [&](const Mark& mark) {
    const double since = mark.event == nullptr ? -1 : all.timer->nanoseconds(mark.event);
    return since < 0 ? -1 : static_cast<double>(all.base_ns) + since;
  };
  const auto give = [&](const Entry& entry) {
    const Collected range{entry.name,     entry.function, entry.kind,        entry.begin.captured, entry.thread,
                          entry.begin_ns, entry.end_ns,   time(entry.begin), time(entry.end)};
    if (!range.captured || range.device_end_ns >= 0) visit(context, range);
  };
  for (const Entry& entry : all.entries) {
    if (entry.begin.captured) {
      all.captured.push_back(entry);
      continue;
    }
    if (entry.end_ns != 0) give(entry);
    all.release(entry);
  }
  for (const Entry& entry : all.captured) give(entry);
  all.entries.clear();
  ++all.generation;  // what is still open has no end any more
  if (all.timer != nullptr) all.timer->rebase(all.base_ns);
  const std::size_t dropped = all.dropped;
  all.dropped = 0;
  return dropped;
}

void stop() noexcept {
  Recorder& all = recorder();
  const std::lock_guard lock(all.mutex);
  recording.store(false, std::memory_order_relaxed);
  ++all.generation;
  for (const std::vector<Entry>* const list : {&all.entries, &all.captured}) {
    for (const Entry& entry : *list) all.release(entry);
  }
  all.entries = {};
  all.captured = {};
  all.timer = nullptr;
}

}  // namespace untorch::profile
