// The runtime functions that nvcc's host code calls to register and launch kernels, with lazy loading: a file's
// fatbinary is loaded at the first launch of one of its kernels. Loading the library itself calls nothing in CUDA.
#include "cuda/kernel_registry.h"

#include <atomic>
#include <cstddef>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "cuda/device.h"
#include "cuda/profile_timer.h"
#include "cuda/stream.h"

using namespace untorch;
using namespace untorch::cuda;

namespace {

// One fatbinary; libraries belong to no context, so one load serves every device.
struct Image {
  const void* data = nullptr;
  std::mutex mutex;
  std::atomic<Library> library{nullptr};

  Result load(Library* out) {
    Library found = library.load(std::memory_order_acquire);
    if (found == nullptr) {
      const std::lock_guard lock(mutex);
      found = library.load(std::memory_order_relaxed);
      if (found == nullptr) {
        const RelaxedCapture relaxed;
        const Result code = driver().library_load_data(&found, data, nullptr, nullptr, 0, nullptr, nullptr, 0);
        if (code != kSuccess) return code;
        library.store(found, std::memory_order_release);
      }
    }
    *out = found;
    return kSuccess;
  }
};

struct Entry {
  Image* image = nullptr;
  const char* name = nullptr;
  std::atomic<Kernel> kernel{nullptr};

  Result resolve(Kernel* out) {
    Kernel found = kernel.load(std::memory_order_acquire);
    if (found == nullptr) {
      Library library = nullptr;
      Result code = image->load(&library);
      if (code == kSuccess) code = driver().library_kernel(&found, library, name);
      if (code != kSuccess) return code;
      kernel.store(found, std::memory_order_release);
    }
    *out = found;
    return kSuccess;
  }
};

// Filled by constructors when the library is loaded, read-only afterwards; never freed, since kernels may be launched
// at process exit.
struct Registry {
  std::deque<Image> images;
  std::deque<Entry> entries;
  std::unordered_map<const void*, Entry*> by_stub;
};
Registry& registry() {
  static auto& made = *new Registry;
  return made;
}

Entry* find(const void* stub) {
  const auto it = registry().by_stub.find(stub);
  return it == registry().by_stub.end() ? nullptr : it->second;
}

// Layout of what nvcc emits around a fatbinary.
struct FatbinWrapper {
  int magic, version;
  const void* data;
  void* file_name;
};

struct Dim3 {
  unsigned x, y, z;
};

struct Configuration {
  Dim3 grid, block;
  std::size_t shared_bytes;
  Stream stream;
};
thread_local Configuration pushed;

template <class Body>
Result called(Body&& body) noexcept {
  try {
    return note_runtime_error(body(driver()));
  } catch (const Error& e) {
    set_last_error(e.kind(), e.what());
    return note_runtime_error(kErrorNotInitialized);
  } catch (...) {
    return note_runtime_error(kErrorInvalidValue);
  }
}

Result launch(Entry* entry, Dim3 grid, Dim3 block, void** arguments, std::size_t shared_bytes, Stream stream) {
  return called([&](const Driver& api) -> Result {
    if (entry == nullptr) return kErrorNotFound;
    Kernel kernel = nullptr;
    if (const Result code = entry->resolve(&kernel); code != kSuccess) return code;
    // The driver takes a kernel where it takes a function, and picks the context's copy of it.
    return profiled_launch(entry->name, stream, [&] {
      return api.launch_kernel(reinterpret_cast<Function>(kernel), grid.x, grid.y, grid.z, block.x, block.y, block.z,
                               static_cast<unsigned>(shared_bytes), stream, arguments, nullptr);
    });
  });
}

Result function_of(const void* stub, Function* out) {
  Entry* const entry = find(stub);
  if (entry == nullptr) return kErrorNotFound;
  Kernel kernel = nullptr;
  const Result code = entry->resolve(&kernel);
  return code != kSuccess ? code : driver().kernel_function(out, kernel);
}

// cudaFuncAttributes, as far as CUB reads it.
struct FunctionAttributes {
  std::size_t shared_bytes, constant_bytes, local_bytes;
  int max_threads, registers, ptx_version, binary_version, cache_mode, max_dynamic_shared, preferred_carveout;
  int rest[16];
};

}  // namespace

bool untorch::cuda::has_kernels() noexcept { return !registry().images.empty(); }

extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
  Image& image = registry().images.emplace_back();
  image.data = static_cast<const FatbinWrapper*>(wrapper)->data;
  return reinterpret_cast<void**>(&image);
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void** handle, const char* stub, char*, const char* name, int, void*, void*, void*, void*,
                            int*) {
  Entry& entry = registry().entries.emplace_back();
  entry.image = reinterpret_cast<Image*>(handle);
  entry.name = name;
  registry().by_stub.emplace(stub, &entry);
}
// Device variables are reached from device code only.
void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}

unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, std::size_t shared_bytes, Stream stream) {
  pushed = {grid, block, shared_bytes, stream};
  return 0;
}
Result __cudaPopCallConfiguration(Dim3* grid, Dim3* block, std::size_t* shared_bytes, void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared_bytes = pushed.shared_bytes;
  *static_cast<Stream*>(stream) = pushed.stream;
  return kSuccess;
}
Result __cudaGetKernel(Entry** kernel, const void* stub) {
  *kernel = find(stub);
  return *kernel != nullptr ? kSuccess : kErrorNotFound;
}
Result __cudaLaunchKernel(Entry* kernel, Dim3 grid, Dim3 block, void** arguments, std::size_t shared_bytes,
                          Stream stream) {
  return launch(kernel, grid, block, arguments, shared_bytes, stream);
}
Result cudaLaunchKernel(const void* stub, Dim3 grid, Dim3 block, void** arguments, std::size_t shared_bytes,
                        Stream stream) {
  return launch(find(stub), grid, block, arguments, shared_bytes, stream);
}
Result cudaLaunchKernelExC(const LaunchConfig* config, const void* stub, void** arguments) {
  return called([&](const Driver& api) -> Result {
    Entry* const entry = find(stub);
    if (entry == nullptr) return kErrorNotFound;
    Kernel kernel = nullptr;
    if (const Result code = entry->resolve(&kernel); code != kSuccess) return code;
    // cudaLaunchConfig_t holds the shared memory as size_t where the driver's has unsigned.
    struct RuntimeConfig {
      Dim3 grid, block;
      std::size_t shared_bytes;
      Stream stream;
      const LaunchAttribute* attributes;
      unsigned num_attributes;
    };
    const auto& in = *reinterpret_cast<const RuntimeConfig*>(config);
    const LaunchConfig out{in.grid.x,
                           in.grid.y,
                           in.grid.z,
                           in.block.x,
                           in.block.y,
                           in.block.z,
                           static_cast<unsigned>(in.shared_bytes),
                           in.stream,
                           in.attributes,
                           in.num_attributes};
    return profiled_launch(entry->name, in.stream, [&] {
      return api.launch_kernel_ex(&out, reinterpret_cast<Function>(kernel), arguments, nullptr);
    });
  });
}

Result cudaFuncSetAttribute(const void* stub, int attribute, int value) {
  return called([&](const Driver& api) {
    Function function = nullptr;
    const Result code = function_of(stub, &function);
    return code != kSuccess ? code : api.function_set_attribute(function, attribute, value);
  });
}
Result cudaFuncGetAttributes(FunctionAttributes* out, const void* stub) {
  return called([&](const Driver& api) {
    Function function = nullptr;
    Result code = function_of(stub, &function);
    if (code != kSuccess) return code;
    std::memset(out, 0, offsetof(FunctionAttributes, rest));
    int value = 0;
    const auto ask = [&](int attribute) {
      if (code == kSuccess) code = api.function_attribute(&value, attribute, function);
      return value;
    };
    out->max_threads = ask(0);
    out->shared_bytes = static_cast<std::size_t>(ask(1));
    out->constant_bytes = static_cast<std::size_t>(ask(2));
    out->local_bytes = static_cast<std::size_t>(ask(3));
    out->registers = ask(4);
    out->ptx_version = ask(5);
    out->binary_version = ask(6);
    out->cache_mode = ask(7);
    out->max_dynamic_shared = ask(8);
    out->preferred_carveout = ask(9);
    return code;
  });
}
Result cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* stub, int threads,
                                                              std::size_t shared_bytes, unsigned flags) {
  return called([&](const Driver& api) {
    Function function = nullptr;
    const Result code = function_of(stub, &function);
    return code != kSuccess ? code : api.occupancy(blocks, function, threads, shared_bytes, flags);
  });
}
Result cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* stub, int threads,
                                                     std::size_t shared_bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, stub, threads, shared_bytes, 0);
}
}
