// Streams as Python passes them around, and inputs that the GPU may still be reading.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "untorch/untorch.h"

namespace untorch::python {

// The stream that produced an array, with the Python object that keeps it from being destroyed (None: the library's
// own, or a bare handle).
struct Producer {
  bool known = false;
  void* stream = nullptr;
  nanobind::object owner = nanobind::none();
};

// The array API numbers streams: 1 is the legacy stream, 2 the thread's default stream, all else is an address.
std::uint64_t stream_number(const void* stream) noexcept;
// The inverse, for what a consumer gave to __dlpack__. False: -1, no synchronisation. Throws for what is no stream.
bool consumer_stream(nanobind::handle number, void*& stream);

// The call stream of the calling thread. Throws.
Producer current_producer(int device_index);
// True when the thread's caller has set a stream.
bool caller_has_stream() noexcept;
// Sets the caller's stream: None, or a handle as an int, with the object that owns it. Returns both as they were.
nanobind::tuple exchange_stream(const nanobind::object& handle, const nanobind::object& owner);

// Keeps Python objects (references are taken over) until the stream has done what it holds now.
void keep_until_done(int device_index, void* stream, std::vector<PyObject*> objects);
// What a kernel gave to a call on that stream: kept like this, or by the graph that the call is captured into.
void keep_for_call(int device_index, void* stream, nanobind::object object);
// Collects what kernels of this thread give while a call is captured. Objects live under the interpreter lock.
class CaptureKeeper {
 public:
  CaptureKeeper();
  ~CaptureKeeper();
  CaptureKeeper(const CaptureKeeper&) = delete;
  CaptureKeeper& operator=(const CaptureKeeper&) = delete;
  std::vector<nanobind::object> take() { return std::move(kept_); }

 private:
  friend void keep_for_call(int, void*, nanobind::object);
  std::vector<nanobind::object> kept_;
  CaptureKeeper* before_;
};
// Lets go of those whose time has come. Cheap when there are none.
void release_done();

}  // namespace untorch::python
