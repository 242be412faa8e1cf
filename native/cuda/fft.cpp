// cuFFT: the functions that we call, and the cache of plans, which are expensive to make.
//
// A plan carries its stream and its work area, so a mutex is held from setting them to the launch. The work area comes
// from the memory pool at every call.
#include "cuda/fft.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <string>

#include "cuda/library_search.h"
#include "cuda/memory_pool.h"
#include "cuda/stream.h"

namespace untorch::cuda {
namespace {

// cufft.h's types and constants, as far as they are used here.
using FftStatus = int;  // cufftResult
using FftHandle = int;
enum : int { kC2C = 0x29, kR2C = 0x2a, kC2R = 0x2c, kZ2Z = 0x69, kD2Z = 0x6a, kZ2D = 0x6c };  // cufftType
constexpr int kForward = -1, kInverse = 1;
constexpr FftStatus kFftSuccess = 0, kFftAllocFailed = 2;

// X(member, exported name, arguments)
#define UNTORCH_FFT(X)                                                                                           \
  X(create, cufftCreate, (FftHandle * plan))                                                                     \
  X(destroy, cufftDestroy, (FftHandle plan))                                                                     \
  X(set_auto_allocation, cufftSetAutoAllocation, (FftHandle plan, int automatic))                                \
  X(make_plan, cufftMakePlanMany64,                                                                              \
    (FftHandle plan, int rank, long long* size, long long* in_embed, long long in_stride, long long in_distance, \
     long long* out_embed, long long out_stride, long long out_distance, int type, long long batch,              \
     std::size_t* work_bytes))                                                                                   \
  X(set_stream, cufftSetStream, (FftHandle plan, Stream stream))                                                 \
  X(set_work_area, cufftSetWorkArea, (FftHandle plan, void* work))                                               \
  X(c2c, cufftExecC2C, (FftHandle plan, void* input, void* output, int direction))                               \
  X(z2z, cufftExecZ2Z, (FftHandle plan, void* input, void* output, int direction))                               \
  X(r2c, cufftExecR2C, (FftHandle plan, void* input, void* output))                                              \
  X(d2z, cufftExecD2Z, (FftHandle plan, void* input, void* output))                                              \
  X(c2r, cufftExecC2R, (FftHandle plan, void* input, void* output))                                              \
  X(z2d, cufftExecZ2D, (FftHandle plan, void* input, void* output))

struct FftLibrary {
#define UNTORCH_MEMBER(member, symbol, arguments) FftStatus(*member) arguments = nullptr;
  UNTORCH_FFT(UNTORCH_MEMBER)
#undef UNTORCH_MEMBER
};

struct Opened {
  FftLibrary table;
  std::string reason;  // why it cannot be opened; empty when it was opened
};

std::string open_into(FftLibrary& table) {
  constexpr LibraryHint kCufft{"cuFFT", "cufft", "nvidia-cufft", false};
  constexpr LibraryHint kJitLink{"nvJitLink", "nvjitlink", "nvidia-nvjitlink", false};
  std::string error, unused;
  // A dependency of cuFFT: opened first, it is found wherever it is installed.
  (void)open_library({"libnvJitLink.so.13", "libnvJitLink.so.12"}, kJitLink, unused);
  void* const library = open_library({"libcufft.so.12", "libcufft.so.11"}, kCufft, error);
  if (library == nullptr) return error;
#define UNTORCH_RESOLVE(member, symbol, arguments)                                        \
  if (void* const found = dlsym(library, #symbol); found != nullptr) {                    \
    table.member = reinterpret_cast<decltype(table.member)>(found);                       \
  } else {                                                                                \
    return "this cuFFT has no " #symbol ": install that of CUDA 12 or 13 (nvidia-cufft)"; \
  }
  UNTORCH_FFT(UNTORCH_RESOLVE)
#undef UNTORCH_RESOLVE
  return {};
}

const FftLibrary& library_for(const char* op) {
  static const Opened& opened = *[] {
    auto* made = new Opened;
    made->reason = open_into(made->table);
    return made;
  }();
  if (!opened.reason.empty()) [[unlikely]]
    throw_error(ErrorKind::kUnsupported, op, ": Fourier transforms on CUDA need cuFFT: ", opened.reason);
  return opened.table;
}

void check_status(const char* op, FftStatus status, const char* call) {
  if (status == kFftSuccess) return;
  throw_error(status == kFftAllocFailed ? ErrorKind::kOutOfMemory : ErrorKind::kInternal, op, ": ", call,
              " failed with cufftResult ", status);
}

struct Plan {
  FftHandle handle = 0;
  std::size_t work_bytes = 0;
};
// Device, type, rank, sizes, batch. Directions share a plan.
using Key = std::array<std::int64_t, 7>;

struct Plans {
  std::mutex mutex;
  std::map<Key, Plan> made;
};
Plans& plans() {
  static auto& all = *new Plans;
  return all;
}

int type_of(const FftProblem& p) {
  switch (p.kind) {
    case FftKind::kRealToComplex:
      return p.wide ? kD2Z : kR2C;
    case FftKind::kComplexToReal:
      return p.wide ? kZ2D : kC2R;
    default:
      return p.wide ? kZ2Z : kC2C;
  }
}

FftStatus execute(const FftLibrary& api, const FftProblem& p, FftHandle plan, void* input, void* output) {
  switch (p.kind) {
    case FftKind::kRealToComplex:
      return (p.wide ? api.d2z : api.r2c)(plan, input, output);
    case FftKind::kComplexToReal:
      return (p.wide ? api.z2d : api.c2r)(plan, input, output);
    default:
      return (p.wide ? api.z2z : api.c2c)(plan, input, output, p.forward ? kForward : kInverse);
  }
}

Plan plan_for(const char* op, const FftLibrary& api, const FftProblem& p, int device, Stream stream) {
  constexpr std::size_t kKept = 256;
  auto& made = plans().made;
  const Key key{device, type_of(p), p.rank, p.size[0], p.size[1], p.size[2], p.batch};
  if (const auto found = made.find(key); found != made.end()) return found->second;
  // Destroying a plan waits for the device, which a capture forbids: then the table grows.
  if (made.size() >= kKept && !is_capturing(stream)) {
    for (const auto& [_, plan] : made) (void)api.destroy(plan.handle);
    made.clear();
  }
  Plan plan;
  check_status(op, api.create(&plan.handle), "cufftCreate");
  std::array<long long, kMaxFftRank> size{};
  for (std::size_t d = 0; d < size.size(); ++d) size[d] = p.size[d];
  FftStatus status = api.set_auto_allocation(plan.handle, 0);
  if (status == kFftSuccess) {
    status = api.make_plan(plan.handle, p.rank, size.data(), nullptr, 1, 1, nullptr, 1, 1, type_of(p), p.batch,
                           &plan.work_bytes);
  }
  if (status != kFftSuccess) {
    (void)api.destroy(plan.handle);
    check_status(op, status, "cufftMakePlanMany64");
  }
  made.emplace(key, plan);
  return plan;
}

}  // namespace

void fft(const char* op, const FftProblem& p, void* input, void* output, int device, Stream stream) {
  const FftLibrary& api = library_for(op);
  const RelaxedCapture relaxed;  // for making the plan, which allocates and loads code
  const std::lock_guard lock(plans().mutex);
  const Plan plan = plan_for(op, api, p, device, stream);
  // cuFFT wants an address also where it needs no memory.
  const StorageRef work = allocate(plan.work_bytes == 0 ? 1 : plan.work_bytes, device);
  check_status(op, api.set_stream(plan.handle, stream), "cufftSetStream");
  check_status(op, api.set_work_area(plan.handle, work->data()), "cufftSetWorkArea");
  check_status(op, execute(api, p, plan.handle, input, output), "cufftExec");
}

}  // namespace untorch::cuda
