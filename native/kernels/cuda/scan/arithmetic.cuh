// The policies of scan.cuh for cumsum, cumprod and logcumsumexp.
#pragma once

#include "kernels/cuda/common/integers.cuh"
#include "kernels/cuda/scan/scan.cuh"
#include "kernels/scan.h"

namespace untorch::kernels::cuda::scan {

// What additions and multiplications run in: float for the halves, 64-bit wrapping for integers (narrower results are
// its low bits), the type itself otherwise.
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

  explicit Arithmetic(const ScanParams& params)
      : lanes(params.lanes),
        out(params.out),
        input(params.input),
        out_dtype(params.out_dtype),
        in_dtype(params.in_dtype) {}
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

// The operators. `start` is the identity.
template <class State>
struct Sum {
  __device__ static State start() {
    if constexpr (IsPair<State>::value)
      return {0, 0};
    else
      return 0;
  }
  __device__ static State combine(State a, State b) {
    if constexpr (IsPair<State>::value)
      return {a.re + b.re, a.im + b.im};
    else
      return a + b;
  }
};

template <class State>
struct Product {
  __device__ static State start() {
    if constexpr (IsPair<State>::value)
      return {1, 0};
    else
      return 1;
  }
  __device__ static State combine(State a, State b) {
    if constexpr (IsPair<State>::value)
      return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
    else
      return a * b;
  }
};

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

template <template <class> class Op>
int run_floating(const ScanParams& params, void* scratch, Stream stream) {
  if (params.in_dtype != params.out_dtype) return kNoKernel;
  return dispatch_floating(params.out_dtype, [&](auto type) {
    return run(Arithmetic<typename decltype(type)::type, Op>(params), scratch, stream);
  });
}

// cumsum and cumprod: every dtype but bool and the eight-bit floats.
template <template <class> class Op>
int run_arithmetic(const ScanParams& params, void* scratch, Stream stream) {
  if (is_integer(params.out_dtype)) {
    if (!is_integer(params.in_dtype) && params.in_dtype != DType::kBool) return kNoKernel;
    return run(Arithmetic<Integers, Op>(params), scratch, stream);
  }
  if (params.in_dtype != params.out_dtype) return kNoKernel;
  if (params.out_dtype == DType::kComplex64) return run(Arithmetic<Pair<float>, Op>(params), scratch, stream);
  if (params.out_dtype == DType::kComplex128) return run(Arithmetic<Pair<double>, Op>(params), scratch, stream);
  return run_floating<Op>(params, scratch, stream);
}

}  // namespace untorch::kernels::cuda::scan
