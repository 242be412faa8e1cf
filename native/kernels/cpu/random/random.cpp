// Distributions on mt19937, one thread: a sequence has one order. Bytes: every element written once; a draw of 32 bits
// (64 for double precision) an element.
#include "kernels/random.h"

#include <cmath>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "base/dispatch.h"
#include "kernels/cpu/common/strided_loop.h"
#include "kernels/cpu/random/mt19937.h"

namespace untorch::kernels::cpu {
namespace {

template <class T, class Draw>
void draw_each(const Strided<1>& space, T* to, Draw&& draw) {
  const StridedLoop<1> loop(space);
  const std::int64_t step = loop.inner()[0];
  loop.run_serial([&](const std::array<std::int64_t, 1>& at, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) to[at[0] + i * step] = draw();
  });
}

}  // namespace

void uniform(const Strided<1>& space, void* out, DType dtype, double from, double to, Generator& generator) {
  dispatch_floating("uniform", dtype, [&]<class T>() {
    const std::lock_guard lock(generator.mutex());
    if constexpr (std::is_same_v<T, double>) {
      draw_each(space, static_cast<T*>(out), [&] { return std::fma(generator.uniform_double(), to - from, from); });
    } else {
      const double low = static_cast<float>(from), width = static_cast<float>(to) - static_cast<float>(from);
      const T end = static_cast<T>(static_cast<float>(to)), start = static_cast<T>(static_cast<float>(from));
      draw_each(space, static_cast<T*>(out), [&] {
        const T value = static_cast<T>(static_cast<float>(generator.uniform_float() * width + low));
        // A half may round up to the open end, which PyTorch replaces by the start.
        if constexpr (!std::is_same_v<T, float>) return from < to && value >= end ? start : value;
        return value;
      });
    }
  });
}

void normal(const Strided<1>& space, void* out, DType dtype, double mean, double deviation, bool row_major,
            Generator& generator) {
  dispatch_floating("normal", dtype, [&]<class T>() {
    const std::lock_guard lock(generator.mutex());
    T* const to = static_cast<T*>(out);
    const std::int64_t n = space.numel;
    if (n < 16 || !row_major) {
      draw_each(space, to,
                [&] { return static_cast<T>(static_cast<compute_t<T>>(generator.normal() * deviation + mean)); });
      return;
    }
    using Wide = compute_t<T>;
    const auto scale = static_cast<Wide>(deviation), shift = static_cast<Wide>(mean);
    if constexpr (std::is_same_v<T, Wide>) {
      generator.normal_blocks(to, n);
      if (scale != 1 || shift != 0) {
        for (std::int64_t i = 0; i < n; ++i) to[i] = to[i] * scale + shift;
      }
    } else {
      std::vector<float> wide(static_cast<std::size_t>(n));
      generator.normal_blocks(wide.data(), n, true);
      for (std::int64_t i = 0; i < n; ++i) to[i] = static_cast<T>(wide[static_cast<std::size_t>(i)] * scale + shift);
    }
  });
}

void exponential(const Strided<1>& space, void* out, DType dtype, double rate, Generator& generator) {
  dispatch_floating("exponential", dtype, [&]<class T>() {
    const std::lock_guard lock(generator.mutex());
    draw_each(space, static_cast<T*>(out),
              [&] { return static_cast<T>(static_cast<compute_t<T>>(generator.exponential(rate))); });
  });
}

void random_integers(const Strided<1>& space, void* out, DType dtype, std::int64_t low, std::uint64_t range,
                     Generator& generator) {
  dispatch_real("randint", dtype, [&]<class T>() {
    const std::lock_guard lock(generator.mutex());
    draw_each(space, static_cast<T*>(out), [&] {
      const auto value = static_cast<std::int64_t>(generator.below(range) + static_cast<std::uint64_t>(low));
      return static_cast<T>(static_cast<compute_t<T>>(value));
    });
  });
}

std::optional<double> bernoulli(const Strided<2>& space, void* out, DType dtype, const void* probability,
                                DType probability_dtype, Generator& generator) {
  const StridedLoop<2> loop(space);
  const auto step = loop.inner();
  std::optional<double> outside;
  dispatch_floating("bernoulli_", probability_dtype, [&]<class P>() {
    const P* const p = static_cast<const P*>(probability);
    loop.run_serial([&](const std::array<std::int64_t, 2>& at, std::int64_t n) {
      for (std::int64_t i = 0; i < n; ++i) {
        const auto value = static_cast<double>(static_cast<compute_t<P>>(p[at[1] + i * step[1]]));
        if (!(value >= 0 && value <= 1) && !outside) outside = value;
      }
    });
    if (outside) return;
    const std::lock_guard lock(generator.mutex());
    dispatch_real("bernoulli_", dtype, [&]<class T>() {
      T* const to = static_cast<T*>(out);
      loop.run_serial([&](const std::array<std::int64_t, 2>& at, std::int64_t n) {
        for (std::int64_t i = 0; i < n; ++i) {
          const auto value = static_cast<compute_t<P>>(p[at[1] + i * step[1]]);
          bool hit;
          if constexpr (std::is_same_v<P, double>) {
            hit = generator.uniform_double() < value;
          } else {
            hit = generator.uniform_float() < value;
          }
          to[at[0] + i * step[0]] = static_cast<T>(static_cast<compute_t<T>>(hit ? 1 : 0));
        }
      });
    });
  });
  return outside;
}

void permutation(std::int64_t* out, std::int64_t n, Generator& generator) {
  std::iota(out, out + n, std::int64_t{0});
  const std::lock_guard lock(generator.mutex());
  for (std::int64_t i = 0; i < n - 1; ++i) {
    const auto rest = static_cast<std::uint64_t>(n - i);
    // PyTorch draws 32 bits while the modulo stays fair enough.
    const std::uint64_t draw = n < 0xffffffffLL / 20 ? generator.random() : generator.random64();
    std::swap(out[i], out[i + static_cast<std::int64_t>(draw % rest)]);
  }
}

}  // namespace untorch::kernels::cpu
