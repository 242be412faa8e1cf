// The current stream of a thread and device: the caller's when one is set, else the thread's own.
#pragma once

#include "cuda/driver.h"

namespace untorch::cuda {

// The stream that operators launch on: set by the model library's stream guard, or by StreamScope.
Stream current_stream(int device);
// Replaces it for this thread and device and returns the previous one; for guards. `set` false: none was set.
struct StreamSetting {
  Stream stream = nullptr;
  bool set = false;
};
StreamSetting exchange_current_stream(int device, StreamSetting setting);

// Sets the current stream of a device for a scope.
class StreamScope {
 public:
  StreamScope(int device, Stream stream) : device_(device), before_(exchange_current_stream(device, {stream, true})) {}
  ~StreamScope() { exchange_current_stream(device_, before_); }
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  int device_;
  StreamSetting before_;
};

// This thread's own stream on the device: non-blocking, so that it never waits for the legacy stream. Made at its
// first use, kept for the next thread when this one ends.
Stream thread_stream(int device);
// The caller's stream (untorch/caller_stream.h) when one is set, else the thread's own.
Stream call_stream(int device);
// True while the stream is being captured into a graph.
bool is_capturing(Stream stream);

// cudaStreamCaptureModeRelaxed for this thread and scope: allocating and loading code stay allowed while a stream is
// captured.
class RelaxedCapture {
 public:
  RelaxedCapture() { (void)driver().capture_mode_exchange(&mode_); }
  ~RelaxedCapture() { (void)driver().capture_mode_exchange(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int mode_ = kCaptureModeRelaxed;
};

// Makes `consumer` wait for the work enqueued on `producer` so far. Nothing when they are the same stream.
void order_after(Stream consumer, Stream producer);

}  // namespace untorch::cuda
