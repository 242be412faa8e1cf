// What sort.cu is made of; each part compiles in a file of its own.
#pragma once

#include "kernels/cuda/sort/sort_key.cuh"
#include "kernels/sort.h"

namespace untorch::kernels::cuda {

// A CTA a row, `rows` of them from first_row on. `keys` (may be null) and `order`: those rows' n keys, made already,
// with the positions in the input that belong to them, dense; else the keys are made from the input.
int sort_cta32(const SortParams& params, const KeyRule& rule, std::int64_t first_row, std::int64_t rows,
               const std::uint32_t* keys, const std::uint32_t* order, Stream stream);
int sort_cta64(const SortParams& params, const KeyRule& rule, std::int64_t first_row, std::int64_t rows,
               const std::uint64_t* keys, const std::uint32_t* order, Stream stream);

// Stable ascending sort of n ≤ 2^31 - 1 pairs by the low end_bit bits of the key: from buffer 0 of each pair of buffers
// into buffer `current`. With temp null it only says how many bytes of it are needed.
int radix_sort32(void* temp, std::size_t& bytes, std::uint32_t* const (&keys)[2], std::uint32_t* const (&order)[2],
                 int& current, int n, int end_bit, Stream stream);
int radix_sort64(void* temp, std::size_t& bytes, std::uint64_t* const (&keys)[2], std::uint32_t* const (&order)[2],
                 int& current, int n, int end_bit, Stream stream);

}  // namespace untorch::kernels::cuda
