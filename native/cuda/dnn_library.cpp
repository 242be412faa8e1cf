// Opens cuDNN.
#include "cuda/dnn_library.h"

#include <dlfcn.h>

#include "base/error.h"
#include "cuda/library_search.h"

namespace untorch::cuda::dnn {
namespace {

void open_into(Functions& out) {
  std::string unused;
  // Dependencies of cuDNN's sublibraries: opened first, they are found wherever they are installed; where they are
  // missing, cuDNN's own error says so.
  constexpr LibraryHint kRuntimeCompiler{"NVRTC", "cuda_nvrtc", "nvidia-cuda-nvrtc", false};
  (void)open_library({"libcublasLt.so.13", "libcublasLt.so.12"}, kCublas, unused);
  (void)open_library({"libnvrtc.so.13", "libnvrtc.so.12"}, kRuntimeCompiler, unused);
  void* const library = open_library({"libcudnn.so.9"}, kCudnn, out.reason);
  if (library == nullptr) return;
#define UNTORCH_RESOLVE(member, symbol, arguments)                                                     \
  out.member = reinterpret_cast<decltype(out.member)>(dlsym(library, #symbol));                        \
  if (out.member == nullptr) {                                                                         \
    out.reason = "this libcudnn.so.9 has no " #symbol ": install another cuDNN 9 (nvidia-cudnn-cu13)"; \
    return;                                                                                            \
  }
  UNTORCH_DNN(UNTORCH_RESOLVE)
#undef UNTORCH_RESOLVE
  out.error_string = reinterpret_cast<decltype(out.error_string)>(dlsym(library, "cudnnGetErrorString"));
  const auto version = reinterpret_cast<std::size_t (*)()>(dlsym(library, "cudnnGetVersion"));
  out.version = version == nullptr ? 0 : version();
}

const Functions& opened() {
  // Never freed: a convolution may run while the process ends.
  static const Functions& made = *[] {
    auto* library = new Functions;
    open_into(*library);
    return library;
  }();
  return made;
}

}  // namespace

const Functions& functions() {
  const Functions& library = opened();
  if (!library.reason.empty()) [[unlikely]]
    throw_error(ErrorKind::kUnsupported, "convolution on CUDA needs cuDNN 9: ", library.reason);
  return library;
}

void throw_status(Status status, const char* call) {
  const Functions& library = opened();
  const char* const text = library.error_string == nullptr ? nullptr : library.error_string(status);
  const bool memory = status == kNoHostMemory || status == kNoDeviceMemory;
  throw_error(memory ? ErrorKind::kOutOfMemory : ErrorKind::kInternal, "convolution: cuDNN ", library.version, ": ",
              call, ": ", text == nullptr ? "unknown status" : text, " (", status, ")");
}

std::int32_t type_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat16:
      return kHalf;
    case DType::kBFloat16:
      return kBfloat16;
    case DType::kFloat64:
      return kDouble;
    default:
      return kFloat;
  }
}

}  // namespace untorch::cuda::dnn
