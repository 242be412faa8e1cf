// TRSM, GEQRF and ORMQR: the functions of cuBLAS and cuSOLVER, resolved at run time, and their handles.
#include "cuda/solver.h"

#include <dlfcn.h>

#include <array>
#include <climits>
#include <memory>
#include <string>

#include "cuda/handle_pool.h"
#include "cuda/library_search.h"
#include "cuda/memory_pool.h"
#include "cuda/stream.h"

namespace untorch::cuda {
namespace {

using LibraryStatus = int;  // cublasStatus_t, cusolverStatus_t: 0 is success in both
using LibraryHandle = void*;
enum : int { kLeft = 0, kRight = 1 };                     // cublasSideMode_t
enum : int { kLower = 0, kUpper = 1 };                    // cublasFillMode_t
enum : int { kPlain = 0, kTranspose = 1, kAdjoint = 2 };  // cublasOperation_t
enum : int { kNonUnit = 0, kUnit = 1 };                   // cublasDiagType_t
constexpr LibraryStatus kAllocFailed[] = {3, 2};          // of cuBLAS, of cuSOLVER

constexpr LibraryHint kCusolver{"cuSOLVER", "cusolver", "nvidia-cusolver", false};
constexpr LibraryHint kCusparse{"cuSPARSE", "cusparse", "nvidia-cusparse", false};
constexpr LibraryHint kJitLink{"nvJitLink", "nvjitlink", "nvidia-nvjitlink", false};

// One function a dtype: float32, float64, complex64, complex128.
using Trsm = LibraryStatus (*)(LibraryHandle handle, int side, int fill, int operation, int diagonal, int m, int n,
                               const void* alpha, const void* a, int lda, void* b, int ldb);
using TrsmBatched = LibraryStatus (*)(LibraryHandle handle, int side, int fill, int operation, int diagonal, int m,
                                      int n, const void* alpha, const void* const* a, int lda, void* const* b, int ldb,
                                      int batch);
struct Blas {
  LibraryStatus (*create)(LibraryHandle* handle) = nullptr;
  LibraryStatus (*set_stream)(LibraryHandle handle, Stream stream) = nullptr;
  LibraryStatus (*set_workspace)(LibraryHandle handle, void* workspace, std::size_t bytes) = nullptr;
  std::array<Trsm, 4> trsm{};
  std::array<TrsmBatched, 4> trsm_batched{};
};

using GeqrfSize = LibraryStatus (*)(LibraryHandle handle, int m, int n, void* a, int lda, int* work);
using Geqrf = LibraryStatus (*)(LibraryHandle handle, int m, int n, void* a, int lda, void* tau, void* work,
                                int work_size, int* info);
using OrmqrSize = LibraryStatus (*)(LibraryHandle handle, int side, int operation, int m, int n, int k, const void* a,
                                    int lda, const void* tau, const void* c, int ldc, int* work);
using Ormqr = LibraryStatus (*)(LibraryHandle handle, int side, int operation, int m, int n, int k, const void* a,
                                int lda, const void* tau, void* c, int ldc, void* work, int work_size, int* info);
struct Solver {
  LibraryStatus (*create)(LibraryHandle* handle) = nullptr;
  LibraryStatus (*set_stream)(LibraryHandle handle, Stream stream) = nullptr;
  std::array<GeqrfSize, 4> geqrf_size{};
  std::array<Geqrf, 4> geqrf{};
  std::array<OrmqrSize, 4> ormqr_size{};
  std::array<Ormqr, 4> ormqr{};
};

template <class Table>
struct Opened {
  Table table;
  std::string reason;  // why it cannot be opened; empty when it was opened
};

template <class Function>
void resolve(void* library, const char* name, Function& function, std::string& error) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr && error.empty()) {
    error = std::string("the library that was found has no ") + name + ": install that of CUDA 12 or 13";
  }
}

std::string open_into(Blas& table) {
  std::string error, unused;
  (void)open_library({"libcublasLt.so.13", "libcublasLt.so.12"}, kCublas, unused);
  void* const library = open_library({"libcublas.so.13", "libcublas.so.12"}, kCublas, error);
  if (library == nullptr) return error;
  error.clear();
  resolve(library, "cublasCreate_v2", table.create, error);
  resolve(library, "cublasSetStream_v2", table.set_stream, error);
  resolve(library, "cublasSetWorkspace_v2", table.set_workspace, error);
  constexpr const char* kTrsm[] = {"cublasStrsm_v2", "cublasDtrsm_v2", "cublasCtrsm_v2", "cublasZtrsm_v2"};
  constexpr const char* kBatched[] = {"cublasStrsmBatched", "cublasDtrsmBatched", "cublasCtrsmBatched",
                                      "cublasZtrsmBatched"};
  for (std::size_t i = 0; i < 4; ++i) {
    resolve(library, kTrsm[i], table.trsm[i], error);
    resolve(library, kBatched[i], table.trsm_batched[i], error);
  }
  return error;
}

std::string open_into(Solver& table) {
  std::string error, unused;
  // Dependencies of cuSOLVER: opened first, they are found wherever they are installed.
  (void)open_library({"libcublasLt.so.13", "libcublasLt.so.12"}, kCublas, unused);
  (void)open_library({"libcublas.so.13", "libcublas.so.12"}, kCublas, unused);
  (void)open_library({"libnvJitLink.so.13", "libnvJitLink.so.12"}, kJitLink, unused);
  (void)open_library({"libcusparse.so.12"}, kCusparse, unused);
  void* const library = open_library({"libcusolver.so.12", "libcusolver.so.11"}, kCusolver, error);
  if (library == nullptr) return error;
  error.clear();
  resolve(library, "cusolverDnCreate", table.create, error);
  resolve(library, "cusolverDnSetStream", table.set_stream, error);
  constexpr const char* kGeqrf[] = {"cusolverDnSgeqrf", "cusolverDnDgeqrf", "cusolverDnCgeqrf", "cusolverDnZgeqrf"};
  constexpr const char* kOrmqr[] = {"cusolverDnSormqr", "cusolverDnDormqr", "cusolverDnCunmqr", "cusolverDnZunmqr"};
  for (std::size_t i = 0; i < 4; ++i) {
    resolve(library, kGeqrf[i], table.geqrf[i], error);
    resolve(library, (std::string(kGeqrf[i]) + "_bufferSize").c_str(), table.geqrf_size[i], error);
    resolve(library, kOrmqr[i], table.ormqr[i], error);
    resolve(library, (std::string(kOrmqr[i]) + "_bufferSize").c_str(), table.ormqr_size[i], error);
  }
  return error;
}

template <class Table>
const Table& library_for(const char* op, const char* title) {
  static const Opened<Table>& opened = *[] {
    auto* made = new Opened<Table>;
    made->reason = open_into(made->table);
    return made;
  }();
  if (!opened.reason.empty()) [[unlikely]]
    throw_error(ErrorKind::kUnsupported, op, " on CUDA needs ", title, ": ", opened.reason);
  return opened.table;
}

void check_status(const char* op, LibraryStatus status, const char* title, bool solver) {
  if (status == 0) return;
  throw_error(status == kAllocFailed[solver ? 1 : 0] ? ErrorKind::kOutOfMemory : ErrorKind::kInternal, op, ": ", title,
              " failed with status ", status);
}

// A handle does not know its library: one pool a library.
struct Handle {
  LibraryHandle handle = nullptr;
};
HandlePool<Handle>& blas_handles() {
  static auto& pool = *new HandlePool<Handle>;
  return pool;
}
HandlePool<Handle>& solver_handles() {
  static auto& pool = *new HandlePool<Handle>;
  return pool;
}

std::size_t index_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 0;
    case DType::kFloat64:
      return 1;
    case DType::kComplex64:
      return 2;
    default:
      return 3;
  }
}

int narrow(const char* op, std::int64_t value) {
  check(value <= INT_MAX, op, ": a matrix has ", value, " rows or columns, more than NVIDIA's libraries take");
  return static_cast<int>(value);
}

// The scalar alpha = 1 in the dtype: complex values begin with their real part.
struct One {
  float narrow[2] = {1.0f, 0.0f};
  double wide[2] = {1.0, 0.0};
  const void* in(DType dtype) const {
    return dtype == DType::kFloat32 || dtype == DType::kComplex64 ? static_cast<const void*>(narrow) : wide;
  }
};

template <class T>
T* advanced(T* base, std::int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  return static_cast<Byte*>(base) + bytes;
}

}  // namespace

void solve_triangular(const char* op, DType dtype, std::int64_t count, std::int64_t n, std::int64_t columns,
                      const TriangularSystem& system, const void* a, void* b, const void* const* pointers, int device,
                      Stream stream) {
  if (count * n * columns == 0) return;
  const Blas& api = library_for<Blas>(op, "cuBLAS");
  const int rows = narrow(op, n), width = narrow(op, columns), batch = narrow(op, count);
  const std::size_t kind = index_of(dtype);
  const RelaxedCapture relaxed;  // handles allocate and load code
  const auto handle = blas_handles().take(device, [&] {
    auto made = std::make_unique<Handle>();
    check_status(op, api.create(&made->handle), "cublasCreate", false);
    return made;
  });
  // Workspace from the pool, so that cuBLAS allocates nothing itself, during capture in particular.
  constexpr std::size_t kWorkspace = std::size_t{4} << 20;
  const StorageRef workspace = allocate(kWorkspace, device);
  check_status(op, api.set_stream(handle->handle, stream), "cublasSetStream", false);
  check_status(op, api.set_workspace(handle->handle, workspace->data(), kWorkspace), "cublasSetWorkspace", false);
  const One one;
  const int fill = system.upper ? kUpper : kLower;
  const int operation = !system.transposed ? kPlain : system.conjugated ? kAdjoint : kTranspose;
  const int diagonal = system.unit ? kUnit : kNonUnit;
  const auto bytes = static_cast<std::int64_t>(element_size(dtype));
  if (solves_in_batches(count, n)) {
    auto* const targets = const_cast<void* const*>(pointers + count);
    check_status(op,
                 api.trsm_batched[kind](handle->handle, kLeft, fill, operation, diagonal, rows, width, one.in(dtype),
                                        pointers, rows, targets, rows, batch),
                 "cublasTrsmBatched", false);
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    check_status(op,
                 api.trsm[kind](handle->handle, kLeft, fill, operation, diagonal, rows, width, one.in(dtype),
                                advanced(a, i * n * n * bytes), rows, advanced(b, i * n * columns * bytes), rows),
                 "cublasTrsm", false);
  }
}

void factor_qr(const char* op, DType dtype, std::int64_t count, std::int64_t m, std::int64_t n, void* a, void* tau,
               int device, Stream stream) {
  if (count * m * n == 0) return;
  const Solver& api = library_for<Solver>(op, "cuSOLVER");
  const int rows = narrow(op, m), width = narrow(op, n);
  const std::size_t kind = index_of(dtype);
  const RelaxedCapture relaxed;  // handles allocate and load code
  const auto handle = solver_handles().take(device, [&] {
    auto made = std::make_unique<Handle>();
    check_status(op, api.create(&made->handle), "cusolverDnCreate", true);
    return made;
  });
  check_status(op, api.set_stream(handle->handle, stream), "cusolverDnSetStream", true);
  const auto bytes = static_cast<std::int64_t>(element_size(dtype));
  int size = 0;
  check_status(op, api.geqrf_size[kind](handle->handle, rows, width, a, rows, &size), "cusolverDnGeqrf_bufferSize",
               true);
  const StorageRef work = allocate(static_cast<std::size_t>(size < 1 ? 1 : size) * element_size(dtype), device);
  const StorageRef info = allocate(sizeof(int), device);  // only reports arguments that we have checked
  const std::int64_t factors = std::min(m, n);
  for (std::int64_t i = 0; i < count; ++i) {
    check_status(
        op,
        api.geqrf[kind](handle->handle, rows, width, advanced(a, i * m * n * bytes), rows,
                        advanced(tau, i * factors * bytes), work->data(), size, static_cast<int*>(info->data())),
        "cusolverDnGeqrf", true);
  }
}

void apply_q(const char* op, DType dtype, std::int64_t count, std::int64_t m, std::int64_t n, std::int64_t v_columns,
             std::int64_t reflections, bool left, bool adjoint, const void* v, const void* tau, void* c, int device,
             Stream stream) {
  if (count * m * n * reflections == 0) return;
  const Solver& api = library_for<Solver>(op, "cuSOLVER");
  const int rows = narrow(op, m), width = narrow(op, n), factors = narrow(op, reflections);
  const std::int64_t v_rows = left ? m : n;
  const std::size_t kind = index_of(dtype);
  const RelaxedCapture relaxed;  // handles allocate and load code
  const auto handle = solver_handles().take(device, [&] {
    auto made = std::make_unique<Handle>();
    check_status(op, api.create(&made->handle), "cusolverDnCreate", true);
    return made;
  });
  check_status(op, api.set_stream(handle->handle, stream), "cusolverDnSetStream", true);
  const int side = left ? kLeft : kRight;
  const bool real = dtype == DType::kFloat32 || dtype == DType::kFloat64;
  const int operation = !adjoint ? kPlain : real ? kTranspose : kAdjoint;
  const auto bytes = static_cast<std::int64_t>(element_size(dtype));
  int size = 0;
  check_status(op,
               api.ormqr_size[kind](handle->handle, side, operation, rows, width, factors, v, narrow(op, v_rows), tau,
                                    c, rows, &size),
               "cusolverDnOrmqr_bufferSize", true);
  const StorageRef work = allocate(static_cast<std::size_t>(size < 1 ? 1 : size) * element_size(dtype), device);
  const StorageRef info = allocate(sizeof(int), device);
  for (std::int64_t i = 0; i < count; ++i) {
    check_status(op,
                 api.ormqr[kind](handle->handle, side, operation, rows, width, factors,
                                 advanced(v, i * v_rows * v_columns * bytes), static_cast<int>(v_rows),
                                 advanced(tau, i * reflections * bytes), advanced(c, i * m * n * bytes), rows,
                                 work->data(), size, static_cast<int*>(info->data())),
                 "cusolverDnOrmqr", true);
  }
}

}  // namespace untorch::cuda
