// cumsum. See scan.cuh.
#include "kernels/cuda/scan/arithmetic.cuh"

namespace untorch::kernels::cuda {
namespace {

template <class State>
struct Sum {
  __device__ static State start() {
    if constexpr (scan::IsPair<State>::value)
      return {0, 0};
    else
      return 0;
  }
  __device__ static State combine(State a, State b) {
    if constexpr (scan::IsPair<State>::value)
      return {a.re + b.re, a.im + b.im};
    else
      return a + b;
  }
};

}  // namespace

std::size_t scan_scratch(std::int64_t rows, std::int64_t n) {
  const std::int64_t along = scan::row_chunks(rows, n).count, across = scan::column_chunks(rows, n).count,
                     most = along > across ? along : across;
  return most == 1 ? 0 : static_cast<std::size_t>(most * rows) * scan::kStateBytes;
}

int cumsum(const ScanJob& job, void* scratch, Stream stream) { return scan::run_arithmetic<Sum>(job, scratch, stream); }

}  // namespace untorch::kernels::cuda
