// Depthwise convolution's inner loops, vectorised by the compiler over a row (channels first) or the channels (last).
//
// Layout: a block of kBlock outputs stays in registers while all taps are added to it; per output one load and one
// multiply-add a tap, so the loops are bound by load bandwidth of the L1.
#include "kernels/cpu/convolution/depthwise.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

constexpr std::int64_t kBlock = 32;

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

// A register of T; arithmetic is the compiler's vector extension.
template <class T>
struct Register {
  typedef T type __attribute__((vector_size(kVectorBytes)));
  static constexpr std::int64_t kLanes = kVectorBytes / sizeof(T);
};

template <class T>
typename Register<T>::type load(const T* from) {
  typename Register<T>::type v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}
template <class T>
void store(T* to, typename Register<T>::type v) {
  __builtin_memcpy(to, &v, sizeof v);
}

// kCount registers of channels, all taps added before they are written.
template <class T, int kCount>
void pixel_block(std::int64_t c, std::int64_t taps, const T* const* pixels, const T* const* weights, const T* bias,
                 T* out) {
  constexpr std::int64_t lanes = Register<T>::kLanes;
  typename Register<T>::type sum[kCount];
  for (int i = 0; i < kCount; ++i) {
    sum[i] = bias != nullptr ? load(bias + c + i * lanes) : typename Register<T>::type{};
  }
  for (std::int64_t tap = 0; tap < taps; ++tap) {
    const T* pixel = pixels[tap] + c;
    const T* weight = weights[tap] + c;
    for (int i = 0; i < kCount; ++i) sum[i] += load(weight + i * lanes) * load(pixel + i * lanes);
  }
  for (int i = 0; i < kCount; ++i) store(out + c + i * lanes, sum[i]);
}

// kCount registers of a row with stride 1.
template <class T, int kCount>
void row_block(const DepthwiseRow& row, const T* const* rows, const T* const* weights, T bias, T* out, std::int64_t x) {
  constexpr std::int64_t lanes = Register<T>::kLanes;
  typename Register<T>::type sum[kCount];
  for (int i = 0; i < kCount; ++i) sum[i] = typename Register<T>::type{} + bias;
  for (std::int64_t tap = 0; tap < row.taps; ++tap) {
    const T* from = rows[tap] + (x - row.padding);
    for (std::int64_t kx = 0; kx < row.kernel_width; ++kx, from += row.dilation) {
      const T w = weights[tap][kx];
      for (int i = 0; i < kCount; ++i) sum[i] += load(from + i * lanes) * w;
    }
  }
  for (int i = 0; i < kCount; ++i) store(out + x + i * lanes, sum[i]);
}

template <class T>
T one_output(const DepthwiseRow& row, const T* const* rows, const T* const* weights, T bias, std::int64_t x) {
  T sum = bias;
  for (std::int64_t tap = 0; tap < row.taps; ++tap) {
    for (std::int64_t kx = 0; kx < row.kernel_width; ++kx) {
      const std::int64_t at = x * row.stride - row.padding + kx * row.dilation;
      if (at >= 0 && at < row.input_width) sum += weights[tap][kx] * rows[tap][at];
    }
  }
  return sum;
}

template <class T, std::int64_t kStride>
void interior(const DepthwiseRow& row, const T* const* rows, const T* const* weights, T bias, T* out,
              std::int64_t first, std::int64_t last) {
  const std::int64_t stride = kStride == 0 ? row.stride : kStride;
  std::int64_t x = first;
  if constexpr (kStride == 1) {
    constexpr std::int64_t lanes = Register<T>::kLanes;
    for (; x + 4 * lanes <= last; x += 4 * lanes) row_block<T, 4>(row, rows, weights, bias, out, x);
    for (; x + lanes <= last; x += lanes) row_block<T, 1>(row, rows, weights, bias, out, x);
  }
  for (; x + kBlock <= last; x += kBlock) {
    T sum[kBlock];
    for (std::int64_t i = 0; i < kBlock; ++i) sum[i] = bias;
    for (std::int64_t tap = 0; tap < row.taps; ++tap) {
      const T* base = rows[tap] + (x * stride - row.padding);
      for (std::int64_t kx = 0; kx < row.kernel_width; ++kx) {
        const T w = weights[tap][kx];
        const T* from = base + kx * row.dilation;
#pragma omp simd
        for (std::int64_t i = 0; i < kBlock; ++i) sum[i] += w * from[i * stride];
      }
    }
    for (std::int64_t i = 0; i < kBlock; ++i) out[x + i] = sum[i];
  }
  const std::int64_t rest = last - x;
  if (rest <= 0) return;
  T sum[kBlock];
  for (std::int64_t i = 0; i < rest; ++i) sum[i] = bias;
  for (std::int64_t tap = 0; tap < row.taps; ++tap) {
    const T* base = rows[tap] + (x * stride - row.padding);
    for (std::int64_t kx = 0; kx < row.kernel_width; ++kx) {
      const T w = weights[tap][kx];
      const T* from = base + kx * row.dilation;
      for (std::int64_t i = 0; i < rest; ++i) sum[i] += w * from[i * stride];
    }
  }
  for (std::int64_t i = 0; i < rest; ++i) out[x + i] = sum[i];
}

template <class T>
void row_impl(const DepthwiseRow& row, const T* const* rows, const T* const* weights, T bias, T* out) {
  // Outputs [first, last) see no padding.
  const std::int64_t reach = (row.kernel_width - 1) * row.dilation;
  std::int64_t first = (row.padding + row.stride - 1) / row.stride;
  if (first > row.output_width) first = row.output_width;
  const std::int64_t room = row.input_width - 1 - reach + row.padding;
  std::int64_t last = room < 0 ? 0 : room / row.stride + 1;
  if (last > row.output_width) last = row.output_width;
  if (last < first) last = first;
  for (std::int64_t x = 0; x < first; ++x) out[x] = one_output(row, rows, weights, bias, x);
  if (row.stride == 1) {
    interior<T, 1>(row, rows, weights, bias, out, first, last);
  } else if (row.stride == 2) {
    interior<T, 2>(row, rows, weights, bias, out, first, last);
  } else {
    interior<T, 0>(row, rows, weights, bias, out, first, last);
  }
  for (std::int64_t x = last; x < row.output_width; ++x) out[x] = one_output(row, rows, weights, bias, x);
}

template <class T>
void pixel_impl(std::int64_t channels, std::int64_t taps, const T* const* pixels, const T* const* weights,
                const T* bias, T* out) {
  constexpr std::int64_t lanes = Register<T>::kLanes;
  std::int64_t c = 0;
  for (; c + 4 * lanes <= channels; c += 4 * lanes) pixel_block<T, 4>(c, taps, pixels, weights, bias, out);
  for (; c + 2 * lanes <= channels; c += 2 * lanes) pixel_block<T, 2>(c, taps, pixels, weights, bias, out);
  for (; c + lanes <= channels; c += lanes) pixel_block<T, 1>(c, taps, pixels, weights, bias, out);
  const std::int64_t rest = channels - c;
  if (rest <= 0) return;
  T sum[kBlock];
  for (std::int64_t i = 0; i < rest; ++i) sum[i] = bias != nullptr ? bias[c + i] : T(0);
  for (std::int64_t tap = 0; tap < taps; ++tap) {
    const T* pixel = pixels[tap] + c;
    const T* weight = weights[tap] + c;
    for (std::int64_t i = 0; i < rest; ++i) sum[i] += weight[i] * pixel[i];
  }
  for (std::int64_t i = 0; i < rest; ++i) out[c + i] = sum[i];
}

}  // namespace

template <class T>
void depthwise_row(const DepthwiseRow& row, const T* const* rows, const T* const* weights, T bias, T* out) {
  row_impl(row, rows, weights, bias, out);
}
template <class T>
void depthwise_pixel(std::int64_t channels, std::int64_t taps, const T* const* pixels, const T* const* weights,
                     const T* bias, T* out) {
  pixel_impl(channels, taps, pixels, weights, bias, out);
}

template void depthwise_row(const DepthwiseRow&, const float* const*, const float* const*, float, float*);
template void depthwise_row(const DepthwiseRow&, const double* const*, const double* const*, double, double*);
template void depthwise_pixel(std::int64_t, std::int64_t, const float* const*, const float* const*, const float*,
                              float*);
template void depthwise_pixel(std::int64_t, std::int64_t, const double* const*, const double* const*, const double*,
                              double*);

}  // namespace untorch::kernels::UNTORCH_ISA
