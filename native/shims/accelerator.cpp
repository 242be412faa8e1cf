// Device guards, current streams and raw device memory for model libraries. Built always; without a driver every
// function fails and says what is missing.
#include "cuda/device.h"
#include "cuda/memory_pool.h"
#include "cuda/stream.h"
#include "shims/shim.h"

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

using namespace untorch;
using namespace untorch::shims;

struct DeviceGuardOpaque;
using DeviceGuardHandle = DeviceGuardOpaque*;
struct CUDAGuardOpaque;
using CUDAGuardHandle = CUDAGuardOpaque*;
struct CUDAStreamGuardOpaque;
using CUDAStreamGuardHandle = CUDAStreamGuardOpaque*;
struct StreamOpaque;
using StreamHandle = StreamOpaque*;

namespace {

// Puts the thread's context back when it is deleted, whatever the model set in between.
struct Guard {
  std::unique_ptr<cuda::DeviceGuard> device;
};

struct StreamGuard {
  cuda::DeviceGuard device;
  cuda::StreamScope stream;
  StreamGuard(int index, cuda::Stream handle) : device(index), stream(index, handle) {}
};

struct StreamReference {
  int device;
  cuda::Stream stream;
};

int index_or_current(std::int32_t index) { return index < 0 ? cuda::current_device() : index; }

template <class Handle>
AOTITorchError create_guard(const char* op, std::int32_t device_index, Handle* ret) {
  return guarded(op, [&] {
    check(ret != nullptr, op, ": output pointer is null");
    auto guard = std::make_unique<Guard>();
    guard->device = std::make_unique<cuda::DeviceGuard>(index_or_current(device_index));
    *ret = reinterpret_cast<Handle>(guard.release());
  });
}

template <class Handle>
AOTITorchError delete_guard(Handle guard) {
  delete reinterpret_cast<Guard*>(guard);
  return 0;
}

template <class Handle>
AOTITorchError set_index(const char* op, Handle guard, std::int32_t device_index) {
  return guarded(op, [&] {
    check(guard != nullptr, op, ": the guard is null");
    cuda::set_device(device_index);
  });
}

// Raw memory from the pool: model libraries know it by its address alone.
class RawBlocks {
 public:
  void* add(StorageRef storage) {
    void* const data = storage->data();
    const std::lock_guard lock(mutex_);
    blocks_.insert_or_assign(data, std::move(storage));
    return data;
  }
  bool remove(void* data) {
    StorageRef gone;
    const std::lock_guard lock(mutex_);
    const auto it = blocks_.find(data);
    if (it == blocks_.end()) return false;
    gone = std::move(it->second);
    blocks_.erase(it);
    return true;
  }
  static RawBlocks& instance() {
    static auto& made = *new RawBlocks;
    return made;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<void*, StorageRef> blocks_;
};

}  // namespace

UNTORCH_SHIM aoti_torch_create_device_guard(std::int32_t device_index, DeviceGuardHandle* ret) {
  return create_guard("create_device_guard", device_index, ret);
}
UNTORCH_SHIM aoti_torch_delete_device_guard(DeviceGuardHandle guard) { return delete_guard(guard); }
UNTORCH_SHIM aoti_torch_device_guard_set_index(DeviceGuardHandle guard, std::int32_t device_index) {
  return set_index("device_guard_set_index", guard, device_index);
}
UNTORCH_SHIM aoti_torch_create_cuda_guard(std::int32_t device_index, CUDAGuardHandle* ret) {
  return create_guard("create_cuda_guard", device_index, ret);
}
UNTORCH_SHIM aoti_torch_delete_cuda_guard(CUDAGuardHandle guard) { return delete_guard(guard); }
UNTORCH_SHIM aoti_torch_cuda_guard_set_index(CUDAGuardHandle guard, std::int32_t device_index) {
  return set_index("cuda_guard_set_index", guard, device_index);
}

UNTORCH_SHIM aoti_torch_create_cuda_stream_guard(void* stream, std::int32_t device_index, CUDAStreamGuardHandle* ret) {
  return guarded("create_cuda_stream_guard", [&] {
    check(ret != nullptr, "create_cuda_stream_guard: output pointer is null");
    *ret = reinterpret_cast<CUDAStreamGuardHandle>(
        new StreamGuard(index_or_current(device_index), static_cast<cuda::Stream>(stream)));
  });
}
UNTORCH_SHIM aoti_torch_delete_cuda_stream_guard(CUDAStreamGuardHandle guard) {
  delete reinterpret_cast<StreamGuard*>(guard);
  return 0;
}
UNTORCH_SHIM aoti_torch_get_current_cuda_stream(std::int32_t device_index, void** ret_stream) {
  return guarded("get_current_cuda_stream", [&] {
    check(ret_stream != nullptr, "get_current_cuda_stream: output pointer is null");
    *ret_stream = cuda::current_stream(index_or_current(device_index));
  });
}
UNTORCH_SHIM torch_set_current_cuda_stream(void* stream, std::int32_t device_index) {
  return guarded("set_current_cuda_stream", [&] {
    cuda::exchange_current_stream(index_or_current(device_index), {static_cast<cuda::Stream>(stream), true});
  });
}
UNTORCH_SHIM torch_cuda_stream_synchronize(void* stream, std::int32_t device_index) {
  return guarded("cuda_stream_synchronize", [&] {
    const cuda::DeviceGuard guard(index_or_current(device_index));
    cuda::check_driver(cuda::driver().stream_synchronize(static_cast<cuda::Stream>(stream)), "cuda_stream_synchronize");
  });
}
// One further stream a thread and device: untorch keeps no pool of streams, work is spread by the caller's threads.
UNTORCH_SHIM torch_get_cuda_stream_from_pool(bool, std::int32_t device_index, void** ret_stream) {
  return guarded("get_cuda_stream_from_pool", [&] {
    check(ret_stream != nullptr, "get_cuda_stream_from_pool: output pointer is null");
    *ret_stream = cuda::thread_stream(index_or_current(device_index));
  });
}

UNTORCH_SHIM aoti_torch_get_current_stream(std::int32_t device_index, StreamHandle* ret_stream) {
  return guarded("get_current_stream", [&] {
    check(ret_stream != nullptr, "get_current_stream: output pointer is null");
    const int device = index_or_current(device_index);
    *ret_stream = reinterpret_cast<StreamHandle>(new StreamReference{device, cuda::current_stream(device)});
  });
}
UNTORCH_SHIM aoti_torch_delete_stream(StreamHandle stream) {
  delete reinterpret_cast<StreamReference*>(stream);
  return 0;
}
UNTORCH_SHIM aoti_torch_stream_id(StreamHandle stream, std::int64_t* ret) {
  return guarded("stream_id", [&] {
    check(stream != nullptr && ret != nullptr, "stream_id: an argument is null");
    *ret = reinterpret_cast<std::intptr_t>(reinterpret_cast<StreamReference*>(stream)->stream);
  });
}
UNTORCH_SHIM torch_stream_native_handle(StreamHandle stream, void** ret) {
  return guarded("stream_native_handle", [&] {
    check(stream != nullptr && ret != nullptr, "stream_native_handle: an argument is null");
    *ret = reinterpret_cast<StreamReference*>(stream)->stream;
  });
}
UNTORCH_SHIM aoti_torch_get_current_device_index(std::int32_t* ret) {
  return guarded("get_current_device_index", [&] {
    check(ret != nullptr, "get_current_device_index: output pointer is null");
    *ret = cuda::current_device();
  });
}

UNTORCH_SHIM aoti_torch_cuda_caching_allocator_raw_alloc(std::uint64_t nbytes, void** ret_ptr) {
  return guarded("cuda_caching_allocator_raw_alloc", [&] {
    check(ret_ptr != nullptr, "cuda_caching_allocator_raw_alloc: output pointer is null");
    *ret_ptr = RawBlocks::instance().add(cuda::allocate(nbytes, cuda::current_device()));
  });
}
UNTORCH_SHIM aoti_torch_cuda_caching_allocator_raw_delete(void* ptr) {
  return guarded("cuda_caching_allocator_raw_delete", [&] {
    check(ptr == nullptr || RawBlocks::instance().remove(ptr),
          "cuda_caching_allocator_raw_delete: the address was not allocated here");
  });
}

// The error of a failed runtime call in a model library: a text with file and line, which the caller frees with the
// function below, or null.
UNTORCH_SHIM torch_c10_cuda_check_msg(std::int32_t err, const char* filename, const char* function_name,
                                      std::uint32_t line_number, bool /*include_device_assertions*/, char** error_msg) {
  return guarded("c10_cuda_check_msg", [&] {
    check(error_msg != nullptr, "c10_cuda_check_msg: output pointer is null");
    *error_msg = nullptr;
    if (err == cuda::kSuccess) return;
    const std::string text = "CUDA error: " + cuda::error_text(err) + ", in " +
                             (function_name != nullptr ? function_name : "an unnamed function") + " (" +
                             (filename != nullptr ? filename : "unknown file") + ":" + std::to_string(line_number) +
                             ")";
    *error_msg = strdup(text.c_str());
    if (*error_msg == nullptr) throw std::bad_alloc();
  });
}
extern "C" UNTORCH_EXPORT void torch_c10_cuda_free_error_msg(char* error_msg) { std::free(error_msg); }
