/* A model library written by hand: y = 2·x + bias for x of shape [n, 4], with the interface of an AOTInductor library.
 * UNKNOWN asks for a function that no runtime has. */
#include <stddef.h>
#include <stdint.h>

extern int32_t aoti_torch_get_data_ptr(void* tensor, void** data);
extern int32_t aoti_torch_get_sizes(void* tensor, int64_t** sizes);
extern int32_t aoti_torch_empty_strided(int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                        int32_t device_type, int32_t device_index, void** out);
extern int32_t aoti_torch_delete_tensor_object(void* tensor);
#ifdef UNKNOWN
extern int32_t aoti_torch_cpu_no_such_operator(void);
int32_t use_it(void) { return aoti_torch_cpu_no_such_operator(); }
#endif

struct entry {
  const char* name;
  void* tensor;
};
static void* bias;

int32_t AOTInductorModelContainerCreateWithDevice(void** out, size_t models, const char* device, const char* folder) {
  (void)models, (void)device, (void)folder;
  *out = &bias;
  return 0;
}
int32_t AOTInductorModelContainerDelete(void* container) { return (void)container, 0; }
int32_t AOTInductorModelContainerGetNumInputs(void* container, size_t* n) { return (void)container, *n = 1, 0; }
int32_t AOTInductorModelContainerGetNumOutputs(void* container, size_t* n) { return (void)container, *n = 1, 0; }
int32_t AOTInductorModelContainerGetNumConstants(void* container, size_t* n) { return (void)container, *n = 1, 0; }
int32_t AOTInductorModelContainerGetConstantName(void* container, size_t i, const char** name) {
  return (void)container, (void)i, *name = "bias", 0;
}
int32_t AOTInductorModelContainerGetConstantDtype(void* container, size_t i, int32_t* dtype) {
  return (void)container, (void)i, *dtype = 6, 0;
}
int32_t AOTInductorModelContainerUpdateUserManagedConstantBufferPairs(void* container, const struct entry* pairs,
                                                                      size_t n, _Bool inactive, _Bool validate) {
  (void)container, (void)inactive, (void)validate;
  bias = n == 1 ? pairs[0].tensor : NULL;
  return 0;
}
int32_t AOTInductorModelContainerGetCallSpec(void* container, const char** in, const char** out) {
  (void)container;
  *in =
      "[1, {\"type\": \"builtins.tuple\", \"context\": \"null\", \"children_spec\": ["
      "{\"type\": \"builtins.tuple\", \"context\": \"null\", \"children_spec\": ["
      "{\"type\": null, \"context\": null, \"children_spec\": []}]}, "
      "{\"type\": \"builtins.dict\", \"context\": \"[]\", \"children_spec\": []}]}]";
  *out = "[1, {\"type\": null, \"context\": null, \"children_spec\": []}]";
  return 0;
}
int32_t AOTInductorModelContainerRun(void* container, void** inputs, size_t num_inputs, void** outputs,
                                     size_t num_outputs, void* stream, void* proxy) {
  (void)container, (void)num_inputs, (void)num_outputs, (void)stream, (void)proxy;
  int64_t* sizes;
  float *x, *y, *b;
  void* x_tensor = inputs[0];
  inputs[0] = NULL;
  if (aoti_torch_get_sizes(x_tensor, &sizes) || aoti_torch_get_data_ptr(x_tensor, (void**)&x) ||
      aoti_torch_get_data_ptr(bias, (void**)&b)) {
    return 1;
  }
  const int64_t shape[2] = {sizes[0], 4}, strides[2] = {4, 1};
  if (aoti_torch_empty_strided(2, shape, strides, 6, 0, 0, &outputs[0]) ||
      aoti_torch_get_data_ptr(outputs[0], (void**)&y)) {
    return 1;
  }
  for (int64_t i = 0; i < 4 * shape[0]; ++i) y[i] = 2 * x[i] + b[0];
  return aoti_torch_delete_tensor_object(x_tensor);
}
