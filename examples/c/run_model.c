/* Runs one method of a .pt2 file from C: float32 inputs of ones, the outputs printed.
 *
 * Usage: run_model MODEL.pt2 METHOD SIZE,SIZE,… [SIZE,SIZE,… …], one list of sizes for each input. */
#include <stdio.h>
#include <stdlib.h>
#include <untorch/untorch.h>

enum { kMaxInputs = 16, kMaxDims = 8 };

typedef struct array {
  untorch_view view;
  int64_t sizes[kMaxDims], strides[kMaxDims];
} array;

/* Allocates a row-major array of ones. Returns 0 if the text is no list of sizes or memory runs out. */
static int make_ones(array* a, const char* text) {
  int32_t ndim = 0;
  while (*text != '\0') {
    char* end;
    const long long size = strtoll(text, &end, 10);
    if (end == text || (*end != ',' && *end != '\0') || size < 0 || size > 1 << 20 || ndim == kMaxDims) return 0;
    a->sizes[ndim++] = size;
    text = *end == ',' ? end + 1 : end;
  }
  int64_t count = 1;
  for (int32_t d = ndim; d-- > 0;) {
    a->strides[d] = count;
    if (a->sizes[d] > 0 && count > (INT64_C(1) << 30) / a->sizes[d]) return 0;
    count *= a->sizes[d];
  }
  float* data = malloc((size_t)(count > 0 ? count : 1) * sizeof *data);
  if (data == NULL) return 0;
  for (int64_t i = 0; i < count; ++i) data[i] = 1.0f;
  a->view = (untorch_view){data, UNTORCH_FLOAT32, UNTORCH_CPU, -1, ndim, a->sizes, a->strides, 0};
  return 1;
}

/* Prints shape and, for float32, the first elements of a view with any strides. */
static void print_view(size_t number, const untorch_view* v) {
  int64_t count = 1, index[kMaxDims] = {0};
  printf("output %zu: dtype %d, shape [", number, (int)v->dtype);
  for (int32_t d = 0; d < v->ndim; ++d) {
    printf(d == 0 ? "%lld" : ", %lld", (long long)v->sizes[d]);
    count *= v->sizes[d];
  }
  printf("]");
  for (int64_t i = 0; v->dtype == UNTORCH_FLOAT32 && v->ndim <= kMaxDims && i < count && i < 8; ++i) {
    int64_t at = 0;
    for (int32_t d = 0; d < v->ndim; ++d) at += index[d] * v->strides[d];
    printf(" %g", (double)((const float*)v->data)[at]);
    for (int32_t d = v->ndim; d-- > 0;) {
      if (++index[d] < v->sizes[d]) break;
      index[d] = 0;
    }
  }
  printf("\n");
}

static int failed(const char* what) {
  fprintf(stderr, "%s: %s\n", what, untorch_last_error());
  return 1;
}

int main(int argc, char** argv) {
  const size_t num_inputs = argc > 3 ? (size_t)argc - 3 : 0;
  if (argc < 3 || num_inputs > kMaxInputs) {
    fprintf(stderr, "usage: %s MODEL.pt2 METHOD SIZE,SIZE,… …\n", argv[0]);
    return 2;
  }
  array arrays[kMaxInputs];
  untorch_view inputs[kMaxInputs];
  for (size_t i = 0; i < num_inputs; ++i) {
    if (!make_ones(&arrays[i], argv[3 + i])) {
      fprintf(stderr, "input %zu: expected sizes such as 2,64, got %s\n", i, argv[3 + i]);
      return 2;
    }
    inputs[i] = arrays[i].view;
  }

  untorch_load_options options = {.struct_size = sizeof options, .device = "cpu", .num_runners = 1, .num_threads = 0};
  untorch_program* program = NULL;
  if (untorch_program_open(argv[1], &options, &program) != UNTORCH_OK) return failed("open");

  int code = 1;
  size_t num_expected = 0, num_outputs = 0;
  untorch_method* method = untorch_program_find(program, argv[2]);
  if (method == NULL) {
    fprintf(stderr, "there is no method %s; the first one is %s\n", argv[2],
            untorch_method_name(untorch_program_method(program, 0)));
  } else if (untorch_method_arity(method, &num_expected, &num_outputs) != UNTORCH_OK) {
    code = failed("arity");
  } else {
    untorch_tensor** outputs = calloc(num_outputs + 1, sizeof *outputs);
    int32_t* aliases = calloc(num_outputs + 1, sizeof *aliases);
    if (outputs == NULL || aliases == NULL) {
      fprintf(stderr, "out of memory\n");
    } else if (untorch_method_run(method, inputs, num_inputs, outputs, aliases, num_outputs) != UNTORCH_OK) {
      code = failed("run"); /* a wrong number of inputs, shape or dtype is reported here */
    } else {
      code = 0;
      for (size_t i = 0; i < num_outputs; ++i) {
        if (outputs[i] == NULL) {
          printf("output %zu: None\n", i);
          continue;
        }
        untorch_view view;
        untorch_tensor_view(outputs[i], &view);
        print_view(i, &view);
        untorch_tensor_free(outputs[i]); /* before the inputs: it may alias their memory (aliases[i] >= 0) */
      }
    }
    free(outputs);
    free(aliases);
  }
  untorch_program_free(program);
  for (size_t i = 0; i < num_inputs; ++i) free(arrays[i].view.data);
  return code;
}
