// A fake cuDNN for the fake driver: every convolution has one algorithm, a kernel named "convolve" whose parameters are
// its operands' addresses and what FAKE_DNN asks for:
//   plain      nothing else; of 4096 bytes of workspace the kernel takes an address in the middle
//   cluster    it is launched in clusters of two
//   shared     it has 64 KiB of shared memory, which is allowed during the call alone
//   zeros      the workspace is filled with zeros before; ones: with 255
//   distance   how far the output is from the input, in place of one's address
//   halves     the output's address, in two words
//   low        the lower half of it beside another number
//   own        an address in memory of this library
//   half       its parameters differ from call to call
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/dnn_library.h"

using namespace untorch::cuda;

namespace untorch::cuda::dnn {
struct DnnContext {
  Stream stream = nullptr;
};
struct DnnDescriptor {
  int kind = 0;
  std::map<std::int64_t, DevicePtr> operands;  // of a variant pack
  std::vector<std::int64_t> ids;
  DevicePtr workspace = 0;
};
}  // namespace untorch::cuda::dnn

namespace {

std::string mode() {
  const char* const given = std::getenv("FAKE_DNN");
  return given == nullptr ? "plain" : given;
}

template <class T>
T* driver_function(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  return reinterpret_cast<T*>(dlsym(library, name));
}

int executions = 0;

Function kernel() {
  static Function found = [] {
    Kernel made = nullptr;
    driver_function<Result(Kernel*, Library, const char*)>("cuLibraryGetKernel")(&made, nullptr, "convolve");
    return reinterpret_cast<Function>(made);
  }();
  return found;
}

DevicePtr own_memory() {
  static const DevicePtr made = [] {
    DevicePtr address = 0;
    driver_function<Result(DevicePtr*, std::size_t)>("cuMemAlloc_v2")(&address, 512);
    return address;
  }();
  return made;
}

}  // namespace

extern "C" {

int fake_dnn_executions() { return executions; }

std::size_t cudnnGetVersion() { return 91900; }
const char* cudnnGetErrorString(dnn::Status) { return "of the fake cuDNN"; }
dnn::Status cudnnCreate(dnn::Handle* handle) { return *handle = new dnn::DnnContext, dnn::kOk; }
dnn::Status cudnnSetStream(dnn::Handle handle, Stream stream) { return handle->stream = stream, dnn::kOk; }
dnn::Status cudnnBackendCreateDescriptor(int kind, dnn::RawDescriptor* descriptor) {
  return *descriptor = new dnn::DnnDescriptor{kind, {}, {}, 0}, dnn::kOk;
}
dnn::Status cudnnBackendDestroyDescriptor(dnn::RawDescriptor descriptor) { return delete descriptor, dnn::kOk; }
dnn::Status cudnnBackendFinalize(dnn::RawDescriptor) { return dnn::kOk; }
dnn::Status cudnnBackendSetAttribute(dnn::RawDescriptor descriptor, int name, int, std::int64_t count,
                                     const void* values) {
  namespace attribute = dnn::attribute;
  const auto* const words = static_cast<const std::int64_t*>(values);
  if (name == attribute::kPackIds.name) descriptor->ids.assign(words, words + count);
  if (name == attribute::kPackWorkspace.name) std::memcpy(&descriptor->workspace, values, 8);
  for (std::int64_t i = 0; name == attribute::kPackPointers.name && i < count; ++i) {
    descriptor->operands[descriptor->ids[static_cast<std::size_t>(i)]] = static_cast<DevicePtr>(words[i]);
  }
  return dnn::kOk;
}
dnn::Status cudnnBackendGetAttribute(dnn::RawDescriptor, int name, int, std::int64_t, std::int64_t* count,
                                     void* values) {
  namespace attribute = dnn::attribute;
  *count = name == attribute::kEngineNotes.name || name == attribute::kEngineBehavior.name ? 0 : 1;
  const std::int64_t workspace = 4096;
  if (name == attribute::kPlanWorkspace.name) std::memcpy(values, &workspace, sizeof workspace);
  return dnn::kOk;
}
dnn::Status cudnnBackendExecute(dnn::Handle handle, dnn::RawDescriptor, dnn::RawDescriptor pack) {
  const std::string what = mode();
  ++executions;
  std::vector<DevicePtr> words;
  for (const std::int64_t id : pack->ids) words.push_back(pack->operands.at(id));
  words.push_back(pack->workspace + 2048);
  words.push_back(DevicePtr{7} << 32 | 7);  // sizes
  constexpr std::int64_t kInput = 1, kOutput = 3;
  const DevicePtr input = pack->operands.at(kInput), output = pack->operands.at(kOutput);
  if (what == "distance") words.push_back(output - input);
  if (what == "halves") words.push_back(output << 32), words.push_back(output >> 32);
  if (what == "low") words.push_back(DevicePtr{5} << 32 | (output & 0xffffffff));
  if (what == "own") words.push_back(own_memory());
  if (what == "half") words.push_back(static_cast<DevicePtr>(executions));
  if (what == "zeros" || what == "ones") {
    driver_function<Result(DevicePtr, unsigned char, std::size_t, Stream)>("cuMemsetD8Async")(
        pack->workspace, what == "ones" ? 255 : 0, 4096, handle->stream);
  }
  LaunchAttribute cluster{kClusterDimension, {{2, 1, 1}}};
  const unsigned shared = what == "shared" ? 64u << 10 : 0u;
  const LaunchConfig config{9, 1, 1, 128, 1, 1, shared, handle->stream, &cluster, what == "cluster" ? 1u : 0u};
  std::size_t bytes = words.size() * sizeof words[0];
  void* extra[5] = {reinterpret_cast<void*>(1), words.data(), reinterpret_cast<void*>(2), &bytes, nullptr};
  const auto launch = driver_function<Result(const LaunchConfig*, Function, void**, void**)>("cuLaunchKernelEx");
  const auto limit = driver_function<Result(Function, int, int)>("cuFuncSetAttribute");
  limit(kernel(), kMaxDynamicSharedBytes, static_cast<int>(shared));
  const Result result = launch(&config, kernel(), nullptr, extra);
  limit(kernel(), kMaxDynamicSharedBytes, 0);
  return result == kSuccess ? dnn::kOk : 5000;
}

}  // extern "C"
