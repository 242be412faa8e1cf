// A fake CUDA driver, so that loading can be tested without a GPU: device memory is host memory, enqueued work is done
// at once, and kernel launches are recorded instead of run. It has two GPUs with an H200's attributes, each with
// FAKE_GPU_MEMORY bytes and of FAKE_GPU_CAPABILITY; with FAKE_GPU_TAKEN they have no room for a context. After
// fake_fail(code) everything that enqueues, waits, asks or frees returns that code. Graphs and captures are
// refused; with FAKE_GPU_GRAPHS a capture gives a graph without nodes, and what is captured is recorded like any
// launch. With FAKE_GPU_NODES, too, it gives one of the kernels and fills that were captured, which do nothing else.
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "cuda/driver.h"

using namespace untorch::cuda;

namespace {

constexpr Result kNotSupported = 801, kErrorInvalidHandle = 400;
constexpr int kDevices = 2;

struct Block {
  std::size_t bytes;
  int device;
};
// A kernel with its parameters in one buffer, or a fill.
struct Node {
  Function function = nullptr;
  LaunchConfig config{};
  std::vector<LaunchAttribute> attributes;
  std::vector<std::byte> arguments;
  std::size_t bytes = 0;
  void* extra[5] = {};
  MemsetParams fill{};
};
struct State {
  std::mutex mutex;
  std::map<DevicePtr, Block> blocks;
  std::size_t live[kDevices] = {};
  std::deque<std::string> names;  // of kernels; a handle is the address of its name
  std::string launches;           // a line each
  std::string events;             // what was enqueued or waited for, with its stream, a line each
  std::string tensor_maps;        // arguments of cuTensorMapEncodeTiled, a line each
  int pdl = 0;
  int uploads = 0;  // copies from the CPU                    // programmatic dependent launches
  int modules_loaded = 0, modules_unloaded = 0;
  std::uintptr_t handles = 0;                       // of streams and events
  std::map<Event, double> recorded;                 // milliseconds of this clock
  std::vector<Event> captured;                      // recorded in the capture that runs
  std::map<const void*, std::vector<Event>> nodes;  // of a graph or an executable one: a replay records them
  Stream capturing = nullptr;
  std::set<Event> in_capture;
  std::deque<Node> kernels;                    // of all graphs
  std::map<Graph, std::vector<Node*>> graphs;  // with FAKE_GPU_NODES
  std::vector<Node*> in_graph;                 // of the capture that runs
  std::map<Function, int> shared_limits;       // of a launch's dynamic shared memory
  std::string calls;                           // kernels outside of captures with one buffer, a line each
  Result fatal = kSuccess;
};
State& state() {
  static auto& made = *new State;
  return made;
}
char contexts[kDevices];
thread_local int current = -1;

std::size_t memory() {
  const char* const text = std::getenv("FAKE_GPU_MEMORY");
  return text == nullptr ? std::size_t{4} << 30 : std::strtoull(text, nullptr, 10);
}
int capability() {
  const char* const text = std::getenv("FAKE_GPU_CAPABILITY");
  return text == nullptr ? 90 : std::atoi(text);
}
bool has_nodes() { return std::getenv("FAKE_GPU_NODES") != nullptr; }
bool has_graphs() { return std::getenv("FAKE_GPU_GRAPHS") != nullptr; }
template <class Handle>
Result make(Handle* out) {
  const std::lock_guard lock(state().mutex);
  *out = reinterpret_cast<Handle>(++state().handles << 4);
  return kSuccess;
}
template <class Handle>
Result named(Handle* out, const char* name) {
  const std::lock_guard lock(state().mutex);
  *out = reinterpret_cast<Handle>(&state().names.emplace_back(name));
  return kSuccess;
}
// One word, and a stream as a number.
template <class Handle>
Result noted(const char* word, Handle handle) {
  const std::lock_guard lock(state().mutex);
  state().events += word + (" " + std::to_string(reinterpret_cast<std::uintptr_t>(handle))) + "\n";
  return state().fatal;
}
Result launched(Function function, Stream stream) {
  {
    const std::lock_guard lock(state().mutex);
    state().launches += *reinterpret_cast<const std::string*>(function) + "\n";
  }
  return noted("launch", stream);
}
Result copied(void* to, const void* from, std::size_t bytes, Stream stream) {
  std::memcpy(to, from, bytes);
  return noted("copy", stream);
}
// The node that a launch or fill on this stream becomes; null when it is not captured, or graphs have no nodes.
Node* captured_on(Stream stream) {
  State& s = state();
  if (!has_nodes() || stream == nullptr || s.capturing != stream) return nullptr;
  return s.in_graph.emplace_back(&s.kernels.emplace_back());
}
double milliseconds() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
void* at(DevicePtr pointer) { return reinterpret_cast<void*>(pointer); }

}  // namespace

extern "C" {

// For tests: what was launched so far, and what was enqueued and waited for, a line each; the bytes that a GPU holds;
// and its block number `index`, 0 bytes where there is none.
const char* fake_events() { return state().events.c_str(); }
const char* fake_tensor_maps() { return state().tensor_maps.c_str(); }
void fake_fail(Result code) { state().fatal = code; }
int fake_pdl() { return state().pdl; }
int fake_uploads() { return state().uploads; }
int fake_modules_loaded() { return state().modules_loaded; }
int fake_modules_unloaded() { return state().modules_unloaded; }
// Of each launch with one buffer: the kernel, its stream, its grid and cluster, and the words of the buffer.
const char* fake_calls() { return state().calls.c_str(); }
const char* fake_launches() { return state().launches.c_str(); }
std::size_t fake_live_bytes(int device) { return state().live[device]; }

std::size_t fake_block(int device, int index, const void** data) {
  for (const auto& [pointer, block] : state().blocks) {
    if (block.device != device || index-- > 0) continue;
    *data = at(pointer);
    return block.bytes;
  }
  return 0;
}

Result cuInit(unsigned) {
  const char* const given = std::getenv("FAKE_GPU_INIT");
  return given == nullptr ? kSuccess : std::atoi(given);
}
Result cuDriverGetVersion(int* version) {
  const char* const given = std::getenv("FAKE_GPU_DRIVER");
  return *version = given == nullptr ? 13000 : std::atoi(given), kSuccess;
}
Result cuGetErrorName(Result error, const char** text) {
  return *text = error == kErrorOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR", kSuccess;
}
Result cuGetErrorString(Result, const char** text) { return *text = "of the fake driver", kSuccess; }
Result cuDeviceGetCount(int* count) { return *count = kDevices, kSuccess; }
Result cuDeviceGet(DeviceId* device, int ordinal) { return *device = ordinal, kSuccess; }
Result cuDeviceGetName(char* name, int length, DeviceId) {
  std::strncpy(name, "Fake H200", static_cast<std::size_t>(length));
  return kSuccess;
}
Result cuDeviceGetAttribute(int* value, int attribute, DeviceId) {
  switch (attribute) {
    case kAttributeMultiprocessorCount:
      *value = 132;
      break;
    case kAttributeL2CacheSize:
      *value = 60 << 20;
      break;
    case kAttributeMaxThreadsPerMultiprocessor:
      *value = 2048;
      break;
    case kAttributeComputeCapabilityMajor:
      *value = capability() / 10;
      break;
    case kAttributeComputeCapabilityMinor:
      *value = capability() % 10;
      break;
    case kAttributeMaxSharedMemoryPerBlockOptin:
      *value = 232448;
      break;
    default:
      *value = 0;
  }
  return kSuccess;
}
Result cuDeviceTotalMem_v2(std::size_t* bytes, DeviceId) { return *bytes = memory(), kSuccess; }
Result cuDevicePrimaryCtxRetain(Context* context, DeviceId device) {
  if (std::getenv("FAKE_GPU_TAKEN") != nullptr) return kErrorOutOfMemory;
  return *context = reinterpret_cast<Context>(&contexts[device]), kSuccess;
}
Result cuCtxGetCurrent(Context* context) {
  return *context = current < 0 ? nullptr : reinterpret_cast<Context>(&contexts[current]), kSuccess;
}
Result cuCtxSetCurrent(Context context) {
  return current = context == nullptr ? -1 : static_cast<int>(reinterpret_cast<char*>(context) - contexts), kSuccess;
}
Result cuCtxGetDevice(DeviceId* device) { return *device = current, kSuccess; }
Result cuCtxSynchronize() { return noted("synchronize_device", &contexts[0]); }

Result cuMemAlloc_v2(DevicePtr* pointer, std::size_t bytes) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (current < 0) return kErrorInvalidValue;
  if (s.live[current] + bytes > memory()) return kErrorOutOfMemory;
  void* const made = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
  if (made == nullptr) return kErrorOutOfMemory;
  *pointer = reinterpret_cast<DevicePtr>(made);
  s.blocks[*pointer] = {bytes, current};
  s.live[current] += bytes;
  return kSuccess;
}
Result cuMemFree_v2(DevicePtr pointer) {
  State& s = state();
  if (s.fatal != kSuccess) return s.fatal;
  const std::lock_guard lock(s.mutex);
  const auto it = s.blocks.find(pointer);
  if (it == s.blocks.end()) return kErrorInvalidValue;
  s.live[it->second.device] -= it->second.bytes;
  s.blocks.erase(it);
  std::free(at(pointer));
  return kSuccess;
}
Result cuMemGetInfo_v2(std::size_t* free_bytes, std::size_t* total_bytes) {
  const std::lock_guard lock(state().mutex);
  *total_bytes = memory();
  *free_bytes = memory() - state().live[current < 0 ? 0 : current];
  return state().fatal;
}
Result cuMemHostAlloc(void** pointer, std::size_t bytes, unsigned) {
  *pointer = std::calloc(1, bytes);
  return *pointer == nullptr ? kErrorOutOfMemory : kSuccess;
}
Result cuMemFreeHost(void* pointer) { return std::free(pointer), kSuccess; }
Result cuMemHostRegister_v2(void*, std::size_t, unsigned) { return kSuccess; }
Result cuMemHostUnregister(void*) { return kSuccess; }
Result cuPointerGetAttribute(void* value, int attribute, DevicePtr pointer) {
  constexpr int kDeviceOrdinal = 9, kDeviceMemory = 2;
  const std::lock_guard lock(state().mutex);
  auto it = state().blocks.upper_bound(pointer);
  if (it == state().blocks.begin() || pointer >= (--it)->first + it->second.bytes) return kErrorInvalidValue;
  int found = 0;
  if (attribute == kPointerMemoryType) found = kDeviceMemory;
  if (attribute == kDeviceOrdinal) found = it->second.device;
  std::memcpy(value, &found, sizeof found);
  return kSuccess;
}
Result cuMemcpyAsync(DevicePtr to, DevicePtr from, std::size_t bytes, Stream stream) {
  return copied(at(to), at(from), bytes, stream);
}
Result cuMemcpyHtoDAsync_v2(DevicePtr to, const void* from, std::size_t bytes, Stream stream) {
  ++state().uploads;
  return copied(at(to), from, bytes, stream);
}
Result cuMemcpyDtoHAsync_v2(void* to, DevicePtr from, std::size_t bytes, Stream stream) {
  return copied(to, at(from), bytes, stream);
}
Result cuMemsetD8Async(DevicePtr to, unsigned char value, std::size_t count, Stream stream) {
  {
    const std::lock_guard lock(state().mutex);
    if (Node* const node = captured_on(stream); node != nullptr) {
      return node->fill = {to, 0, value, 1, count, 1}, kSuccess;
    }
  }
  std::memset(at(to), value, count);
  return noted("fill", stream);
}

Result cuStreamCreate(Stream* stream, unsigned) { return make(stream); }
Result cuStreamDestroy_v2(Stream) { return state().fatal; }
Result cuStreamSynchronize(Stream stream) { return noted("synchronize", stream); }
Result cuStreamWaitEvent(Stream stream, Event, unsigned) { return noted("wait", stream); }
Result cuStreamGetId(Stream stream, unsigned long long* id) {
  return *id = reinterpret_cast<std::uintptr_t>(stream), kSuccess;
}
Result cuStreamIsCapturing(Stream stream, int* status) {
  const std::lock_guard lock(state().mutex);
  return *status = state().capturing == stream && stream != nullptr ? kCaptureActive : 0, kSuccess;
}
Result cuStreamGetCaptureInfo_v2(Stream, int* status, std::uint64_t*, Graph*, const GraphNode**, std::size_t*) {
  return *status = 0, kSuccess;
}
Result cuThreadExchangeStreamCaptureMode(int*) { return kSuccess; }
Result cuEventCreate(Event* event, unsigned) { return make(event); }
Result cuEventDestroy_v2(Event) { return state().fatal; }
Result cuEventRecord(Event event, Stream stream) {
  {
    const std::lock_guard lock(state().mutex);
    state().recorded[event] = milliseconds();
    if (state().capturing == stream && stream != nullptr) {
      state().in_capture.insert(event);
    } else {
      state().in_capture.erase(event);
    }
  }
  return noted("record", stream);
}
// What is captured has its time from the replay.
Result cuEventRecordWithFlags(Event event, Stream stream, unsigned flags) {
  if (flags != 1) return kErrorInvalidValue;
  {
    const std::lock_guard lock(state().mutex);
    state().captured.push_back(event);
  }
  return noted("record_external", stream);
}
Result cuEventElapsedTime(float* elapsed, Event begin, Event end) {
  const std::lock_guard lock(state().mutex);
  const auto first = state().recorded.find(begin), last = state().recorded.find(end);
  if (first == state().recorded.end() || last == state().recorded.end()) return kErrorInvalidHandle;
  return *elapsed = static_cast<float>(last->second - first->second), kSuccess;
}
Result cuFuncGetName(const char** name, Function function) {
  return *name = reinterpret_cast<const std::string*>(function)->c_str(), kSuccess;
}
Result cuEventQuery(Event) { return state().fatal; }
// What a captured stream recorded last cannot be waited for.
Result cuEventSynchronize(Event event) {
  constexpr Result kErrorCapturedEvent = 907;
  {
    const std::lock_guard lock(state().mutex);
    if (state().in_capture.contains(event)) return kErrorCapturedEvent;
  }
  return noted("synchronize_event", event);
}

Result cuModuleLoadData(Module* module, const void*) {
  ++state().modules_loaded;
  return make(module);
}
Result cuModuleUnload(Module) {
  ++state().modules_unloaded;
  return kSuccess;
}
Result cuModuleGetFunction(Function* function, Module, const char* name) { return named(function, name); }
Result cuLibraryLoadData(Library* library, const void*, int*, void**, unsigned, int*, void**, unsigned) {
  return make(library);
}
Result cuLibraryGetKernel(Kernel* kernel, Library, const char* name) { return named(kernel, name); }
Result cuKernelGetFunction(Function* function, Kernel kernel) {
  return *function = reinterpret_cast<Function>(kernel), kSuccess;
}
Result cuFuncSetAttribute(Function function, int attribute, int value) {
  const std::lock_guard lock(state().mutex);
  if (attribute == kMaxDynamicSharedBytes) state().shared_limits[function] = value;
  return kSuccess;
}
Result cuFuncGetAttribute(int* value, int attribute, Function function) {
  const std::lock_guard lock(state().mutex);
  return *value = attribute == kMaxDynamicSharedBytes ? state().shared_limits[function] : 0, kSuccess;
}
Result cuFuncGetParamInfo(Function, std::size_t, std::size_t*, std::size_t*) { return kErrorInvalidValue; }
Result cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, Function, int, std::size_t, unsigned) {
  return *blocks = 1, kSuccess;
}
Result cuLaunchKernel(Function function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                      Stream stream, void**, void**) {
  return launched(function, stream);
}
Result cuLaunchKernelEx(const LaunchConfig* config, Function function, void**, void** extra) {
  constexpr int kProgrammaticStreamSerialization = 6;
  const std::span<const LaunchAttribute> attributes(config->attributes, config->num_attributes);
  std::string cluster = "1";
  for (const LaunchAttribute& attribute : attributes) {
    if (attribute.id == kProgrammaticStreamSerialization && attribute.value.words[0] == 1) ++state().pdl;
    if (attribute.id == kClusterDimension) cluster = std::to_string(attribute.value.words[0]);
  }
  if (extra == nullptr) return launched(function, config->stream);
  const auto* const bytes = static_cast<const std::byte*>(extra[1]);
  const std::span<const std::byte> buffer(bytes, *static_cast<const std::size_t*>(extra[3]));
  const std::lock_guard lock(state().mutex);
  if (Node* const node = captured_on(config->stream); node != nullptr) {
    node->function = function, node->config = *config;
    node->attributes.assign(attributes.begin(), attributes.end());
    node->arguments.assign(buffer.begin(), buffer.end());
    node->bytes = buffer.size();
    std::memcpy(node->extra, extra, sizeof node->extra);
    node->extra[1] = node->arguments.data(), node->extra[3] = &node->bytes;
    return kSuccess;
  }
  constexpr unsigned kAlwaysAllowed = 48 << 10;
  if (config->shared_bytes > kAlwaysAllowed &&
      static_cast<int>(config->shared_bytes) > state().shared_limits[function]) {
    return kErrorInvalidValue;
  }
  std::string line = *reinterpret_cast<const std::string*>(function);
  line += " " + std::to_string(reinterpret_cast<std::uintptr_t>(config->stream));
  line += " " + std::to_string(config->grid_x) + " " + cluster;
  for (std::size_t byte = 0; byte + 8 <= buffer.size(); byte += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, buffer.data() + byte, 8);
    line += " " + std::to_string(word);
  }
  state().calls += line + "\n";
  return state().fatal;
}

// Refuses what the driver refuses: addresses and strides that are no multiples of 16 bytes, strides from 2^40 on, box
// dimensions above 256.
Result cuTensorMapEncodeTiled(void*, int type, std::uint32_t rank, void* address, const std::uint64_t* sizes,
                              const std::uint64_t* strides, const std::uint32_t* box, const std::uint32_t*, int,
                              int swizzle, int, int) {
  if (rank < 1 || rank > 5 || reinterpret_cast<std::uintptr_t>(address) % 16 != 0) return kErrorInvalidValue;
  std::string line = std::to_string(type);
  for (std::uint32_t i = 0; i < rank; ++i) {
    if (sizes[i] == 0 || sizes[i] > std::uint64_t{1} << 32) return kErrorInvalidValue;
    line += " " + std::to_string(sizes[i]);
  }
  for (std::uint32_t i = 0; i + 1 < rank; ++i) {
    if (strides[i] == 0 || strides[i] % 16 != 0 || strides[i] >> 40 != 0) return kErrorInvalidValue;
    line += " " + std::to_string(strides[i]);
  }
  for (std::uint32_t i = 0; i < rank; ++i) {
    if (box[i] == 0 || box[i] > 256) return kErrorInvalidValue;
    line += " " + std::to_string(box[i]);
  }
  const std::lock_guard lock(state().mutex);
  state().tensor_maps += line + " " + std::to_string(swizzle) + "\n";
  return kSuccess;
}

Result cuStreamBeginCapture_v2(Stream stream, int) {
  const std::lock_guard lock(state().mutex);
  if (!has_graphs()) return kNotSupported;
  return state().capturing = stream, kSuccess;
}
Result cuStreamEndCapture(Stream, Graph* graph) {
  if (!has_graphs()) return kNotSupported;
  (void)make(graph);
  const std::lock_guard lock(state().mutex);
  state().capturing = nullptr;
  state().nodes[*graph].swap(state().captured);
  state().captured.clear();
  state().graphs[*graph].swap(state().in_graph);
  state().in_graph.clear();
  return kSuccess;
}
Result cuGraphInstantiateWithFlags(GraphExec* exec, Graph graph, unsigned long long) {
  if (!has_graphs()) return kNotSupported;
  (void)make(exec);
  const std::lock_guard lock(state().mutex);
  state().nodes[*exec] = state().nodes[graph];
  return kSuccess;
}
Result cuGraphLaunch(GraphExec exec, Stream stream) {
  if (!has_graphs()) return kNotSupported;
  {
    const std::lock_guard lock(state().mutex);
    for (const Event event : state().nodes[exec]) state().recorded[event] = milliseconds();
  }
  return noted("replay", stream);
}
Result cuGraphExecDestroy(GraphExec) { return has_graphs() ? kSuccess : kNotSupported; }
Result cuGraphDestroy(Graph) { return has_graphs() ? kSuccess : kNotSupported; }
Result cuGraphGetNodes(Graph graph, GraphNode* nodes, std::size_t* count) {
  if (!has_graphs()) return kNotSupported;
  const std::vector<Node*>& all = state().graphs[graph];
  for (std::size_t i = 0; nodes != nullptr && i < all.size(); ++i) nodes[i] = reinterpret_cast<GraphNode>(all[i]);
  return *count = all.size(), kSuccess;
}
Result cuGraphGetRootNodes(Graph graph, GraphNode*, std::size_t* count) {
  return *count = state().graphs[graph].empty() ? 0 : 1, kSuccess;
}
// One after the other; FAKE_GPU_BRANCHES: the first one has two behind it.
Result cuGraphNodeGetDependentNodes(GraphNode, GraphNode*, std::size_t* count) {
  return *count = std::getenv("FAKE_GPU_BRANCHES") != nullptr ? 2 : 1, kSuccess;
}
Result cuGraphNodeGetType(GraphNode node, int* type) {
  constexpr int kKernel = 0, kFill = 2;
  return *type = reinterpret_cast<const Node*>(node)->function != nullptr ? kKernel : kFill, kSuccess;
}
Result cuGraphKernelNodeGetParams_v2(GraphNode node, KernelNodeParams* params) {
  auto& kernel = *reinterpret_cast<Node*>(node);
  const LaunchConfig& c = kernel.config;
  *params = {kernel.function, c.grid_x,       c.grid_y, c.grid_z,     c.block_x, c.block_y,
             c.block_z,       c.shared_bytes, nullptr,  kernel.extra, nullptr,   nullptr};
  return kSuccess;
}
Result cuGraphKernelNodeGetAttribute(GraphNode node, int id, LaunchAttributeValue* value) {
  *value = {};
  for (const LaunchAttribute& attribute : reinterpret_cast<const Node*>(node)->attributes) {
    if (attribute.id == id) *value = attribute.value;
  }
  return kSuccess;
}
Result cuGraphMemsetNodeGetParams(GraphNode node, MemsetParams* params) {
  return *params = reinterpret_cast<const Node*>(node)->fill, kSuccess;
}

#define REFUSED(name) \
  Result name() { return kNotSupported; }
REFUSED(cuStreamWriteValue64_v2)
REFUSED(cuUserObjectCreate)
REFUSED(cuGraphRetainUserObject)
REFUSED(cuGraphExecKernelNodeSetParams_v2)
REFUSED(cuGraphExecMemsetNodeSetParams)
REFUSED(cuGraphMemcpyNodeGetParams)
REFUSED(cuGraphExecMemcpyNodeSetParams)

}  // extern "C"
