/* untorch's C interface: load a .pt2 file, run its methods. No other header is needed.
 *
 * Every function that can fail returns a status; untorch_last_error() then holds the text, for the calling thread,
 * until its next failure. Handles are not shared between programs. Functions may be called from any thread; one method
 * may run on several at once (untorch_load_options.num_runners). */
#ifndef UNTORCH_UNTORCH_H_
#define UNTORCH_UNTORCH_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define UNTORCH_API __attribute__((visibility("default")))
#else
#define UNTORCH_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum untorch_status {
  UNTORCH_OK = 0,
  UNTORCH_INTERNAL = 1,         /* a bug of the library */
  UNTORCH_INVALID_ARGUMENT = 2, /* the caller's input does not fit */
  UNTORCH_INVALID_FILE = 3,     /* missing, damaged or lying file */
  UNTORCH_UNSUPPORTED = 4,      /* well-formed, but not for this build or machine */
  UNTORCH_CLOSED = 5,           /* the program was closed */
  UNTORCH_OUT_OF_MEMORY = 6,
  UNTORCH_MODEL = 7 /* the compiled model reported a failure */
} untorch_status;

typedef struct untorch_program untorch_program; /* a loaded file */
typedef struct untorch_method untorch_method;   /* one method of it; belongs to the program */
typedef struct untorch_tensor untorch_tensor;   /* an output, or an operand of the proxy callback */

/* Memory as a strided array. dtype and device_type are PyTorch's ScalarType and DeviceType codes (float32 6, int64 4;
 * CPU 0). Sizes and strides have ndim entries; strides count elements. */
typedef struct untorch_view {
  void* data;
  int32_t dtype;
  int32_t device_type;
  int32_t device_index;
  int32_t ndim;
  const int64_t* sizes;
  const int64_t* strides;
  int32_t read_only; /* not 0: the memory must not be written, so no model may take it that changes its input */
} untorch_view;

typedef struct untorch_load_options {
  size_t struct_size;  /* sizeof(untorch_load_options) */
  const char* device;  /* NULL: what the file was compiled for */
  size_t num_runners;  /* calls of one method that may run at the same time, at least 1 */
  int32_t num_threads; /* OpenMP threads of a call; 0: OpenMP's own choice */
  /* 1: keep linear layers' weights in four bits on the GPU as whole matrices, too, for products with many rows */
  int32_t dequantize_weights;
} untorch_load_options;

UNTORCH_API const char* untorch_version(void);
UNTORCH_API const char* untorch_last_error(void);

/* options may be NULL. The path is UTF-8 text as the operating system takes it. */
UNTORCH_API untorch_status untorch_program_open(const char* path, const untorch_load_options* options,
                                                untorch_program** out);
/* Calls after it fail with UNTORCH_CLOSED; calls that run finish. The handle stays valid until untorch_program_free. */
UNTORCH_API void untorch_program_close(untorch_program* program);
UNTORCH_API void untorch_program_free(untorch_program* program);
UNTORCH_API size_t untorch_program_num_methods(const untorch_program* program);
UNTORCH_API untorch_method* untorch_program_method(const untorch_program* program, size_t index);
/* NULL when there is none of that name. */
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
/* The description of the operators that go to the proxy callback, as JSON text of `length` bytes; NULL: there are none.
 */
UNTORCH_API untorch_status untorch_method_extern_nodes(untorch_method* method, const char** text, size_t* length);

/* Runs node `node` of the extern nodes. Returns 0, or another value after untorch_set_error. */
typedef int32_t (*untorch_proxy_callback)(void* context, int32_t node, int32_t num_ints, const int64_t* ints,
                                          int32_t num_tensors, untorch_tensor** tensors);
/* Before the first run. */
UNTORCH_API void untorch_method_set_proxy(untorch_method* method, untorch_proxy_callback callback, void* context);
UNTORCH_API void untorch_set_error(untorch_status status, const char* message);

/* A session: buffers that the methods change (a KV cache) in copies of its own, shared by the methods that name the
 * same buffer; weights are shared by all sessions. The program's own methods have one to themselves. Free a session
 * before its program. Methods of one session run one at a time, those of several side by side. */
typedef struct untorch_session untorch_session;
UNTORCH_API untorch_status untorch_program_session(untorch_program* program, untorch_session** out);
/* The program's methods on the session's buffers, in the program's order. They live as long as the session. */
UNTORCH_API untorch_method* untorch_session_method(const untorch_session* session, size_t index);
/* Buffers as they are in the file again; for a NULL session, those of the program itself. */
UNTORCH_API untorch_status untorch_session_reset(untorch_program* program, untorch_session* session);
/* A new session with the values of now. */
UNTORCH_API untorch_status untorch_session_fork(untorch_program* program, untorch_session* session,
                                                untorch_session** out);
/* Bytes of its buffers so far: each is made when a method that has it is first opened. */
UNTORCH_API size_t untorch_session_nbytes(const untorch_session* session);
UNTORCH_API void untorch_session_close(untorch_session* session);
UNTORCH_API void untorch_session_free(untorch_session* session);

/* Runs the method on views of the caller's memory, which must stay valid during the call. outputs and aliases have
 * num_outputs slots. An output is a new handle (free it), or NULL where the model gives None; aliases[i] is the index
 * of the input whose memory output i is (it stays the caller's), or -1. */
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
/* A copy on a device of memory that lies on the CPU, in the order of its call stream. A new handle. */
UNTORCH_API untorch_status untorch_tensor_to_device(const untorch_view* source, int32_t device_index,
                                                    untorch_tensor** out);
/* The device that the method runs on: PyTorch's DeviceType code and the index (-1 for the CPU). */
UNTORCH_API untorch_status untorch_method_device(untorch_method* method, int32_t* device_type, int32_t* device_index);

/* The GPU architecture of the method's code, such as "sm_90"; "" for a method of the CPU, and where it is not known. */
UNTORCH_API const char* untorch_method_gpu_architecture(const untorch_method* method);

/* What the GPUs of this machine are, as JSON text (a list of objects: name, compute capability, memory, …), or why
 * there are none (an object with "error"); valid until the thread's next call of it. Never fails. */
UNTORCH_API const char* untorch_cuda_devices(void);
/* What a program's memory is, as JSON text; valid until the thread's next call of it. */
UNTORCH_API untorch_status untorch_program_memory(untorch_program* program, const char** json);
/* Gives memory that is kept for reuse back to the driver. */
UNTORCH_API untorch_status untorch_cuda_release_memory(int32_t device_index);

/* A CUDA graph of one call: captured for the shapes of `inputs`, replayed by untorch_graph_run on the call stream.
 * An input of a later run may lie anywhere on the device (the graph is pointed at it, nothing is copied, if it is
 * 16-byte aligned; otherwise, and from the CPU, it is copied into the graph's own memory). Outputs are the graph's
 * memory: the next run writes into them. */
typedef struct untorch_graph untorch_graph;
UNTORCH_API untorch_status untorch_graph_capture(untorch_method* method, const untorch_view* inputs, size_t num_inputs,
                                                 untorch_graph** out);
UNTORCH_API untorch_status untorch_graph_run(untorch_graph* graph, const untorch_view* inputs, size_t num_inputs,
                                             untorch_tensor** outputs, int32_t* aliases, size_t num_outputs);
UNTORCH_API void untorch_graph_free(untorch_graph* graph);

/* Makes the device current for this thread, for code that asks which one is; `before` is for untorch_device_leave. */
UNTORCH_API untorch_status untorch_device_enter(int32_t device_index, void** before);
UNTORCH_API void untorch_device_leave(void* before);

/* A point in a stream's work: how a caller knows when memory that it lent may be used again. */
typedef struct untorch_event untorch_event;
UNTORCH_API untorch_status untorch_event_record(int32_t device_index, void* stream, untorch_event** out);
/* 1 when everything before the point is done, also if it failed. Does not wait. */
UNTORCH_API int32_t untorch_event_done(const untorch_event* event);
UNTORCH_API void untorch_event_free(untorch_event* event);
/* Whose memory an address is: a GPU's (1 and its index; managed memory too), or the CPU's (0 and -1). */
UNTORCH_API untorch_status untorch_pointer_device(const void* address, int32_t* device_type, int32_t* device_index);
/* Copies into the caller's memory, of the tensor's dtype and shape, with any strides and on any device. On the call
 * stream of the device; with the CPU on one side it waits. */
UNTORCH_API untorch_status untorch_tensor_copy(const untorch_view* destination, const untorch_tensor* source);

/* The view's sizes and strides are valid while the handle is. */
UNTORCH_API void untorch_tensor_view(const untorch_tensor* tensor, untorch_view* out);
/* 1 when the memory may be written: an output of its own, or a buffer, not a weight mapped from the file. */
UNTORCH_API int32_t untorch_tensor_is_writable(const untorch_tensor* tensor);
/* Makes the tensor a copy of `value`, its strides (not negative) included: for results of the proxy callback. */
UNTORCH_API untorch_status untorch_tensor_assign(untorch_tensor* tensor, const untorch_view* value);
UNTORCH_API void untorch_tensor_free(untorch_tensor* tensor);
/* Tensor handles alive in the process: for leak tests. */
UNTORCH_API int64_t untorch_live_tensors(void);

/* The seed of the process's generator for random operators, on the CPU and on every GPU. */
UNTORCH_API void untorch_manual_seed(uint64_t seed);
UNTORCH_API uint64_t untorch_initial_seed(void);

/* The features of this CPU, by Linux's names, separated by spaces; valid forever. */
UNTORCH_API const char* untorch_cpu_features(void);
UNTORCH_API const char* untorch_cpu_architecture(void);
/* The instruction set that the kernels were chosen for: "baseline", "v3" or "v4". */
UNTORCH_API const char* untorch_cpu_level(void);
/* 1 when the library exports a function of that name: a C shim or a vector function. */
UNTORCH_API int32_t untorch_has_symbol(const char* name);

/* Adds a folder (an absolute path) in which NVIDIA's libraries are looked for first. They are opened when a model first
 * needs them, so call it before the first run. */
UNTORCH_API untorch_status untorch_add_library_path(const char* folder);
/* Not 0: float32 matrix products on a GPU may be computed in TF32 (10 bits of mantissa), for the whole process from now
 * on. Without this call UNTORCH_ALLOW_TF32=1 in the environment says so; otherwise they are computed in float32. */
UNTORCH_API void untorch_allow_tf32(int32_t allowed);
/* NVIDIA's libraries that were opened so far, a line each: "title<TAB>soname<TAB>file<TAB>where it was found". Valid
 * until the thread's next call. */
UNTORCH_API const char* untorch_gpu_libraries(void);

#ifdef __cplusplus
}
#endif

#endif /* UNTORCH_UNTORCH_H_ */
