// The profiler's ranges: begin and end of calls, C functions, kernels and launches, on the host and on a GPU.
//
// Off, a range costs one relaxed load and a branch. On, ranges are kept until they are collected. The GPU's times come
// from a pair of events around what a range enqueues; native/cuda gives the functions for that (DeviceTimer).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace untorch::profile {

enum class Kind : std::int32_t {
  kCall = 0,      // a method's run
  kFunction = 1,  // a C function of the runtime that generated code calls
  kKernel = 2,    // a loop of the model library
  kLaunch = 3,    // a kernel launch on a GPU
  kReplay = 4,    // a CUDA graph
};

extern std::atomic<bool> recording __attribute__((visibility("hidden")));
inline bool is_recording() noexcept { return recording.load(std::memory_order_relaxed); }

// An event on a stream. captured: it is a node of a graph, and has a time after each replay.
struct Mark {
  void* event = nullptr;
  bool captured = false;
};
struct DeviceTimer {
  Mark (*mark)(CUstream_st* stream) noexcept;   // of this stream
  CUstream_st* (*current_stream)() noexcept;    // of this thread
  void (*release)(void* event) noexcept;        // may be used again
  double (*nanoseconds)(void* event) noexcept;  // since the base; -1: it has no time
  void (*synchronize)();                        // waits for the device
  void (*rebase)(std::int64_t& host_ns);        // sets the base: now, host_ns on the host's clock
};

// One range as it is collected. device_…_ns: -1 without a GPU's time, else on the host's clock.
struct Collected {
  const char* name;
  const char* function;
  Kind kind;
  bool captured;  // in a graph: the host's times are those of the capture
  std::uint64_t thread;
  std::int64_t begin_ns, end_ns;
  double device_begin_ns, device_end_ns;
};

// Starts with nothing recorded. timer: null on the CPU; else it lives until stop(). Throws kUnsupported if it records.
void start(const DeviceTimer* timer);
// Gives what has ended since the last time to `visit`, and waits for the GPU first. Ranges in graphs are given again
// after each replay. Returns how many ranges were dropped as there were too many.
std::size_t collect(void (*visit)(void* context, const Collected& range), void* context);
void stop() noexcept;

// Begin and end of a range that has no scope. `begin` returns -1 when nothing is recorded.
std::int64_t begin(Kind kind, const char* name, const char* function, bool on_device, CUstream_st* stream) noexcept;
void end(std::int64_t ticket) noexcept;

// A C function or a method: records this scope. Names are copied.
class Range {
 public:
  // A C function of the runtime: aoti_torch_cuda_… has times of the GPU, too.
  Range(const char* name, const char* function) noexcept {
    if (is_recording()) [[unlikely]]
      ticket_ = begin_function(name, function);
  }
  // on_device: work on that stream.
  Range(Kind kind, const char* name, bool on_device, CUstream_st* stream) noexcept {
    if (is_recording()) [[unlikely]]
      ticket_ = begin(kind, name, name, on_device, stream);
  }
  ~Range() {
    if (ticket_ >= 0) [[unlikely]]
      end(ticket_);
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  static std::int64_t begin_function(const char* name, const char* function) noexcept;

  std::int64_t ticket_ = -1;
};

}  // namespace untorch::profile
