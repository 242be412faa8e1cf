// Random tensors by Philox4x32-10, one subsequence a thread, in PyTorch's order of draws. With G threads in the grid:
//
//   draw k of thread t   four words   w0         w1             w2             w3
//   element              t + 4kG   t + (4k+1)G   t + (4k+2)G   t + (4k+3)G        a warp writes 32 neighbours a word
//
// (values of 64 bits: two words each, two elements a draw). Roofline: ten rounds a draw, about 20 integer
// multiplications a value, so that float32 is bound by memory and the half types by arithmetic. Bytes: every element
// written once (dropout: read once, written with its mask).
#include <cfloat>

#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/random/philox.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// body(draw, i, position): for each element of this thread, in the order in which PyTorch draws; `draw` is what
// make(words) gave, i its value for this element.
template <int kPerDraw, class Make, class Body>
__device__ __forceinline__ void for_each_draw(std::int64_t numel, const PhiloxState& state, Make&& make, Body&& body) {
  const std::int64_t thread = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t grid = std::int64_t{gridDim.x} * kThreads;
  Philox philox(state, static_cast<std::uint64_t>(thread));
  for (std::int64_t base = thread; base < numel; base += grid * kPerDraw) {
    const auto draw = make(philox.next());
#pragma unroll
    for (int i = 0; i < kPerDraw; ++i) {
      const std::int64_t at = base + grid * i;
      if (at < numel) body(draw, i, at);
    }
  }
}

// Uniform numbers put through a distribution.
template <class T, class Distribution>
__global__ void __launch_bounds__(kThreads)
    fill_uniform(Strided<1> space, T* out, Distribution distribution, PhiloxState state) {
  using C = Compute<T>;
  for_each_draw<Draw<C>::kCount>(
      space.numel, state, [](const Words& words) { return uniform_draw<C>(words); },
      [&](const Draw<C>& draw, int i, std::int64_t linear) {
        std::int64_t at[1];
        offsets(space, linear, at);
        out[at[0]] = distribution(draw.value[i]);
      });
}

template <class T>
struct Interval {
  T from, to;
  Compute<T> low, width;
  __device__ __forceinline__ T operator()(Compute<T> u) const {
    const T value = narrow<T>(u * width + low);
    // The draw excludes 0 and includes 1, the result the other way round; halves may round up to the end as well.
    return widen(value) == widen(to) ? from : value;
  }
};

template <class T>
struct Exponential {
  Compute<T> rate;
  __device__ __forceinline__ T operator()(Compute<T> u) const {
    constexpr Compute<T> kHalfStep =
        sizeof(Compute<T>) == 8 ? Compute<T>(DBL_EPSILON / 2) : Compute<T>(FLT_EPSILON / 2);
    // log(1) would be 0, which is no value of the distribution.
    const Compute<T> logarithm = u >= Compute<T>(1) - kHalfStep ? -kHalfStep : log(u);
    return narrow<T>(Compute<T>(-1) / rate * logarithm);
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    fill_normal(Strided<1> space, T* out, Compute<T> mean, Compute<T> deviation, PhiloxState state) {
  using C = Compute<T>;
  for_each_draw<Draw<C>::kCount>(
      space.numel, state, [](const Words& words) { return normal_draw<C>(words); },
      [&](const Draw<C>& draw, int i, std::int64_t linear) {
        std::int64_t at[1];
        offsets(space, linear, at);
        out[at[0]] = narrow<T>(draw.value[i] * deviation + mean);
      });
}

template <class T>
__device__ __forceinline__ T from_integer(std::int64_t value) {
  if constexpr (is_half_type<T>)
    return narrow<T>(static_cast<float>(value));
  else
    return static_cast<T>(value);
}

template <class T, int kPerDraw>
__global__ void __launch_bounds__(kThreads)
    fill_integers(Strided<1> space, T* out, std::int64_t low, std::uint64_t range, PhiloxState state) {
  for_each_draw<kPerDraw>(
      space.numel, state, [](const Words& words) { return words; },
      [&](const Words& words, int i, std::int64_t linear) {
        std::uint64_t value;
        if constexpr (kPerDraw == 2) {
          value = std::uint64_t{words.w[2 * i]} << 32 | words.w[2 * i + 1];
          if (range != 0) value %= range;
        } else {
          value = words.w[i] % static_cast<std::uint32_t>(range);
        }
        std::int64_t at[1];
        offsets(space, linear, at);
        out[at[0]] = from_integer<T>(static_cast<std::int64_t>(value + static_cast<std::uint64_t>(low)));
      });
}

// P: float or double, the precision of the draw. The probability is a scalar, or operand 1.
template <class T, class P, int N>
__global__ void __launch_bounds__(kThreads) fill_bernoulli(Strided<N> space, T* out, T one, P scalar,
                                                           const P* probability, PhiloxState state, FaultWord* fault) {
  for_each_draw<Draw<P>::kCount>(
      space.numel, state, [](const Words& words) { return uniform_draw<P>(words); },
      [&](const Draw<P>& draw, int i, std::int64_t linear) {
        std::int64_t at[N];
        offsets(space, linear, at);
        P p = scalar;
        if constexpr (N == 2) {
          p = probability[at[1]];
          if (!(p >= P(0) && p <= P(1))) report(fault, DeviceFault::kBernoulli, 0);
          // The draw may be 1 and is never 0: what is certain stays certain.
          out[at[0]] = draw.value[i] <= p ? one : T{};
        } else {
          out[at[0]] = draw.value[i] < p || p == P(1) ? one : T{};
        }
      });
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    drop(Strided<3> space, T* out, bool* mask, const T* input, float keep, Compute<T> scale, PhiloxState state) {
  for_each_draw<4>(
      space.numel, state, [](const Words& words) { return uniform_draw<float>(words); },
      [&](const Draw<float>& draw, int i, std::int64_t linear) {
        std::int64_t at[3];
        offsets(space, linear, at);
        const bool kept = draw.value[i] <= keep;
        mask[at[1]] = kept;
        // A product, so that NaN and infinity are dropped as PyTorch's multiplication by the mask does it: to NaN.
        out[at[0]] = narrow<T>(widen(input[at[2]]) * (kept ? Compute<T>(1) : Compute<T>(0)) * scale);
      });
}

__global__ void __launch_bounds__(kThreads)
    fill_keys(std::uint64_t* keys, std::uint32_t* values, std::int64_t n, PhiloxState state) {
  for_each_draw<2>(
      n, state, [](const Words& words) { return words; },
      [&](const Words& words, int i, std::int64_t linear) {
        keys[linear] = std::uint64_t{words.w[2 * i]} << 32 | words.w[2 * i + 1];
        values[linear] = static_cast<std::uint32_t>(linear);
      });
}

// By size of the element, with the value that stands for 1.
template <class Body>
int dispatch_one(int element_bytes, const void* one, Body&& body) {
  switch (element_bytes) {
    case 1:
      return body(*static_cast<const std::uint8_t*>(one));
    case 2:
      return body(*static_cast<const std::uint16_t*>(one));
    case 4:
      return body(*static_cast<const std::uint32_t*>(one));
    case 8:
      return body(*static_cast<const std::uint64_t*>(one));
    default:
      return kNoKernel;
  }
}

}  // namespace

RandomGrid random_grid(std::int64_t numel, int per_draw, int num_sms, int threads_per_sm) {
  if (numel == 0) return {};
  const std::int64_t most = std::int64_t{num_sms} * (threads_per_sm / kThreads);
  const std::int64_t wanted = (numel + kThreads - 1) / kThreads;
  const std::int64_t ctas = wanted < most ? wanted : most;
  const std::int64_t round = ctas * kThreads * per_draw;
  return {static_cast<unsigned>(ctas), static_cast<std::uint64_t>((numel - 1) / round + 1) * 4};
}

int uniform(const Strided<1>& space, void* out, DType dtype, double from, double to, PhiloxState state, unsigned ctas,
            Stream stream) {
  if (space.numel == 0) return 0;
  return dispatch_floating(dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    const T start = narrow<T>(static_cast<C>(from)), end = narrow<T>(static_cast<C>(to));
    const Interval<T> interval{start, end, widen(start), widen(end) - widen(start)};
    fill_uniform<T><<<ctas, kThreads, 0, stream>>>(space, static_cast<T*>(out), interval, state);
    return cudaGetLastError();
  });
}

int normal(const Strided<1>& space, void* out, DType dtype, double mean, double deviation, PhiloxState state,
           unsigned ctas, Stream stream) {
  if (space.numel == 0) return 0;
  return dispatch_floating(dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    fill_normal<T><<<ctas, kThreads, 0, stream>>>(space, static_cast<T*>(out), static_cast<C>(mean),
                                                  static_cast<C>(deviation), state);
    return cudaGetLastError();
  });
}

int exponential(const Strided<1>& space, void* out, DType dtype, double rate, PhiloxState state, unsigned ctas,
                Stream stream) {
  if (space.numel == 0) return 0;
  return dispatch_floating(dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    const Exponential<T> distribution{static_cast<Compute<T>>(rate)};
    fill_uniform<T><<<ctas, kThreads, 0, stream>>>(space, static_cast<T*>(out), distribution, state);
    return cudaGetLastError();
  });
}

int random_integers(const Strided<1>& space, void* out, DType dtype, std::int64_t low, std::uint64_t range,
                    PhiloxState state, unsigned ctas, Stream stream) {
  if (space.numel == 0) return 0;
  const bool wide = range == 0 || integer_draws(range) == 2;
  return dispatch_real(dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if (wide) {
      fill_integers<T, 2><<<ctas, kThreads, 0, stream>>>(space, static_cast<T*>(out), low, range, state);
    } else {
      fill_integers<T, 4><<<ctas, kThreads, 0, stream>>>(space, static_cast<T*>(out), low, range, state);
    }
    return cudaGetLastError();
  });
}

int bernoulli(const Strided<1>& space, void* out, int element_bytes, const void* one, bool wide, double probability,
              PhiloxState state, unsigned ctas, Stream stream) {
  if (space.numel == 0) return 0;
  return dispatch_one(element_bytes, one, [&](auto value) -> int {
    using T = decltype(value);
    if (wide) {
      fill_bernoulli<T, double, 1>
          <<<ctas, kThreads, 0, stream>>>(space, static_cast<T*>(out), value, probability, nullptr, state, nullptr);
    } else {
      fill_bernoulli<T, float, 1><<<ctas, kThreads, 0, stream>>>(
          space, static_cast<T*>(out), value, static_cast<float>(probability), nullptr, state, nullptr);
    }
    return cudaGetLastError();
  });
}

int bernoulli(const Strided<2>& space, void* out, int element_bytes, const void* one, const void* probability,
              DType probability_dtype, PhiloxState state, unsigned ctas, FaultWord* fault, Stream stream) {
  if (space.numel == 0) return 0;
  return dispatch_one(element_bytes, one, [&](auto value) -> int {
    using T = decltype(value);
    if (probability_dtype == DType::kFloat64) {
      fill_bernoulli<T, double, 2><<<ctas, kThreads, 0, stream>>>(
          space, static_cast<T*>(out), value, 0.0, static_cast<const double*>(probability), state, fault);
    } else if (probability_dtype == DType::kFloat32) {
      fill_bernoulli<T, float, 2><<<ctas, kThreads, 0, stream>>>(space, static_cast<T*>(out), value, 0.0f,
                                                                 static_cast<const float*>(probability), state, fault);
    } else {
      return kNoKernel;
    }
    return cudaGetLastError();
  });
}

int dropout(const Strided<3>& space, void* out, bool* mask, const void* input, DType dtype, double p, PhiloxState state,
            unsigned ctas, Stream stream) {
  if (space.numel == 0) return 0;
  const double keep = 1.0 - p, scale = keep == 0.0 ? 0.0 : 1.0 / keep;
  return dispatch_floating(dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    drop<T><<<ctas, kThreads, 0, stream>>>(space, static_cast<T*>(out), mask, static_cast<const T*>(input),
                                           static_cast<float>(keep), static_cast<Compute<T>>(scale), state);
    return cudaGetLastError();
  });
}

int random_keys(std::uint64_t* keys, std::uint32_t* values, std::int64_t n, PhiloxState state, unsigned ctas,
                Stream stream) {
  if (n == 0) return 0;
  fill_keys<<<ctas, kThreads, 0, stream>>>(keys, values, n, state);
  return cudaGetLastError();
}

}  // namespace untorch::kernels::cuda
