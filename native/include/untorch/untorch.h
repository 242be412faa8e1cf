/* untorch's C interface: load a .pt2 file and run its methods. C99 and later, C++. No other header is needed.
 *
 * Errors: every function that can fail returns a status. untorch_last_error() then holds the text, for the calling
 * thread, until its next failure.
 * Threads: functions may be called from any thread. One method may run on several threads at once
 * (untorch_load_options.num_runners).
 * ABI: enum values never change. Structs hold codes as int32_t, because the size of an enum is the compiler's choice.
 * A struct that starts with struct_size may grow at its end; all others are fixed. */
#ifndef UNTORCH_UNTORCH_H_
#define UNTORCH_UNTORCH_H_

#include <stddef.h>
#include <stdint.h>

#ifndef UNTORCH_API
#if defined(__GNUC__)
#define UNTORCH_API __attribute__((visibility("default")))
#else
#define UNTORCH_API
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum untorch_status {
  UNTORCH_OK = 0,
  UNTORCH_INTERNAL = 1,         /* a bug of the library */
  UNTORCH_INVALID_ARGUMENT = 2, /* the caller's input does not fit */
  UNTORCH_INVALID_FILE = 3,     /* the file is missing, unreadable, damaged or malformed */
  UNTORCH_UNSUPPORTED = 4,      /* well-formed, but not for this build or machine */
  UNTORCH_CLOSED = 5,           /* the program was closed */
  UNTORCH_OUT_OF_MEMORY = 6,
  UNTORCH_MODEL = 7,       /* the compiled model reported a failure */
  UNTORCH_DEVICE_LOST = 8, /* a kernel destroyed the context of a GPU; the process cannot use that GPU any more */
  UNTORCH_SYSTEM = 9,      /* the operating system refused something for now, such as a file descriptor */
  UNTORCH_UNTRUSTED = 10 /* the file changed after it had been found to be trusted; untorch.load(trust=…) in Python */
} untorch_status;

typedef struct untorch_program untorch_program; /* a loaded file */
typedef struct untorch_method untorch_method;   /* one method of it; belongs to the program */
typedef struct untorch_tensor untorch_tensor;   /* an output, or an operand of the proxy callback */

/* Element types: PyTorch's ScalarType codes. */
typedef enum untorch_dtype {
  UNTORCH_UINT8 = 0,
  UNTORCH_INT8 = 1,
  UNTORCH_INT16 = 2,
  UNTORCH_INT32 = 3,
  UNTORCH_INT64 = 4,
  UNTORCH_FLOAT16 = 5,
  UNTORCH_FLOAT32 = 6,
  UNTORCH_FLOAT64 = 7,
  UNTORCH_COMPLEX32 = 8,
  UNTORCH_COMPLEX64 = 9,
  UNTORCH_COMPLEX128 = 10,
  UNTORCH_BOOL = 11,
  UNTORCH_BFLOAT16 = 15,
  UNTORCH_FLOAT8_E5M2 = 23,
  UNTORCH_FLOAT8_E4M3FN = 24,
  UNTORCH_FLOAT8_E5M2FNUZ = 25,
  UNTORCH_FLOAT8_E4M3FNUZ = 26,
  UNTORCH_UINT16 = 27,
  UNTORCH_UINT32 = 28,
  UNTORCH_UINT64 = 29,
  UNTORCH_FLOAT8_E8M0FNU = 44,
  UNTORCH_FLOAT4_E2M1FN_X2 = 45 /* two values in a byte */
} untorch_dtype;

/* Devices: PyTorch's DeviceType codes. */
typedef enum untorch_device_type {
  UNTORCH_CPU = 0, /* its device_index is -1 */
  UNTORCH_CUDA = 1
} untorch_device_type;

/* Memory as a strided array. sizes and strides have ndim entries; strides count elements. */
typedef struct untorch_view {
  void* data;
  int32_t dtype;        /* untorch_dtype */
  int32_t device_type;  /* untorch_device_type */
  int32_t device_index; /* -1 for the CPU */
  int32_t ndim;
  const int64_t* sizes;
  const int64_t* strides;
  int32_t read_only; /* not 0: the memory must not be written; models that write to this input refuse it */
} untorch_view;

/* Set struct_size to sizeof(untorch_load_options) and every other byte that is not set to 0:
 *   untorch_load_options options = {.struct_size = sizeof options, .num_runners = 1};
 * The library reads the fields that struct_size covers; fields that it does not cover have their defaults. So a program
 * that was compiled with an older header runs with a newer library. The other way round works, too, as long as the
 * fields that the older library does not know are 0; if not, opening fails with UNTORCH_UNSUPPORTED. struct_size must
 * cover num_threads. */
typedef struct untorch_load_options {
  size_t struct_size;
  const char* device;         /* "cpu", "cuda", "cuda:1"; NULL: the device that the file was compiled for */
  size_t num_runners;         /* concurrent calls of one method, at least 1 */
  int32_t num_threads;        /* OpenMP threads of a call; 0: OpenMP's default */
  int32_t dequantize_weights; /* 1: also keep int4 and NVFP4 weights dequantized on the GPU, for GEMMs with large M */
  int32_t verify;      /* 1: compare every entry with its SHA-256 first; so does UNTORCH_VERIFY=1 in the environment */
  int32_t copy;        /* 1: read the file into memory instead of mapping it */
  int32_t tf32;        /* untorch_tf32: whether float32 convolutions and GEMMs on GPUs may use TF32 */
  int32_t spin_us;     /* microseconds that an idle thread of a call spins before it sleeps, up to 1000000; -1: none;
                        * 0: UNTORCH_SPIN_US of the environment, else 100 */
  const char* weights; /* of a file that takes weights from .safetensors files: that file, or the folder of several;
                        * NULL: the folder of the package, then UNTORCH_WEIGHTS of the environment */
  size_t cuda_graphs;  /* of calls that each method on a GPU captures and replays, for as many shapes of inputs */
} untorch_load_options;

/* TF32 rounds float32 operands to 10 bits of mantissa, for the tensor cores. */
typedef enum untorch_tf32 {
  UNTORCH_TF32_AS_EXPORTED = 0, /* as PyTorch was set at export; in a stock package in convolutions alone */
  UNTORCH_TF32_NEVER = 1,
  UNTORCH_TF32_ALWAYS = 2
} untorch_tf32;

UNTORCH_API const char* untorch_version(void);
UNTORCH_API const char* untorch_last_error(void);

/* options may be NULL: one runner, defaults for the rest. The path goes to the operating system as it is.
 * The file is mapped: replace it by renaming a new one into place. One that is truncated while in use makes later calls
 * fail with UNTORCH_INVALID_FILE; one that is overwritten in place changes the weights silently. With options->copy
 * neither matters. */
UNTORCH_API untorch_status untorch_program_open(const char* path, const untorch_load_options* options,
                                                untorch_program** out);
/* The contents of a .pt2 file in memory. With options->copy they are copied; else they are used in place, and must not
 * change until the program and every tensor that it gave are freed. Weights are used in place where `data` is 64-byte
 * aligned, and copied where that is too little for their dtype. */
UNTORCH_API untorch_status untorch_program_open_memory(const void* data, size_t length,
                                                       const untorch_load_options* options, untorch_program** out);
/* Running calls finish, later ones fail with UNTORCH_CLOSED. The handle stays valid until untorch_program_free. */
UNTORCH_API void untorch_program_close(untorch_program* program);
UNTORCH_API void untorch_program_free(untorch_program* program);
UNTORCH_API size_t untorch_program_num_methods(const untorch_program* program);
UNTORCH_API untorch_method* untorch_program_method(const untorch_program* program, size_t index);
/* NULL if the program has no method of that name. */
UNTORCH_API untorch_method* untorch_program_find(const untorch_program* program, const char* name);
/* Bytes of an entry of the archive, its name without the top folder ("extra/untorch.json"); valid while the program is.
 */
UNTORCH_API untorch_status untorch_program_entry(const untorch_program* program, const char* name, const void** data,
                                                 size_t* length);
/* 1 for a package made by PyTorch's own packager. */
UNTORCH_API int32_t untorch_program_is_stock(const untorch_program* program);

UNTORCH_API const char* untorch_method_name(const untorch_method* method);
/* Opens the method's library now instead of at the first run. */
UNTORCH_API untorch_status untorch_method_open(untorch_method* method);
UNTORCH_API untorch_status untorch_method_arity(untorch_method* method, size_t* num_inputs, size_t* num_outputs);
/* PyTorch's pytree specifications, as JSON text; valid while the program is. */
UNTORCH_API untorch_status untorch_method_call_spec(untorch_method* method, const char** in_spec,
                                                    const char** out_spec);
/* The operators that go to the proxy callback, as JSON text of `length` bytes; NULL if there are none. */
UNTORCH_API untorch_status untorch_method_extern_nodes(untorch_method* method, const char** text, size_t* length);

/* Runs node `node` of the extern nodes. Returns 0, or another value after untorch_set_error.
 * In a method on a GPU the tensors' views say where each lies. All work belongs on the call's stream, which is what
 * untorch_call_stream(device_index, …) gives while the callback runs; the callback need not wait for it. In a call that
 * is captured into a graph it may only enqueue. */
typedef int32_t (*untorch_proxy_callback)(void* context, int32_t node, int32_t num_ints, const int64_t* ints,
                                          int32_t num_tensors, untorch_tensor** tensors);
/* Before the first run. The callback gets the operators that the library does not serve itself. */
UNTORCH_API void untorch_method_set_proxy(untorch_method* method, untorch_proxy_callback callback, void* context);
/* The operators without a C function that the library serves itself on a device (untorch_device_type), a line each, as
 * "namespace::operator.overload"; valid until the thread's next call of it. */
UNTORCH_API const char* untorch_native_operators(int32_t device_type);
/* Whether the library serves such an operator itself (the default), or the proxy callback does; for all programs of the
 * process. UNTORCH_INVALID_ARGUMENT if it has no native kernel on that device. */
UNTORCH_API untorch_status untorch_use_native_operator(const char* name, int32_t device_type, int32_t use);
UNTORCH_API void untorch_set_error(untorch_status status, const char* message);

/* A session: an independent copy of the mutable buffers (a KV cache). Methods that name the same buffer share it; all
 * sessions share the weights. The program's own methods have a copy, too. Calls of one session are serialised; calls of
 * different sessions run concurrently. Free a session before its program. */
typedef struct untorch_session untorch_session;
UNTORCH_API untorch_status untorch_program_session(untorch_program* program, untorch_session** out);
/* The program's methods on the session's buffers, in the program's order. They live as long as the session. */
UNTORCH_API untorch_method* untorch_session_method(const untorch_session* session, size_t index);
/* Resets the buffers to their initial values in the file; for a NULL session, those of the program itself. */
UNTORCH_API untorch_status untorch_session_reset(untorch_program* program, untorch_session* session);
/* A new session: an independent copy of the current state. */
UNTORCH_API untorch_status untorch_session_fork(untorch_program* program, untorch_session* session,
                                                untorch_session** out);
/* Bytes of its buffers so far: each is allocated when a method that uses it is first opened. */
UNTORCH_API size_t untorch_session_nbytes(const untorch_session* session);
UNTORCH_API void untorch_session_close(untorch_session* session);
UNTORCH_API void untorch_session_free(untorch_session* session);

/* Runs the method on views of the caller's memory, which must stay valid during the call. outputs and aliases have
 * num_outputs slots. An output is a new handle (free it), or NULL where the model gives None or a constant, which the
 * manifest has; aliases[i] is the index of the input whose memory output i is (it stays the caller's), or -1. */
UNTORCH_API untorch_status untorch_method_run(untorch_method* method, const untorch_view* inputs, size_t num_inputs,
                                              untorch_tensor** outputs, int32_t* aliases, size_t num_outputs);

/* Methods compiled for CUDA. Work is enqueued on the caller's stream (untorch/caller_stream.h) when the thread has set
 * one, else on a stream of the thread's own; the call returns when everything is enqueued. Inputs may lie in the CPU's
 * memory: they are copied, in the stream's order. Outputs lie on the device. */

/* The stream that a call made now by this thread would use on the device. */
UNTORCH_API untorch_status untorch_call_stream(int32_t device_index, void** stream);
/* Makes what is enqueued on `consumer` from now on wait for what `producer` holds so far. */
UNTORCH_API untorch_status untorch_stream_wait(int32_t device_index, void* consumer, void* producer);
/* Waits until everything on the stream is done. */
UNTORCH_API untorch_status untorch_stream_synchronize(int32_t device_index, void* stream);
/* A copy of the tensor in the CPU's memory; waits for the call stream of its device. A new handle. */
UNTORCH_API untorch_status untorch_tensor_to_host(const untorch_tensor* tensor, untorch_tensor** out);
/* The same without waiting: the copy lies in pinned memory, and its values are there once the event is done. *event is
 * NULL for a tensor on the CPU. Wait for the event before the copy is freed. New handles. */
typedef struct untorch_event untorch_event;
UNTORCH_API untorch_status untorch_tensor_to_host_async(const untorch_tensor* tensor, untorch_tensor** out,
                                                        untorch_event** event);
/* A copy on a device of memory that lies on the CPU, in the order of its call stream. A new handle. */
UNTORCH_API untorch_status untorch_tensor_to_device(const untorch_view* source, int32_t device_index,
                                                    untorch_tensor** out);
/* A row-major tensor of a dtype (PyTorch's code) on the CPU (UNTORCH_CPU) or a GPU (-1: the current one):
 * uninitialised, or zeros unless `zeros` is 0. Its memory begins at a multiple of 64 bytes on the CPU and of 256 on a
 * GPU. There zeros are written in the order of the call stream; on the CPU large ones take memory when they are written
 * to. A new handle. */
UNTORCH_API untorch_status untorch_tensor_create(int32_t dtype, int32_t ndim, const int64_t* sizes, int32_t device_type,
                                                 int32_t device_index, int32_t zeros, untorch_tensor** out);
/* The device that the method runs on: an untorch_device_type and the index (-1 for the CPU). */
UNTORCH_API untorch_status untorch_method_device(untorch_method* method, int32_t* device_type, int32_t* device_index);

/* The GPU architecture of the method's code, such as "sm_90"; "" for a method of the CPU, or if it is unknown. */
UNTORCH_API const char* untorch_method_gpu_architecture(const untorch_method* method);
/* With untorch_load_options.cuda_graphs, a call on inputs of shapes and strides that came before is captured as a
 * graph, and replayed from then on. Its outputs are copies, so that nothing overwrites them. How many graphs the method
 * has now; and why further calls are not captured, "" if they are. The text is valid until the thread's next call of
 * this. */
UNTORCH_API untorch_status untorch_method_graphs(untorch_method* method, size_t* count, const char** refusal);

/* The GPUs of this machine as JSON text (a list of objects: name, compute capability, memory, …), or an object with
 * "error" that says why there are none; valid until the thread's next call of it. Never fails. */
UNTORCH_API const char* untorch_cuda_devices(void);
/* A program's memory in bytes, as JSON text; valid until the thread's next call of it. */
UNTORCH_API untorch_status untorch_program_memory(untorch_program* program, const char** json);
/* Returns the memory pool's unused memory to the driver. */
UNTORCH_API untorch_status untorch_cuda_release_memory(int32_t device_index);

/* A CUDA graph of one call: captured for the shapes of `inputs`, replayed by untorch_graph_run on the call stream.
 * Inputs of a replay on the device are read in place if they are 16-byte aligned: the graph's node parameters are
 * updated. Others, and those in host memory, are copied into the graph's own memory. An input that the method writes
 * into is captured where it lies: it must be on the device, stay valid as long as the graph, and be given to every
 * replay. Outputs are the graph's memory: the next replay overwrites them. */
typedef struct untorch_graph untorch_graph;
UNTORCH_API untorch_status untorch_graph_capture(untorch_method* method, const untorch_view* inputs, size_t num_inputs,
                                                 untorch_graph** out);
/* The same in the memory of another graph on that device, so that many graphs take little more than the largest one;
 * capture that one first. Replays of graphs that share memory are in order, whatever streams they are on. A replay of
 * any of them overwrites the outputs of all. */
UNTORCH_API untorch_status untorch_graph_capture_shared(untorch_method* method, const untorch_view* inputs,
                                                        size_t num_inputs, untorch_graph* shares, untorch_graph** out);
UNTORCH_API untorch_status untorch_graph_run(untorch_graph* graph, const untorch_view* inputs, size_t num_inputs,
                                             untorch_tensor** outputs, int32_t* aliases, size_t num_outputs);
UNTORCH_API void untorch_graph_free(untorch_graph* graph);

/* Makes the device current for this thread; `before` is for untorch_device_leave. */
UNTORCH_API untorch_status untorch_device_enter(int32_t device_index, void** before);
UNTORCH_API void untorch_device_leave(void* before);

/* An event on a stream: tells when memory that the caller lent may be reused. */
UNTORCH_API untorch_status untorch_event_record(int32_t device_index, void* stream, untorch_event** out);
/* 1 when all work before the event is complete, also if it failed. Does not wait. */
UNTORCH_API int32_t untorch_event_done(const untorch_event* event);
/* Waits for the work before the event, and reports its errors. */
UNTORCH_API untorch_status untorch_event_synchronize(const untorch_event* event);
UNTORCH_API void untorch_event_free(untorch_event* event);
/* Where an address lies: UNTORCH_CUDA and the GPU's index (managed memory too), or UNTORCH_CPU and -1. */
UNTORCH_API untorch_status untorch_pointer_device(const void* address, int32_t* device_type, int32_t* device_index);
/* Copies into the caller's memory, of the tensor's dtype and shape, with any strides and on any device. On the call
 * stream of the device; with the CPU on one side it waits. */
UNTORCH_API untorch_status untorch_tensor_copy(const untorch_view* destination, const untorch_tensor* source);

/* The view's sizes and strides are valid while the handle is. */
UNTORCH_API void untorch_tensor_view(const untorch_tensor* tensor, untorch_view* out);
/* 1 if the memory may be written: an allocated output or a mutable buffer, not a weight mapped from the file. */
UNTORCH_API int32_t untorch_tensor_is_writable(const untorch_tensor* tensor);
/* Makes the tensor a copy of `value`, its strides (not negative) included: for results of the proxy callback. The copy
 * lies where `value` does; on a GPU it is enqueued on the device's call stream. */
UNTORCH_API untorch_status untorch_tensor_assign(untorch_tensor* tensor, const untorch_view* value);
UNTORCH_API void untorch_tensor_free(untorch_tensor* tensor);
/* Live tensor handles in the process: for leak tests. */
UNTORCH_API int64_t untorch_live_tensors(void);

/* The seed of the process's generator for random operators, on the CPU and on every GPU. */
UNTORCH_API void untorch_manual_seed(uint64_t seed);
UNTORCH_API uint64_t untorch_initial_seed(void);

/* The features of this CPU, by Linux's names, separated by spaces; valid forever. */
UNTORCH_API const char* untorch_cpu_features(void);
UNTORCH_API const char* untorch_cpu_architecture(void);
/* The instruction set level of the CPU kernels in use: "baseline", "v3" or "v4". */
UNTORCH_API const char* untorch_cpu_level(void);
/* What they use beyond that level where it is faster: of "vnni", "bf16" (AVX512_BF16) and "amx" those that there are,
 * separated by spaces; valid forever. AMX needs the operating system's permission, which is asked for. */
UNTORCH_API const char* untorch_cpu_extensions(void);
/* 1 when the library exports a function of that name: a C shim or a vector function. */
UNTORCH_API int32_t untorch_has_symbol(const char* name);

/* Adds a folder (an absolute path) that is searched first for NVIDIA's libraries. They are opened when a model first
 * needs them, so call it before the first run. */
UNTORCH_API untorch_status untorch_add_library_path(const char* folder);
/* Whether float32 GEMMs and convolutions on GPUs may use TF32, for all programs of the process from now on, whatever
 * their files and options say. UNTORCH_ALLOW_TF32=0 or 1 in the environment does the same. */
UNTORCH_API void untorch_allow_tf32(int32_t allowed);
/* NVIDIA's libraries that were opened so far, a line each: "title<TAB>soname<TAB>file<TAB>where it was found". Valid
 * until the thread's next call. */
UNTORCH_API const char* untorch_gpu_libraries(void);

#ifdef __cplusplus
}
#endif

#endif /* UNTORCH_UNTORCH_H_ */
