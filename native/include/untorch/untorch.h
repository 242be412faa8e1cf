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

/* Runs the method on views of the caller's memory, which must stay valid during the call. outputs and aliases have
 * num_outputs slots. An output is a new handle (free it), or NULL where the model gives None; aliases[i] is the index
 * of the input whose memory output i is (it stays the caller's), or -1. */
UNTORCH_API untorch_status untorch_method_run(untorch_method* method, const untorch_view* inputs, size_t num_inputs,
                                              untorch_tensor** outputs, int32_t* aliases, size_t num_outputs);

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

#ifdef __cplusplus
}
#endif

#endif /* UNTORCH_UNTORCH_H_ */
