/* Times calls of a CUDA package from C: seconds to enqueue and to finish, plain and as a graph, as JSON; and as many
 * launches of an empty kernel as a call has.
 * Usage: gpu_calls MODEL.pt2 ROWS COLUMNS CALLS */
#include <dlfcn.h>
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

/* The driver's functions that this needs. */
static struct {
  int (*begin)(void* stream, int mode);
  int (*end)(void* stream, void** graph);
  int (*nodes)(void* graph, void** nodes, size_t* count);
  int (*type)(void* node, int* type);
  int (*load)(void** module, const char* ptx);
  int (*function)(void** function, void* module, const char* name);
  int (*launch)(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void* stream,
                void** parameters, void** extra);
} driver;

static void* find(void* library, const char* name) {
  void* const symbol = dlsym(library, name);
  if (symbol == NULL) {
    fprintf(stderr, "libcuda.so.1 has no %s\n", name);
    exit(1);
  }
  return symbol;
}

static void accept(int code, const char* what) {
  if (code == 0) return;
  fprintf(stderr, "%s: CUDA error %d\n", what, code);
  exit(1);
}

static const char kernel_text[] =
    ".version 7.0\n.target sm_80\n.address_size 64\n"
    ".visible .entry empty(.param .u64 a, .param .u64 b, .param .u64 c, .param .u32 d) { ret; }\n";
static void* empty;
static int launches;

/* Kernels of one call, and an empty one to launch instead. */
static void count_launches(untorch_method* method, const untorch_view* input, int32_t device) {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == NULL) exit(1);
  *(void**)&driver.begin = find(library, "cuStreamBeginCapture_v2");
  *(void**)&driver.end = find(library, "cuStreamEndCapture");
  *(void**)&driver.nodes = find(library, "cuGraphGetNodes");
  *(void**)&driver.type = find(library, "cuGraphNodeGetType");
  *(void**)&driver.load = find(library, "cuModuleLoadData");
  *(void**)&driver.function = find(library, "cuModuleGetFunction");
  *(void**)&driver.launch = find(library, "cuLaunchKernel");
  void *stream = NULL, *graph = NULL, *module = NULL, *nodes[256];
  must(untorch_call_stream(device, &stream));
  run(method, NULL, input);
  accept(driver.begin(stream, 2), "capturing");
  run(method, NULL, input);
  accept(driver.end(stream, &graph), "capturing");
  size_t count = 256;
  accept(driver.nodes(graph, nodes, &count), "reading the graph");
  for (size_t i = 0; i < count; ++i) {
    int type = -1;
    accept(driver.type(nodes[i], &type), "reading the graph");
    launches += type == 0;
  }
  accept(driver.load(&module, kernel_text), "loading the empty kernel");
  accept(driver.function(&empty, module, "empty"), "loading the empty kernel");
}

static void launch_empty(void* stream) {
  void *a = NULL, *b = NULL, *c = NULL;
  int d = 0;
  void* parameters[] = {&a, &b, &c, &d};
  for (int i = 0; i < launches; ++i) {
    accept(driver.launch(empty, 4, 1, 1, 128, 1, 1, 0, stream, parameters, NULL), "launching");
  }
}

/* Medians over `calls` calls; of empty launches when there is no method. */
static void measure(const char* name, untorch_method* method, untorch_graph* graph, const untorch_view* input,
                    int32_t device, int calls, const char* end) {
  double* enqueue = malloc((size_t)calls * sizeof *enqueue);
  double* total = malloc((size_t)calls * sizeof *total);
  void* stream = NULL;
  if (enqueue == NULL || total == NULL) exit(1);
  must(untorch_call_stream(device, &stream));
  for (int i = -calls / 10 - 1; i < calls; ++i) {
    const double start = now();
    if (method == NULL)
      launch_empty(stream);
    else
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
  count_launches(method, &view, device);
  printf("{\"launches\": %d, ", launches);
  measure("floor", NULL, NULL, NULL, device, calls, ", ");
  measure("call", method, NULL, &view, device, calls, ", ");
  measure("graph", method, graph, &view, device, calls, "}\n");
  untorch_graph_free(graph);
  untorch_tensor_free(input);
  untorch_program_free(program);
  free(data);
  return 0;
}
