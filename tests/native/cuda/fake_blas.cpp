// A fake cuBLASLt for the fake driver: every GEMM has one algorithm, a kernel named "multiply". Its parameters begin
// with the addresses of A, B, C and D and of the descriptor's bias, and with alpha.
#include <cstring>
#include <vector>

#include "cuda/blas_library.h"
#include "fake_library.h"

using namespace untorch::cuda;

namespace untorch::cuda::lt {
struct LtMatmulDescriptor {
  DevicePtr bias = 0;
};
}  // namespace untorch::cuda::lt

namespace {

template <class T>
lt::Status made(T* handle) {
  static std::uint64_t something;
  return *handle = reinterpret_cast<T>(&something), lt::kOk;
}

}  // namespace

extern "C" {

int fake_blas_executions() { return fake::executions; }

std::size_t cublasLtGetVersion() { return 130100; }
const char* cublasLtGetStatusString(lt::Status) { return "of the fake cuBLASLt"; }
lt::Status cublasLtCreate(lt::Handle* handle) { return made(handle); }
lt::Status cublasLtMatmulDescCreate(lt::Descriptor* descriptor, int, int) {
  return *descriptor = new lt::LtMatmulDescriptor, lt::kOk;
}
lt::Status cublasLtMatmulDescDestroy(lt::Descriptor descriptor) { return delete descriptor, lt::kOk; }
lt::Status cublasLtMatmulDescSetAttribute(lt::Descriptor descriptor, int attribute, const void* value, std::size_t) {
  if (attribute == lt::kDescBias) std::memcpy(&descriptor->bias, value, sizeof descriptor->bias);
  return lt::kOk;
}
lt::Status cublasLtMatrixLayoutCreate(lt::Layout* layout, int, std::uint64_t, std::uint64_t, std::int64_t) {
  return made(layout);
}
lt::Status cublasLtMatrixLayoutDestroy(lt::Layout) { return lt::kOk; }
lt::Status cublasLtMatrixLayoutSetAttribute(lt::Layout, int, const void*, std::size_t) { return lt::kOk; }
lt::Status cublasLtMatmulPreferenceCreate(lt::Preference* preference) { return made(preference); }
lt::Status cublasLtMatmulPreferenceDestroy(lt::Preference) { return lt::kOk; }
lt::Status cublasLtMatmulPreferenceSetAttribute(lt::Preference, int, const void*, std::size_t) { return lt::kOk; }
lt::Status cublasLtMatmulAlgoGetHeuristic(lt::Handle, lt::Descriptor, lt::Layout, lt::Layout, lt::Layout, lt::Layout,
                                          lt::Preference, int, lt::HeuristicResult* results, int* count) {
  results[0] = {};
  results[0].workspace_bytes = 4096;
  return *count = 1, lt::kOk;
}
lt::Status cublasLtMatmul(lt::Handle, lt::Descriptor descriptor, const void* alpha, const void* a, lt::Layout,
                          const void* b, lt::Layout, const void*, const void* c, lt::Layout, void* d, lt::Layout,
                          const lt::Algorithm*, void* workspace, std::size_t, Stream stream) {
  static const Function kernel = fake::kernel("multiply");
  std::vector<DevicePtr> words;
  for (const void* const pointer : {a, b, c, static_cast<const void*>(d)}) {
    words.push_back(reinterpret_cast<DevicePtr>(pointer));
  }
  words.push_back(descriptor->bias);
  std::uint32_t factor = 0;
  std::memcpy(&factor, alpha, sizeof factor);
  words.push_back(factor);
  const Result result =
      fake::execute(kernel, words, words[0], words[3], reinterpret_cast<DevicePtr>(workspace), stream);
  return result == kSuccess ? lt::kOk : 14;
}

}  // extern "C"
