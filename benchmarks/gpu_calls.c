/* Times calls of a CUDA package from C: seconds to enqueue and to finish, plain and as a graph, as JSON.
 * Usage: gpu_calls MODEL.pt2 ROWS COLUMNS CALLS */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <untorch/untorch.h>

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void must(untorch_status status) {
  if (status == UNTORCH_OK) return;
  fprintf(stderr, "%s\n", untorch_last_error());
  exit(1);
}

static int compare(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static void run(untorch_method* method, untorch_graph* graph, const untorch_view* input) {
  untorch_tensor* output = NULL;
  int32_t alias = -1;
  must(graph != NULL ? untorch_graph_run(graph, input, 1, &output, &alias, 1)
                     : untorch_method_run(method, input, 1, &output, &alias, 1));
  untorch_tensor_free(output);
}

/* Medians over `calls` calls. */
static void measure(const char* name, untorch_method* method, untorch_graph* graph, const untorch_view* input,
                    int32_t device, int calls, const char* end) {
  double* enqueue = malloc((size_t)calls * sizeof *enqueue);
  double* total = malloc((size_t)calls * sizeof *total);
  void* stream = NULL;
  if (enqueue == NULL || total == NULL) exit(1);
  must(untorch_call_stream(device, &stream));
  for (int i = -calls / 10 - 1; i < calls; ++i) {
    const double start = now();
    run(method, graph, input);
    const double enqueued = now();
    must(untorch_stream_synchronize(device, stream));
    if (i < 0) continue;
    enqueue[i] = enqueued - start;
    total[i] = now() - start;
  }
  qsort(enqueue, (size_t)calls, sizeof *enqueue, compare);
  qsort(total, (size_t)calls, sizeof *total, compare);
  printf("\"%s\": {\"enqueue\": %.9f, \"total\": %.9f, \"best_enqueue\": %.9f, \"best_total\": %.9f}%s", name,
         enqueue[calls / 2], total[calls / 2], enqueue[0], total[0], end);
  free(enqueue);
  free(total);
}

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const int64_t sizes[2] = {atoll(argv[2]), atoll(argv[3])}, strides[2] = {sizes[1], 1};
  const int calls = atoi(argv[4]);
  if (sizes[0] < 1 || sizes[1] < 1 || calls < 1) return 2;
  untorch_program* program = NULL;
  must(untorch_program_open(argv[1], NULL, &program));
  untorch_method* method = untorch_program_method(program, 0);
  must(untorch_method_open(method));
  int32_t type = 0, device = 0;
  must(untorch_method_device(method, &type, &device));
  float* data = calloc((size_t)(sizes[0] * sizes[1]), sizeof *data);
  if (data == NULL) return 1;
  const untorch_view host = {data, 6, 0, -1, 2, sizes, strides, 1};
  untorch_tensor* input = NULL;
  must(untorch_tensor_to_device(&host, device, &input));
  untorch_view view;
  untorch_tensor_view(input, &view);
  untorch_graph* graph = NULL;
  must(untorch_graph_capture(method, &view, 1, &graph));
  printf("{");
  measure("call", method, NULL, &view, device, calls, ", ");
  measure("graph", method, graph, &view, device, calls, "}\n");
  untorch_graph_free(graph);
  untorch_tensor_free(input);
  untorch_program_free(program);
  free(data);
  return 0;
}
