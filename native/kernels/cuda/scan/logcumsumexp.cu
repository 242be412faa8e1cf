// logcumsumexp. See scan.cuh.
#include "kernels/cuda/scan/arithmetic.cuh"

namespace untorch::kernels::cuda {
namespace {

// log(exp(a) + exp(b)) without overflow; infinities of one sign and NaNs pass through.
template <class State>
struct LogAddExp {
  __device__ static State start() { return -static_cast<State>(INFINITY); }
  __device__ static State combine(State a, State b) {
    if (isnan(a) || isnan(b)) return a + b;
    const State high = a > b ? a : b, low = a > b ? b : a;
    if (low == high && isinf(low)) return low;
    return log1p(exp(low - high)) + high;
  }
};

}  // namespace

int logcumsumexp(const ScanJob& job, void* scratch, Stream stream) {
  if (job.in_dtype != job.out_dtype) return kNoKernel;
  return dispatch_floating(job.out_dtype, [&](auto type) {
    return scan::run(scan::Arithmetic<typename decltype(type)::type, LogAddExp>(job), scratch, stream);
  });
}

}  // namespace untorch::kernels::cuda
