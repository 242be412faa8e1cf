// mt19937 (Matsumoto and Nishimura, 1998) and the distributions on it.
#include "kernels/cpu/random/mt19937.h"

#include <cmath>
#include <limits>
#include <numbers>
#include <random>

namespace untorch::kernels {
namespace {

constexpr std::size_t kSize = 624, kShift = 397;

std::uint64_t seed_from_system() {
  std::random_device device;
  const std::uint64_t high = device();
  return high << 32 | device();
}

template <class T>
void box_muller_16(T* block) noexcept {
  for (int i = 0; i < 8; ++i) {
    const T radius = std::sqrt(T(-2) * std::log(T(1) - block[i]));
    const T angle = T(2) * std::numbers::pi_v<T> * block[i + 8];
    block[i] = radius * std::cos(angle);
    block[i + 8] = radius * std::sin(angle);
  }
}

template <class T, class Draw>
void fill_blocks(T* out, std::int64_t n, bool whole_blocks, Draw&& draw) noexcept {
  const std::int64_t first = whole_blocks ? n / 16 * 16 : n;
  for (std::int64_t i = 0; i < first; ++i) out[i] = draw();
  for (std::int64_t i = 0; i + 16 <= n; i += 16) box_muller_16(out + i);
  if (n % 16 != 0) {
    T* last = out + n - 16;
    for (int i = 0; i < 16; ++i) last[i] = draw();
    box_muller_16(last);
  }
}

}  // namespace

void Generator::manual_seed(std::uint64_t seed) noexcept {
  seed_ = seed;
  cached_normal_.reset();
  philox_.clear();
  state_[0] = static_cast<std::uint32_t>(seed);
  for (std::size_t i = 1; i < kSize; ++i) {
    state_[i] = 1812433253u * (state_[i - 1] ^ (state_[i - 1] >> 30)) + static_cast<std::uint32_t>(i);
  }
  next_ = kSize;
}

std::uint64_t Generator::reserve_philox(std::size_t device, std::uint64_t count) {
  if (philox_.size() <= device) philox_.resize(device + 1, 0);
  const std::uint64_t first = philox_[device];
  philox_[device] += count;
  return first;
}

void Generator::refill() noexcept {
  for (std::size_t i = 0; i < kSize; ++i) {
    const std::uint32_t mixed = (state_[i] & 0x80000000u) | (state_[(i + 1) % kSize] & 0x7fffffffu);
    state_[i] = state_[(i + kShift) % kSize] ^ (mixed >> 1) ^ ((mixed & 1u) != 0 ? 0x9908b0dfu : 0u);
  }
  next_ = 0;
}

std::uint32_t Generator::random() noexcept {
  if (next_ == kSize) refill();
  std::uint32_t y = state_[next_++];
  y ^= y >> 11;
  y ^= (y << 7) & 0x9d2c5680u;
  y ^= (y << 15) & 0xefc60000u;
  return y ^ (y >> 18);
}

double Generator::normal() noexcept {
  if (cached_normal_) {
    const double value = *cached_normal_;
    cached_normal_.reset();
    return value;
  }
  const double u1 = uniform_double(), u2 = uniform_double();
  const double radius = std::sqrt(-2.0 * std::log1p(-u2)), angle = 2.0 * std::numbers::pi * u1;
  cached_normal_ = radius * std::sin(angle);
  return radius * std::cos(angle);
}

double Generator::exponential(double rate) noexcept { return -1.0 / rate * std::log1p(-uniform_double()); }

void Generator::normal_blocks(float* out, std::int64_t n, bool whole_blocks) noexcept {
  fill_blocks(out, n, whole_blocks, [this] { return uniform_float(); });
}

void Generator::normal_blocks(double* out, std::int64_t n) noexcept {
  fill_blocks(out, n, false, [this] { return uniform_double(); });
}

Generator& default_generator() {
  static Generator generator(seed_from_system());
  return generator;
}

}  // namespace untorch::kernels
