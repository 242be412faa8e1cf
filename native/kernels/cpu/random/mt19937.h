// The random numbers of PyTorch's CPU generator: mt19937 and the ways that PyTorch turns its bits into values, so that
// the same seed gives the same numbers. A Generator is not thread-safe by itself: hold its mutex during a call.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/fork.h"

namespace untorch::kernels {

class Generator {
 public:
  explicit Generator(std::uint64_t seed) { manual_seed(seed); }

  // Starts over. Only the low 32 bits reach the engine, as in PyTorch; the seed is reported in full.
  void manual_seed(std::uint64_t seed) noexcept;
  std::uint64_t initial_seed() const noexcept { return seed_; }
  fork::Mutex& mutex() noexcept { return mutex_; }
  // `count` positions of GPU `device`'s sequence under this seed; the first of them. They start over with the seed.
  std::uint64_t reserve_philox(std::size_t device, std::uint64_t count);

  std::uint32_t random() noexcept;
  std::uint64_t random64() noexcept {  // the first draw is the high half
    const std::uint64_t high = random();
    return high << 32 | random();
  }

  // [0, 1) with 24 or 53 random bits.
  float uniform_float() noexcept { return static_cast<float>(random() & 0xffffffu) * 0x1p-24f; }
  double uniform_double() noexcept {
    return static_cast<double>(random64() & ((std::uint64_t{1} << 53) - 1)) * 0x1p-53;
  }
  // One of `range` integers from 0; range 0 means all 2^64. Slightly biased by the modulo, as in PyTorch.
  std::uint64_t below(std::uint64_t range) noexcept {
    if (range == 0) return random64();
    return range >= (std::uint64_t{1} << 28) ? random64() % range : random() % range;
  }
  // Standard normal by Box–Muller; the second of each pair is kept for the next call.
  double normal() noexcept;
  // Exponential with this rate.
  double exponential(double rate) noexcept;

  // Fills n ≥ 16 standard normals in blocks of 16: eight radii, then eight angles. A rest is covered by a last block
  // that overlaps the one before. With `whole_blocks` (the half types) the numbers of the rest are not drawn twice.
  void normal_blocks(float* out, std::int64_t n, bool whole_blocks = false) noexcept;
  void normal_blocks(double* out, std::int64_t n) noexcept;

 private:
  void refill() noexcept;

  fork::Mutex mutex_;
  std::uint64_t seed_ = 0;
  std::array<std::uint32_t, 624> state_{};
  std::size_t next_ = 0;
  std::optional<double> cached_normal_;
  std::vector<std::uint64_t> philox_;  // positions used, by GPU
};

// The process's generator; its first seed comes from the operating system.
Generator& default_generator();

}  // namespace untorch::kernels
