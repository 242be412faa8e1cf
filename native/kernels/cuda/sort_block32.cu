// Sorts of short rows by keys of 32 bits.
#include "kernels/cuda/sort_block.cuh"

namespace untorch::kernels::cuda {

int sort_block32(const SortJob& job, const KeyRule& rule, std::int64_t first_row, std::int64_t rows,
                 const std::uint32_t* keys, const std::uint32_t* order, Stream stream) {
  return sort_block<std::uint32_t>(job, rule, first_row, rows, keys, order, stream);
}

}  // namespace untorch::kernels::cuda
