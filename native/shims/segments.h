// What deterministic accumulation on the GPU is made of: entries sorted by where they go.
#pragma once

#include <bit>

#include "cuda/on_device.h"
#include "kernels/cuda/sort/radix_sort.h"
#include "kernels/scatter.h"

namespace untorch::shims {

// Sorts n pairs of (key, id). Keys are at most `largest`, or all ones, which come last. Stable.
struct SortedSegments {
  StorageRef keys, ids;
  kernels::cuda::Segments segments;
};
inline SortedSegments sort_segments(const OnDevice& on, const StorageRef& keys, const StorageRef& ids, std::int64_t n,
                                    std::int64_t largest) {
  const auto count = static_cast<std::size_t>(n);
  SortedSegments out{on.scratch(count * sizeof(std::uint64_t)), on.scratch(count * sizeof(std::uint32_t)), {}};
  // As many bits as make all ones larger than every key.
  const int bits = std::bit_width(static_cast<std::uint64_t>(largest) + 1);
  const auto sort = [&](void* scratch, std::size_t& bytes) {
    on.launched(kernels::cuda::radix_sort_pairs(scratch, bytes, static_cast<const std::uint64_t*>(keys->data()),
                                                static_cast<std::uint64_t*>(out.keys->data()),
                                                static_cast<const std::uint32_t*>(ids->data()),
                                                static_cast<std::uint32_t*>(out.ids->data()), n, bits, on.stream()));
  };
  std::size_t bytes = 0;
  sort(nullptr, bytes);
  const StorageRef scratch = on.scratch(bytes);
  sort(scratch->data(), bytes);
  out.segments = {static_cast<const std::uint64_t*>(out.keys->data()),
                  static_cast<const std::uint32_t*>(out.ids->data()), n};
  return out;
}

// Entries are numbered with 32 bits.
inline void check_entries(std::int64_t n, const char* op) {
  if (n > 0xffffffffLL) {
    throw_error(ErrorKind::kUnsupported, op, ": ", n, " indices are more than the 4294967295 that can be accumulated");
  }
}

}  // namespace untorch::shims
