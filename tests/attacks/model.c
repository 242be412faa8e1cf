/* A model library by hand, for files that lie: y = 2 * x + w with the interface that AOTInductor's libraries have. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef void* Tensor;
int32_t aoti_torch_get_data_ptr(Tensor tensor, void** data);
int32_t aoti_torch_get_numel(Tensor tensor, int64_t* numel);
int32_t aoti_torch_empty_strided(int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                 int32_t device_type, int32_t device_index, Tensor* out);
int32_t aoti_torch_new_tensor_handle(Tensor tensor, Tensor* out);
int32_t aoti_torch_delete_tensor_object(Tensor tensor);

struct Entry {
  const char* name;
  Tensor handle;
};

static Tensor weight;
static int opened;
static __thread int calls;
static const char* const names[] = {"w"};
__attribute__((constructor)) static void on_open(void) { opened = 1; }
__attribute__((destructor)) static void on_close(void) { opened = 0; }

#ifdef DECLARE
DECLARE
#endif
#ifdef EXERCISE
void exercise(int what); /* openmp.cpp */
#endif

#define API __attribute__((visibility("default"))) int32_t
API AOTInductorModelContainerCreateWithDevice(void** handle, size_t n, const char* device, const char* dir) {
  (void)n, (void)device, (void)dir;
  *handle = &weight;
  return opened ? 0 : 1;
}
API AOTInductorModelContainerDelete(void* handle) { return handle == &weight ? 0 : 1; }
API AOTInductorModelContainerGetNumInputs(void* handle, size_t* n) { return (void)handle, *n = 1, 0; }
API AOTInductorModelContainerGetNumOutputs(void* handle, size_t* n) { return (void)handle, *n = 1, 0; }
API AOTInductorModelContainerGetNumConstants(void* handle, size_t* n) { return (void)handle, *n = 1, 0; }
API AOTInductorModelContainerGetConstantName(void* handle, size_t i, const char** name) {
  return (void)handle, *name = names[i], 0;
}
API AOTInductorModelContainerGetConstantDtype(void* handle, size_t i, int32_t* dtype) {
  return (void)handle, (void)i, *dtype = 6, 0;
}
API AOTInductorModelContainerGetConstantDataSize(void* handle, size_t i, size_t* nbytes) {
  return (void)handle, (void)i, *nbytes = 16, 0;
}
API AOTInductorModelContainerUpdateUserManagedConstantBufferPairs(void* handle, const struct Entry* pairs, size_t n,
                                                                  bool inactive, bool validate) {
  (void)handle, (void)inactive, (void)validate;
  if (n != 1) return 1;
  weight = pairs[0].handle;
  return 0;
}
#ifdef SPECIFICATION
/* Room that a fuzzer fills in. */
static const char in_room[SPECIFICATION] = "[1, {in", out_room[SPECIFICATION] = "[1, {out";
#endif
API AOTInductorModelContainerGetCallSpec(void* handle, const char** in, const char** out) {
  (void)handle;
  *in =
      "[1, {\"type\": \"builtins.tuple\", \"context\": \"null\", \"children_spec\": ["
      "{\"type\": \"builtins.tuple\", \"context\": \"null\", \"children_spec\": ["
      "{\"type\": null, \"context\": null, \"children_spec\": []}]}, "
      "{\"type\": \"builtins.dict\", \"context\": \"[]\", \"children_spec\": []}]}]";
  *out = "[1, {\"type\": null, \"context\": null, \"children_spec\": []}]";
#ifdef SPECIFICATION
  *in = in_room, *out = out_room;
#endif
  return 0;
}
API AOTInductorModelContainerRun(void* handle, Tensor* inputs, size_t num_inputs, Tensor* outputs, size_t num_outputs,
                                 void* stream, void* proxy) {
  (void)handle, (void)num_inputs, (void)num_outputs, (void)stream, (void)proxy;
  const int64_t sizes[] = {4}, strides[] = {1};
  void *x = NULL, *w = NULL, *y = NULL;
  int64_t numel = 0;
  int32_t failed = aoti_torch_empty_strided(1, sizes, strides, 6, 0, -1, &outputs[0]) |
                   aoti_torch_get_numel(inputs[0], &numel) | aoti_torch_get_data_ptr(inputs[0], &x) |
                   aoti_torch_get_data_ptr(weight, &w) | aoti_torch_get_data_ptr(outputs[0], &y);
#ifdef EXERCISE
  if (!failed) exercise((int)((float*)x)[0]);
#endif
  for (int64_t i = 0; !failed && i < 4 && i < numel; ++i) ((float*)y)[i] = 2 * ((float*)x)[i] + ((float*)w)[i];
#ifdef RETURN_WEIGHT
  aoti_torch_delete_tensor_object(outputs[0]);
  failed |= aoti_torch_new_tensor_handle(weight, &outputs[0]);
#endif
  aoti_torch_delete_tensor_object(inputs[0]);
  inputs[0] = NULL;
  ++calls;
  return failed;
}
