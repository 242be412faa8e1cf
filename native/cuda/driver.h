// CUDA's driver interface as untorch uses it: our own declarations (no CUDA header is needed to build), resolved from
// libcuda.so.1 when a device is first asked for, so that the same library works on a machine without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/error.h"

// The opaque types carry CUDA's own tags, so that a file which includes CUDA's headers sees the same types.
struct CUctx_st;
struct CUstream_st;
struct CUevent_st;
struct CUmod_st;
struct CUlib_st;
struct CUfunc_st;
struct CUkern_st;
struct CUgraph_st;
struct CUgraphExec_st;
struct CUgraphNode_st;
struct CUuserObject_st;

namespace untorch::cuda {

using Result = int;  // CUresult, and cudaError_t where the two have the same value
using DeviceId = int;
using DevicePtr = unsigned long long;
using Context = CUctx_st*;
using Stream = CUstream_st*;
using Event = CUevent_st*;
using Module = CUmod_st*;
using Library = CUlib_st*;
using Function = CUfunc_st*;
using Kernel = CUkern_st*;
using Graph = CUgraph_st*;
using GraphExec = CUgraphExec_st*;
using GraphNode = CUgraphNode_st*;
using UserObject = CUuserObject_st*;

// CUDA_KERNEL_NODE_PARAMS_v2
struct KernelNodeParams {
  Function function;
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void** kernel_params;
  void** extra;
  Kernel kernel;
  Context context;
};

// The buffer that `extra` passes: all kernel parameters in one (CU_LAUNCH_PARAM_BUFFER_POINTER). Empty without one.
std::span<const std::byte> argument_buffer(void* const* extra) noexcept;
// Makes `extra` pass that buffer; *bytes must outlive it.
void set_argument_buffer(void* (&extra)[5], void* buffer, std::size_t* bytes) noexcept;

// CUDA_MEMSET_NODE_PARAMS
struct MemsetParams {
  DevicePtr to;
  std::size_t pitch;
  unsigned value, element_bytes;
  std::size_t width, height;
};

// CUDA_MEMCPY3D_v2
struct Memcpy3D {
  std::size_t src_x_bytes, src_y, src_z, src_lod;
  int src_memory_type;
  const void* src_host;
  DevicePtr src_device;
  void* src_array;
  void* reserved0;
  std::size_t src_pitch, src_height;
  std::size_t dst_x_bytes, dst_y, dst_z, dst_lod;
  int dst_memory_type;
  void* dst_host;
  DevicePtr dst_device;
  void* dst_array;
  void* reserved1;
  std::size_t dst_pitch, dst_height;
  std::size_t width_bytes, height, depth;
};

// CUlaunchAttribute
union LaunchAttributeValue {
  unsigned words[16];
  void* pointer;  // for its alignment
};
struct LaunchAttribute {
  int id;
  LaunchAttributeValue value;
};

// CUlaunchConfig; attributes are passed through unread.
struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  Stream stream;
  const LaunchAttribute* attributes;
  unsigned num_attributes;
};

enum : Result {
  kSuccess = 0,
  kErrorInvalidValue = 1,
  kErrorOutOfMemory = 2,
  kErrorNotInitialized = 3,
  kErrorNoDevice = 100,
  kErrorNotFound = 500,
  kErrorNotReady = 600,
};

// CUdevice_attribute
enum : int {
  kAttributeMultiprocessorCount = 16,
  kAttributeL2CacheSize = 38,
  kAttributeMaxThreadsPerMultiprocessor = 39,
  kAttributeComputeCapabilityMajor = 75,
  kAttributeComputeCapabilityMinor = 76,
  kAttributeMaxSharedMemoryPerBlockOptin = 97,
};

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kHostAllocPortable = 1;
inline constexpr unsigned kHostAllocDeviceMap = 2;
inline constexpr unsigned kHostRegisterPortable = 1;
inline constexpr int kCaptureModeRelaxed = 2;
inline constexpr int kCaptureActive = 1;
inline constexpr unsigned kUserObjectNoDestructorSync = 1;
inline constexpr unsigned kGraphUserObjectMove = 1;

// CUlaunchAttributeID
enum : int {
  kAccessPolicyWindow = 1,
  kCooperative = 2,
  kClusterDimension = 4,
  kClusterSchedulingPolicy = 5,
};
// CUfunction_attribute
inline constexpr int kMaxDynamicSharedBytes = 8;
// CUpointer_attribute
inline constexpr int kPointerMemoryType = 2;

// X(member, exported name, arguments)
#define UNTORCH_CUDA_DRIVER(X)                                                                                         \
  X(init, cuInit, (unsigned flags))                                                                                    \
  X(driver_version, cuDriverGetVersion, (int* version))                                                                \
  X(error_name, cuGetErrorName, (Result error, const char** text))                                                     \
  X(error_string, cuGetErrorString, (Result error, const char** text))                                                 \
  X(device_count, cuDeviceGetCount, (int* count))                                                                      \
  X(device_get, cuDeviceGet, (DeviceId * device, int ordinal))                                                         \
  X(device_name, cuDeviceGetName, (char* name, int length, DeviceId device))                                           \
  X(device_attribute, cuDeviceGetAttribute, (int* value, int attribute, DeviceId device))                              \
  X(device_total_memory, cuDeviceTotalMem_v2, (std::size_t * bytes, DeviceId device))                                  \
  X(primary_context_retain, cuDevicePrimaryCtxRetain, (Context * context, DeviceId device))                            \
  X(context_current, cuCtxGetCurrent, (Context * context))                                                             \
  X(context_set_current, cuCtxSetCurrent, (Context context))                                                           \
  X(context_device, cuCtxGetDevice, (DeviceId * device))                                                               \
  X(context_synchronize, cuCtxSynchronize, ())                                                                         \
  X(mem_alloc, cuMemAlloc_v2, (DevicePtr * pointer, std::size_t bytes))                                                \
  X(mem_free, cuMemFree_v2, (DevicePtr pointer))                                                                       \
  X(mem_info, cuMemGetInfo_v2, (std::size_t * free_bytes, std::size_t * total_bytes))                                  \
  X(mem_host_alloc, cuMemHostAlloc, (void** pointer, std::size_t bytes, unsigned flags))                               \
  X(mem_host_free, cuMemFreeHost, (void* pointer))                                                                     \
  X(mem_host_register, cuMemHostRegister_v2, (void* pointer, std::size_t bytes, unsigned flags))                       \
  X(mem_host_unregister, cuMemHostUnregister, (void* pointer))                                                         \
  X(pointer_attribute, cuPointerGetAttribute, (void* value, int attribute, DevicePtr pointer))                         \
  X(memcpy_async, cuMemcpyAsync, (DevicePtr to, DevicePtr from, std::size_t bytes, Stream stream))                     \
  X(memcpy_h2d_async, cuMemcpyHtoDAsync_v2, (DevicePtr to, const void* from, std::size_t bytes, Stream stream))        \
  X(memcpy_d2h_async, cuMemcpyDtoHAsync_v2, (void* to, DevicePtr from, std::size_t bytes, Stream stream))              \
  X(memset_d8_async, cuMemsetD8Async, (DevicePtr to, unsigned char value, std::size_t count, Stream stream))           \
  X(stream_create, cuStreamCreate, (Stream * stream, unsigned flags))                                                  \
  X(stream_destroy, cuStreamDestroy_v2, (Stream stream))                                                               \
  X(stream_synchronize, cuStreamSynchronize, (Stream stream))                                                          \
  X(stream_wait_event, cuStreamWaitEvent, (Stream stream, Event event, unsigned flags))                                \
  X(stream_id, cuStreamGetId, (Stream stream, unsigned long long* id))                                                 \
  X(stream_capturing, cuStreamIsCapturing, (Stream stream, int* status))                                               \
  X(capture_info, cuStreamGetCaptureInfo_v2,                                                                           \
    (Stream stream, int* status, std::uint64_t* id, Graph* graph, const GraphNode** dependencies, std::size_t* count)) \
  X(capture_begin, cuStreamBeginCapture_v2, (Stream stream, int mode))                                                 \
  X(capture_end, cuStreamEndCapture, (Stream stream, Graph * graph))                                                   \
  X(capture_mode_exchange, cuThreadExchangeStreamCaptureMode, (int* mode))                                             \
  X(event_create, cuEventCreate, (Event * event, unsigned flags))                                                      \
  X(event_destroy, cuEventDestroy_v2, (Event event))                                                                   \
  X(event_record, cuEventRecord, (Event event, Stream stream))                                                         \
  X(event_record_with_flags, cuEventRecordWithFlags, (Event event, Stream stream, unsigned flags))                     \
  X(event_elapsed, cuEventElapsedTime, (float* milliseconds, Event begin, Event end))                                  \
  X(event_query, cuEventQuery, (Event event))                                                                          \
  X(event_synchronize, cuEventSynchronize, (Event event))                                                              \
  X(module_load_data, cuModuleLoadData, (Module * module, const void* image))                                          \
  X(library_load_data, cuLibraryLoadData,                                                                              \
    (Library * library, const void* image, int* jit_options, void** jit_values, unsigned num_jit, int* options,        \
     void** values, unsigned num_options))                                                                             \
  X(library_kernel, cuLibraryGetKernel, (Kernel * kernel, Library library, const char* name))                          \
  X(stream_write_value64, cuStreamWriteValue64_v2,                                                                     \
    (Stream stream, DevicePtr address, std::uint64_t value, unsigned flags))                                           \
  X(kernel_function, cuKernelGetFunction, (Function * function, Kernel kernel))                                        \
  X(function_name, cuFuncGetName, (const char** name, Function function))                                              \
  X(function_set_attribute, cuFuncSetAttribute, (Function function, int attribute, int value))                         \
  X(function_attribute, cuFuncGetAttribute, (int* value, int attribute, Function function))                            \
  X(function_param_info, cuFuncGetParamInfo,                                                                           \
    (Function function, std::size_t index, std::size_t * offset, std::size_t * bytes))                                 \
  X(occupancy, cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,                                                   \
    (int* blocks, Function function, int threads, std::size_t shared_bytes, unsigned flags))                           \
  X(launch_kernel, cuLaunchKernel,                                                                                     \
    (Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,         \
     unsigned block_z, unsigned shared_bytes, Stream stream, void** params, void** extra))                             \
  X(launch_kernel_ex, cuLaunchKernelEx, (const LaunchConfig* config, Function function, void** params, void** extra))  \
  X(tensor_map_encode_tiled, cuTensorMapEncodeTiled,                                                                   \
    (void* map, int type, std::uint32_t rank, void* address, const std::uint64_t* sizes, const std::uint64_t* strides, \
     const std::uint32_t* box, const std::uint32_t* steps, int interleave, int swizzle, int promotion, int fill))      \
  X(graph_instantiate, cuGraphInstantiateWithFlags, (GraphExec * exec, Graph graph, unsigned long long flags))         \
  X(graph_launch, cuGraphLaunch, (GraphExec exec, Stream stream))                                                      \
  X(graph_exec_destroy, cuGraphExecDestroy, (GraphExec exec))                                                          \
  X(graph_destroy, cuGraphDestroy, (Graph graph))                                                                      \
  X(user_object_create, cuUserObjectCreate,                                                                            \
    (UserObject * object, void* data, void (*destroy)(void*), unsigned references, unsigned flags))                    \
  X(graph_retain_user_object, cuGraphRetainUserObject,                                                                 \
    (Graph graph, UserObject object, unsigned count, unsigned flags))                                                  \
  X(graph_nodes, cuGraphGetNodes, (Graph graph, GraphNode * nodes, std::size_t * count))                               \
  X(graph_root_nodes, cuGraphGetRootNodes, (Graph graph, GraphNode * nodes, std::size_t * count))                      \
  X(graph_dependent_nodes, cuGraphNodeGetDependentNodes, (GraphNode node, GraphNode * nodes, std::size_t * count))     \
  X(graph_node_type, cuGraphNodeGetType, (GraphNode node, int* type))                                                  \
  X(graph_kernel_params, cuGraphKernelNodeGetParams_v2, (GraphNode node, KernelNodeParams * params))                   \
  X(graph_kernel_attribute, cuGraphKernelNodeGetAttribute,                                                             \
    (GraphNode node, int attribute, LaunchAttributeValue* value))                                                      \
  X(graph_exec_kernel_set_params, cuGraphExecKernelNodeSetParams_v2,                                                   \
    (GraphExec exec, GraphNode node, const KernelNodeParams* params))                                                  \
  X(graph_memset_params, cuGraphMemsetNodeGetParams, (GraphNode node, MemsetParams * params))                          \
  X(graph_exec_memset_set_params, cuGraphExecMemsetNodeSetParams,                                                      \
    (GraphExec exec, GraphNode node, const MemsetParams* params, Context context))                                     \
  X(graph_memcpy_params, cuGraphMemcpyNodeGetParams, (GraphNode node, Memcpy3D * params))                              \
  X(graph_exec_memcpy_set_params, cuGraphExecMemcpyNodeSetParams,                                                      \
    (GraphExec exec, GraphNode node, const Memcpy3D* params, Context context))                                         \
  X(module_unload, cuModuleUnload, (Module module))

struct Driver {
#define UNTORCH_MEMBER(member, symbol, arguments) Result(*member) arguments = nullptr;
  UNTORCH_CUDA_DRIVER(UNTORCH_MEMBER)
#undef UNTORCH_MEMBER
};

// The driver, opened and initialised on first use. Throws kUnsupported that says what is missing: no libcuda.so.1, a
// driver that is too old (with the function that it lacks), no device.
const Driver& driver();
// The same without an error: null, and why in `reason` (may be null).
const Driver* try_driver(std::string* reason) noexcept;

// "CUDA_ERROR_INVALID_VALUE (invalid argument)"
std::string error_text(Result code);
// The exception for a failed driver call: kOutOfMemory for code 2, kDeviceLost for those that destroy the context
// (lost_device.h), kInternal otherwise.
[[noreturn]] void throw_driver_error(Result code, const char* what);
inline void check_driver(Result code, const char* what) {
  if (code != kSuccess) [[unlikely]]
    throw_driver_error(code, what);
}

}  // namespace untorch::cuda
