// Max unpooling (scatter by index) and fractional max pooling, parallel over planes.
#include "kernels/unpooling.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <limits>
#include <vector>

#include "base/dispatch.h"
#include "kernels/cpu/common/parallel_items.h"

namespace untorch::kernels::cpu {
namespace {

// Where the windows of one dimension start: pseudo-random steps from one sample in [0, 1). Every step of the arithmetic
// rounds to T, also for the half types: a start one off would be another window.
template <class T>
std::vector<std::int64_t> fractional_starts(T sample, std::int64_t input, std::int64_t output, std::int64_t kernel) {
  std::vector<std::int64_t> starts(static_cast<std::size_t>(output));
  if (output > 1) {
    using C = compute_t<T>;
    const auto rounded = [](C value) { return static_cast<C>(T(value)); };
    const C seed = static_cast<C>(sample);
    const C alpha = rounded(rounded(static_cast<C>(input - kernel)) / rounded(static_cast<C>(output - 1)));
    const auto origin = static_cast<std::int64_t>(rounded(seed * alpha));
    for (std::int64_t i = 0; i < output - 1; ++i) {
      const C at = rounded(rounded(rounded(static_cast<C>(i)) + seed) * alpha);
      starts[static_cast<std::size_t>(i)] = static_cast<std::int64_t>(at) - origin;
    }
  }
  if (output > 0) starts.back() = input - kernel;
  return starts;
}

template <class T>
void fractional_plane(const FractionalPool& p, std::int64_t plane, const T* input, const T* samples, T* output,
                      std::int64_t* indices) {
  using C = compute_t<T>;
  const std::int64_t n = plane / p.channels, c = plane % p.channels;
  const T* const sample = samples + n * p.sample_batch + c * p.sample_channel;
  const T* const from = input + n * p.in_batch + c * p.in_channel;
  std::array<std::vector<std::int64_t>, 3> starts;
  for (std::size_t d = 0; d < 3; ++d) {
    starts[d] = {0};
    if (p.sample_slot[d] < 0) continue;
    starts[d] = fractional_starts<T>(sample[p.sample_slot[d] * p.sample_at], p.input[d], p.output[d], p.kernel[d]);
  }
  std::int64_t to = plane * p.output[0] * p.output[1] * p.output[2];
  for (const std::int64_t d0 : starts[0]) {
    for (const std::int64_t h0 : starts[1]) {
      for (const std::int64_t w0 : starts[2]) {
        C best = -std::numeric_limits<C>::infinity();
        std::int64_t at = (d0 * p.input[1] + h0) * p.input[2] + w0;
        for (std::int64_t d = d0; d < d0 + p.kernel[0]; ++d) {
          for (std::int64_t h = h0; h < h0 + p.kernel[1]; ++h) {
            for (std::int64_t w = w0; w < w0 + p.kernel[2]; ++w) {
              const C value = static_cast<C>(from[d * p.in_at[0] + h * p.in_at[1] + w * p.in_at[2]]);
              if (value > best || value != value) {
                best = value;
                at = (d * p.input[1] + h) * p.input[2] + w;
              }
            }
          }
        }
        output[to] = T(best);
        indices[to++] = at;
      }
    }
  }
}

}  // namespace

std::optional<std::int64_t> max_unpool(const Unpool& p) {
  constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::min();
  std::atomic<std::int64_t> outside{kNone};
  const auto bytes = static_cast<std::size_t>(p.element_bytes);
  for_each_item(p.planes, static_cast<double>(p.planes * p.pixels) > kParallelWork, [&](std::int64_t plane) {
    const std::int64_t* const at = p.indices + plane * p.pixels;
    const auto* const from = static_cast<const std::byte*>(p.input) + plane * p.pixels * p.element_bytes;
    auto* const to = static_cast<std::byte*>(p.out) + plane * p.image * p.element_bytes;
    for (std::int64_t i = 0; i < p.pixels; ++i) {
      if (at[i] < 0 || at[i] >= p.image) {
        outside = at[i];
        continue;
      }
      std::memcpy(to + at[i] * p.element_bytes, from + i * p.element_bytes, bytes);
    }
  });
  return outside == kNone ? std::nullopt : std::optional(outside.load());
}

void fractional_max_pool(const FractionalPool& pool, DType dtype, const void* input, const void* samples, void* output,
                         std::int64_t* indices) {
  const double work = static_cast<double>(pool.batch * pool.channels) *
                      static_cast<double>(pool.input[0] * pool.input[1] * pool.input[2]);
  dispatch_floating("fractional_max_pool", dtype, [&]<class T>() {
    for_each_item(pool.batch * pool.channels, work > kParallelWork, [&](std::int64_t plane) {
      fractional_plane(pool, plane, static_cast<const T*>(input), static_cast<const T*>(samples),
                       static_cast<T*>(output), indices);
    });
  });
}

}  // namespace untorch::kernels::cpu
