// Antialiased resize of one axis: one thread an output element, a grid-stride loop over the filter's support. Two
// passes resize an image; the first leaves its result in the accumulator's type.
//
// Layout: [outer, size, inner] to [outer, target, inner], row-major; neighbouring threads are neighbours of the inner
// dimension, or overlap in what they read.
//
// Roofline: support · scale loads an output element, mostly from L1; bytes: the input and the intermediate image read,
// both images written. Bound by memory for small scales. Its share has not been measured.
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/resize.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <ResizeFilter kFilter, class C>
__device__ __forceinline__ C filter(C x) {
  x = fabs(x);
  if constexpr (kFilter == ResizeFilter::kLinear) {
    return x < C(1) ? C(1) - x : C(0);
  } else {
    constexpr C a = C(-0.5);
    if (x < C(1)) return ((a + C(2)) * x - (a + C(3))) * x * x + C(1);
    if (x < C(2)) return (((x - C(5)) * x + C(8)) * x - C(4)) * a;
    return C(0);
  }
}

template <ResizeFilter kFilter, class In, class Out>
__global__ void __launch_bounds__(kThreads) resize(const __grid_constant__ ResizeAxis p, std::int64_t numel,
                                                   const In* __restrict__ input, Out* __restrict__ out) {
  using C = std::conditional_t<std::is_same_v<In, double> || std::is_same_v<Out, double>, double, float>;
  const C scale = static_cast<C>(p.scale), width = kFilter == ResizeFilter::kLinear ? C(1) : C(2);
  const C support = scale >= C(1) ? width * scale : width, inverse = scale >= C(1) ? C(1) / scale : C(1);
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < numel; i += step) {
    const std::int64_t within = i % p.inner, rest = i / p.inner, at = rest % p.target, image = rest / p.target;
    const C centre = scale * (static_cast<C>(at) + C(0.5));
    auto first = static_cast<std::int64_t>(centre - support + C(0.5)),
         last = static_cast<std::int64_t>(centre + support + C(0.5));
    first = first > 0 ? first : 0;
    last = last < p.size ? last : p.size;
    const In* const from = input + image * p.size * p.inner + within;
    C total = 0, sum = 0;
    for (std::int64_t j = first; j < last; ++j) {
      const C weight = filter<kFilter>((static_cast<C>(j) - centre + C(0.5)) * inverse);
      total += weight;
      sum += weight * static_cast<C>(widen(from[j * p.inner]));
    }
    const C value = total != C(0) ? sum / total : sum;
    if constexpr (is_half_type<Out>)
      out[i] = narrow<Out>(static_cast<float>(value));
    else
      out[i] = static_cast<Out>(value);
  }
}

template <class In, class Out>
int launch(const ResizeAxis& p, std::int64_t numel, Stream stream) {
  const auto* const input = static_cast<const In*>(p.input);
  auto* const out = static_cast<Out*>(p.out);
  const unsigned grid = blocks_for(numel, kThreads);
  if (p.filter == ResizeFilter::kLinear) {
    resize<ResizeFilter::kLinear><<<grid, kThreads, 0, stream>>>(p, numel, input, out);
  } else {
    resize<ResizeFilter::kCubic><<<grid, kThreads, 0, stream>>>(p, numel, input, out);
  }
  return cudaGetLastError();
}

}  // namespace

int resize_axis(const ResizeAxis& p, Stream stream) {
  const std::int64_t numel = p.outer * p.target * p.inner;
  if (numel == 0) return 0;
  return dispatch_floating(p.in_dtype, [&](auto in) -> int {
    using In = typename decltype(in)::type;
    using C = Compute<In>;
    if (p.out_dtype == p.in_dtype) return launch<In, In>(p, numel, stream);
    if constexpr (std::is_same_v<In, float>) {
      if (p.out_dtype == DType::kFloat16) return launch<float, __half>(p, numel, stream);
      if (p.out_dtype == DType::kBFloat16) return launch<float, __nv_bfloat16>(p, numel, stream);
    }
    if constexpr (is_half_type<In>) {
      if (p.out_dtype == DType::kFloat32) return launch<In, C>(p, numel, stream);
    }
    return kNoKernel;
  });
}

}  // namespace untorch::kernels::cuda
