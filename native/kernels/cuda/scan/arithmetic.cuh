// Policies of the arithmetic scans.
#pragma once

#include "kernels/cuda/common/integers.cuh"
#include "kernels/cuda/scan/scan.cuh"
#include "kernels/cuda/scan/scan.h"

namespace untorch::kernels::cuda::scan {

// What sums and products run in: float for the halves, 64-bit wrapping for integers (narrower results are its low
// bits), the type itself otherwise.
template <class T>
struct Pair {
  T re, im;
};

template <class T>
struct IsPair : std::false_type {};
template <class T>
struct IsPair<Pair<T>> : std::true_type {};

struct Integers {};  // any integer dtype, told apart at run time

template <class T>
struct StateOf {
  using type = Compute<T>;
};
template <>
struct StateOf<Integers> {
  using type = std::uint64_t;
};

// Op: static State start(), static State combine(State, State).
template <class T, template <class> class Op>
struct Arithmetic {
  using State = typename StateOf<T>::type;
  static constexpr int kOperands = 2;
  Lanes<2> lanes;
  void* out;
  const void* input;
  DType out_dtype, in_dtype;

  explicit Arithmetic(const ScanJob& job)
      : lanes(job.lanes), out(job.out), input(job.input), out_dtype(job.out_dtype), in_dtype(job.in_dtype) {}
  __device__ static State identity() { return Op<State>::start(); }
  __device__ static State combine(State earlier, State later) { return Op<State>::combine(earlier, later); }
  __device__ State load(const std::int64_t (&at)[2], std::int64_t i) const {
    const std::int64_t from = at[1] + i * lanes.step[1];
    if constexpr (std::is_same_v<T, Integers>)
      return load_integer(input, from, in_dtype);
    else
      return widen(static_cast<const T*>(input)[from]);
  }
  __device__ void store(const std::int64_t (&at)[2], std::int64_t i, State value) const {
    const std::int64_t to = at[0] + i * lanes.step[0];
    if constexpr (std::is_same_v<T, Integers>)
      store_integer(out, to, out_dtype, value);
    else
      static_cast<T*>(out)[to] = narrow<T>(value);
  }
};

// Sums and products: every dtype but bool and the eight-bit floats.
template <template <class> class Op>
int run_arithmetic(const ScanJob& job, void* scratch, Stream stream) {
  if (is_integer(job.out_dtype)) {
    if (!is_integer(job.in_dtype) && job.in_dtype != DType::kBool) return kNoKernel;
    return run(Arithmetic<Integers, Op>(job), scratch, stream);
  }
  if (job.in_dtype != job.out_dtype) return kNoKernel;
  if (job.out_dtype == DType::kComplex64) return run(Arithmetic<Pair<float>, Op>(job), scratch, stream);
  if (job.out_dtype == DType::kComplex128) return run(Arithmetic<Pair<double>, Op>(job), scratch, stream);
  return dispatch_floating(job.out_dtype, [&](auto type) {
    return run(Arithmetic<typename decltype(type)::type, Op>(job), scratch, stream);
  });
}

}  // namespace untorch::kernels::cuda::scan
