// cumprod. See scan.cuh.
#include "kernels/cuda/scan/arithmetic.cuh"

namespace untorch::kernels::cuda {
namespace {

template <class State>
struct Product {
  __device__ static State start() {
    if constexpr (scan::IsPair<State>::value)
      return {1, 0};
    else
      return 1;
  }
  __device__ static State combine(State a, State b) {
    if constexpr (scan::IsPair<State>::value)
      return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
    else
      return a * b;
  }
};

}  // namespace

int cumprod(const ScanJob& job, void* scratch, Stream stream) {
  return scan::run_arithmetic<Product>(job, scratch, stream);
}

}  // namespace untorch::kernels::cuda
