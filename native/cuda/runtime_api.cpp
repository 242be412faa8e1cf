// The CUDA runtime API that compiled models and our own kernels call, implemented over the driver API: no libcudart is
// linked or opened. Signatures and constants are those of NVIDIA's runtime (CUDA 12 and 13); error codes of the runtime
// and the driver agree for every code that is returned here.
//
// Callers are the host code that nvcc makes for our own kernels and CUB (kernel_registry.cpp registers and launches
// kernels), and model libraries. The latter use exported names of their own, utdaMalloc for cudaMalloc: the loader
// renames a model library's imports (model/library.cpp), so that it gets these functions even where NVIDIA's runtime is
// loaded, and nothing else in the process gets them.
#include <cstring>

#include "base/error.h"
#include "base/export.h"
#include "cuda/device.h"
#include "cuda/lost_device.h"
#include "cuda/memory_pool.h"
#include "cuda/stream.h"
#include "cuda/upload.h"

using namespace untorch;
using namespace untorch::cuda;

namespace {

enum : int { kHostToHost = 0, kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3, kDefault = 4 };

// cudaGetLastError: a thread's last failure, kept until it is read.
thread_local Result last_code = kSuccess;

Result note(Result code) noexcept {
  if (code == kSuccess || code == kErrorNotReady) [[likely]]
    return code;
  if (is_fatal(code)) (void)mark_lost(code, "running a model");
  last_code = code;
  return code;
}

// Runs the body; an exception becomes an error code, and its text is kept for the loader's message.
template <class Body>
Result called(const char* what, Body&& body) noexcept {
  try {
    return note(body(driver()));
  } catch (const Error& e) {
    set_last_error(e.kind(), std::string(what) + ": " + e.what());
    return note(e.kind() == ErrorKind::kOutOfMemory ? kErrorOutOfMemory : kErrorInvalidValue);
  } catch (...) {
    return note(kErrorInvalidValue);
  }
}

// The same for what destructors of model libraries call. In a lost context everything is gone already; the libraries
// print an error, or throw it and end the process.
template <class Body>
Result destroyed(const char* what, Body&& body) noexcept {
  const Result code = called(what, body);
  return is_fatal(code) ? kSuccess : code;
}

}  // namespace

#define UNTORCH_RUNTIME extern "C" Result

UNTORCH_RUNTIME cudaGetDevice(int* device) {
  return called("cudaGetDevice", [&](const Driver&) {
    *device = current_device();
    return kSuccess;
  });
}

UNTORCH_RUNTIME cudaSetDevice(int device) {
  return called("cudaSetDevice", [&](const Driver&) {
    set_device(device);
    return kSuccess;
  });
}

UNTORCH_RUNTIME cudaGetDeviceCount(int* count) {
  return called("cudaGetDeviceCount", [&](const Driver&) {
    *count = device_count();
    return kSuccess;
  });
}

UNTORCH_RUNTIME cudaDeviceGetAttribute(int* value, int attribute, int device) {
  return called("cudaDeviceGetAttribute", [&](const Driver& api) {
    DeviceId id = 0;
    const Result code = api.device_get(&id, device);
    return code != kSuccess ? code : api.device_attribute(value, attribute, id);
  });
}

UNTORCH_RUNTIME cudaDeviceSynchronize() {
  return called("cudaDeviceSynchronize", [&](const Driver& api) { return api.context_synchronize(); });
}

UNTORCH_RUNTIME cudaMalloc(void** pointer, std::size_t nbytes) {
  return called("cudaMalloc", [&](const Driver& api) -> Result {
    *pointer = nullptr;
    if (nbytes == 0) return kSuccess;
    DevicePtr base = 0;
    set_device(current_device());
    Result code = api.mem_alloc(&base, nbytes);
    if (code == kErrorOutOfMemory) {
      release_unused(current_device());
      code = api.mem_alloc(&base, nbytes);
    }
    *pointer = reinterpret_cast<void*>(base);
    return code;
  });
}

UNTORCH_RUNTIME cudaFree(void* pointer) {
  return destroyed("cudaFree", [&](const Driver& api) -> Result {
    return pointer == nullptr ? kSuccess : api.mem_free(reinterpret_cast<DevicePtr>(pointer));
  });
}

UNTORCH_RUNTIME cudaMemcpyAsync(void* to, const void* from, std::size_t nbytes, int, Stream stream) {
  return called("cudaMemcpyAsync", [&](const Driver& api) -> Result {
    if (nbytes == 0) return kSuccess;
    return api.memcpy_async(reinterpret_cast<DevicePtr>(to), reinterpret_cast<DevicePtr>(from), nbytes, stream);
  });
}

// Waits for the copy alone, not for the device, and never for the legacy stream.
UNTORCH_RUNTIME cudaMemcpy(void* to, const void* from, std::size_t nbytes, int kind) {
  return called("cudaMemcpy", [&](const Driver& api) -> Result {
    if (nbytes == 0) return kSuccess;
    if (kind == kHostToHost) {
      std::memcpy(to, from, nbytes);
      return kSuccess;
    }
    const int device = current_device();
    set_device(device);
    if (kind == kHostToDevice) {
      upload(reinterpret_cast<DevicePtr>(to), from, nbytes, device);
      return kSuccess;
    }
    const Stream stream = thread_stream(device);
    const Result code =
        api.memcpy_async(reinterpret_cast<DevicePtr>(to), reinterpret_cast<DevicePtr>(from), nbytes, stream);
    return code != kSuccess ? code : api.stream_synchronize(stream);
  });
}

UNTORCH_RUNTIME cudaMemsetAsync(void* to, int value, std::size_t nbytes, Stream stream) {
  return called("cudaMemsetAsync", [&](const Driver& api) -> Result {
    if (nbytes == 0) return kSuccess;
    return api.memset_d8_async(reinterpret_cast<DevicePtr>(to), static_cast<unsigned char>(value), nbytes, stream);
  });
}

UNTORCH_RUNTIME cudaEventCreateWithFlags(Event* event, unsigned flags) {
  return called("cudaEventCreate", [&](const Driver& api) {
    set_device(current_device());
    return api.event_create(event, flags);
  });
}
UNTORCH_RUNTIME cudaEventCreate(Event* event) {
  // Model containers only ask whether a run is over: events without a time are cheaper to record.
  return cudaEventCreateWithFlags(event, kEventDisableTiming);
}
UNTORCH_RUNTIME cudaEventDestroy(Event event) {
  return destroyed("cudaEventDestroy", [&](const Driver& api) { return api.event_destroy(event); });
}
UNTORCH_RUNTIME cudaEventQuery(Event event) {
  return called("cudaEventQuery", [&](const Driver& api) { return api.event_query(event); });
}
// A model library asks its events only whether its own work is over. In a captured stream there is none, and waiting
// for an event of a capture would end that: since torch 2.13 a model's first run waits for its constants' folding, also
// where none is to be folded.
UNTORCH_RUNTIME cudaEventRecord(Event event, Stream stream) {
  return called("cudaEventRecord",
                [&](const Driver& api) { return is_capturing(stream) ? kSuccess : api.event_record(event, stream); });
}
UNTORCH_RUNTIME cudaEventSynchronize(Event event) {
  return called("cudaEventSynchronize", [&](const Driver& api) { return api.event_synchronize(event); });
}

UNTORCH_RUNTIME cudaStreamCreateWithFlags(Stream* stream, unsigned flags) {
  return called("cudaStreamCreate", [&](const Driver& api) {
    set_device(current_device());
    return api.stream_create(stream, flags);
  });
}
UNTORCH_RUNTIME cudaStreamDestroy(Stream stream) {
  return destroyed("cudaStreamDestroy", [&](const Driver& api) { return api.stream_destroy(stream); });
}
UNTORCH_RUNTIME cudaStreamSynchronize(Stream stream) {
  return called("cudaStreamSynchronize", [&](const Driver& api) { return api.stream_synchronize(stream); });
}

// cudaPointerAttributes of CUDA 12 and 13: type (0 unregistered, 1 host, 2 device, 3 managed), device, the addresses.
struct PointerAttributes {
  int type;
  int device;
  void* device_pointer;
  void* host_pointer;
  long reserved[8];
};

UNTORCH_RUNTIME cudaPointerGetAttributes(PointerAttributes* attributes, const void* pointer) {
  return called("cudaPointerGetAttributes", [&](const Driver& api) -> Result {
    constexpr int kHostPointer = 4, kIsManaged = 8, kDeviceOrdinal = 9;
    const auto address = reinterpret_cast<DevicePtr>(pointer);
    // CUDA 12's structure ends before the reserved words.
    attributes->type = 0;
    attributes->device = -1;
    attributes->device_pointer = nullptr;
    attributes->host_pointer = const_cast<void*>(pointer);
    unsigned type = 0;
    if (api.pointer_attribute(&type, kPointerMemoryType, address) != kSuccess) return kSuccess;
    unsigned managed = 0;
    (void)api.pointer_attribute(&managed, kIsManaged, address);
    (void)api.pointer_attribute(&attributes->device, kDeviceOrdinal, address);
    attributes->type = managed != 0 ? 3 : static_cast<int>(type);
    attributes->device_pointer = const_cast<void*>(pointer);
    attributes->host_pointer = nullptr;
    if (type == 1 || managed != 0) (void)api.pointer_attribute(&attributes->host_pointer, kHostPointer, address);
    return kSuccess;
  });
}

UNTORCH_RUNTIME cudaGetLastError() {
  const Result code = last_code;
  last_code = kSuccess;
  return code;
}
UNTORCH_RUNTIME cudaPeekAtLastError() { return last_code; }

extern "C" const char* cudaGetErrorString(Result code) {
  const Driver* const api = try_driver(nullptr);
  const char* text = nullptr;
  if (code == kSuccess) return "no error";
  if (api == nullptr || api->error_string(code, &text) != kSuccess || text == nullptr) return "unknown CUDA error";
  return text;
}
extern "C" const char* cudaGetErrorName(Result code) {
  const Driver* const api = try_driver(nullptr);
  const char* text = nullptr;
  if (api == nullptr || api->error_name(code, &text) != kSuccess || text == nullptr) return "cudaErrorUnknown";
  return text;
}

namespace untorch::cuda {
Result note_runtime_error(Result code) noexcept { return note(code); }
}  // namespace untorch::cuda

#define UNTORCH_FOR_MODELS(name) \
  extern "C" UNTORCH_EXPORT decltype(cuda##name) utda##name __attribute__((alias("cuda" #name)));

UNTORCH_FOR_MODELS(DeviceGetAttribute)
UNTORCH_FOR_MODELS(DeviceSynchronize)
UNTORCH_FOR_MODELS(EventCreate)
UNTORCH_FOR_MODELS(EventCreateWithFlags)
UNTORCH_FOR_MODELS(EventDestroy)
UNTORCH_FOR_MODELS(EventQuery)
UNTORCH_FOR_MODELS(EventRecord)
UNTORCH_FOR_MODELS(EventSynchronize)
UNTORCH_FOR_MODELS(Free)
UNTORCH_FOR_MODELS(GetDevice)
UNTORCH_FOR_MODELS(GetDeviceCount)
UNTORCH_FOR_MODELS(GetErrorName)
UNTORCH_FOR_MODELS(GetErrorString)
UNTORCH_FOR_MODELS(GetLastError)
UNTORCH_FOR_MODELS(Malloc)
UNTORCH_FOR_MODELS(Memcpy)
UNTORCH_FOR_MODELS(MemcpyAsync)
UNTORCH_FOR_MODELS(MemsetAsync)
UNTORCH_FOR_MODELS(PeekAtLastError)
UNTORCH_FOR_MODELS(PointerGetAttributes)
UNTORCH_FOR_MODELS(SetDevice)
UNTORCH_FOR_MODELS(StreamCreateWithFlags)
UNTORCH_FOR_MODELS(StreamDestroy)
UNTORCH_FOR_MODELS(StreamSynchronize)
