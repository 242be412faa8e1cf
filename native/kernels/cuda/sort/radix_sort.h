// CUB's device-wide radix sort of pairs, as indexing, scattering and permutations use it.
#pragma once

#include <cstddef>

#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

// Stable, ascending by the lowest `bits` bits of the keys. The results are in sorted_keys and sorted_values. With a
// null `scratch` nothing is launched and `scratch_bytes` becomes what is needed.
int radix_sort_pairs(void* scratch, std::size_t& scratch_bytes, const std::uint64_t* keys, std::uint64_t* sorted_keys,
                     const std::uint32_t* values, std::uint32_t* sorted_values, std::int64_t n, int bits,
                     Stream stream);

}  // namespace untorch::kernels::cuda
