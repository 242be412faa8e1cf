// Runs the first method of a package twice on a CUDA stream: one float32 input of ones, the first values printed.
//
// Usage: run_on_stream MODEL.pt2 SIZE… : the sizes of the input. A package for the CPU runs, too, and ignores the
// stream.
#include <untorch/caller_stream.h>
#include <untorch/untorch.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <vector>

#ifdef EXAMPLE_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

namespace {

void check(untorch_status status) {
  if (status != UNTORCH_OK) throw std::runtime_error(untorch_last_error());
}

struct Free {
  void operator()(untorch_program* program) const { untorch_program_free(program); }
  void operator()(untorch_tensor* tensor) const { untorch_tensor_free(tensor); }
};
using Program = std::unique_ptr<untorch_program, Free>;
using Tensor = std::unique_ptr<untorch_tensor, Free>;

// A stream for the rest of the program; without the toolkit the legacy default stream.
CUstream_st* make_stream() {
#ifdef EXAMPLE_HAS_CUDA
  cudaStream_t stream = nullptr;
  if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess) return stream;
#endif
  return nullptr;
}

void print(const untorch_tensor* output) {
  untorch_view view;
  untorch_tensor_view(output, &view);
  std::printf("dtype %d, shape [", view.dtype);
  for (int d = 0; d < view.ndim; ++d) std::printf(d == 0 ? "%lld" : ", %lld", static_cast<long long>(view.sizes[d]));
  std::printf("] on %s\n", view.device_type == UNTORCH_CPU ? "the CPU" : "the GPU");
  untorch_tensor* copy = nullptr;
  check(untorch_tensor_to_host(output, &copy));  // waits for the stream
  const Tensor host(copy);
  untorch_tensor_view(host.get(), &view);
  const bool values = view.dtype == UNTORCH_FLOAT32 && view.ndim > 0 && view.data != nullptr;
  const long long stride = values ? static_cast<long long>(view.strides[view.ndim - 1]) : 0;
  for (long long i = 0; values && i < view.sizes[view.ndim - 1] && i < 8; ++i) {
    std::printf(" %g", static_cast<double>(static_cast<const float*>(view.data)[i * stride]));
  }
  std::printf("\n");
}

void run(const char* path, const std::vector<std::int64_t>& sizes) {
  std::vector<std::int64_t> strides(sizes.size());
  std::int64_t count = 1;
  for (std::size_t d = sizes.size(); d-- > 0;) {
    strides[d] = count;
    count *= sizes[d];
  }
  const std::vector<float> ones(static_cast<std::size_t>(count), 1.0f);
  const untorch_view input{const_cast<float*>(ones.data()),         UNTORCH_FLOAT32, UNTORCH_CPU,    -1,
                           static_cast<std::int32_t>(sizes.size()), sizes.data(),    strides.data(), 1};
  untorch_program* opened = nullptr;
  check(untorch_program_open(path, nullptr, &opened));
  const Program program(opened);
  untorch_method* const method = untorch_program_method(opened, 0);
  std::size_t num_inputs = 0, num_outputs = 0;
  check(untorch_method_arity(method, &num_inputs, &num_outputs));

  // All work of the calls is enqueued on this stream, in order. Nothing waits until the values are read.
  const untorch::CallerStreamGuard guard(make_stream());
  for (int call = 0; call < 2; ++call) {
    std::vector<untorch_tensor*> outputs(num_outputs, nullptr);
    std::vector<std::int32_t> aliases(num_outputs, -1);
    check(untorch_method_run(method, &input, 1, outputs.data(), aliases.data(), num_outputs));
    std::vector<Tensor> owned(outputs.begin(), outputs.end());
    for (const Tensor& output : owned) {
      if (output != nullptr) print(output.get());
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::int64_t> sizes;
  for (int i = 2; i < argc; ++i) sizes.push_back(std::atoll(argv[i]));
  for (const std::int64_t size : sizes) {
    if (size < 1 || size > 1 << 20) argc = 0;
  }
  if (argc < 2) {
    std::fprintf(stderr, "usage: run_on_stream MODEL.pt2 SIZE…\n");
    return 2;
  }
  try {
    run(argv[1], sizes);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
