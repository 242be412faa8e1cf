// embedding_bag: rows of a table summed, averaged or maximised over bags of indices.
#pragma once

#include "kernels/cuda/common/device_fault.h"
#include "kernels/launcher.h"

namespace untorch::kernels {

enum class BagMode : int { kSum = 0, kMean = 1, kMax = 2 };

struct EmbeddingBag {
  const void* table = nullptr;  // floating
  std::int64_t rows = 0, width = 0, row_stride = 0, column_stride = 0;
  const void *indices = nullptr, *offsets = nullptr;  // row-major, both int64 or both int32 (CUDA)
  bool wide = true;
  std::int64_t index_count = 0, bags = 0;
  const void* scales = nullptr;  // of the table's dtype, may be null
  std::int64_t scale_stride = 0;
  std::int64_t padding = -1;                                          // this row does not count
  void *out = nullptr, *bag_of_index = nullptr, *bag_size = nullptr;  // the last two of the indices' dtype
  void* winners = nullptr;                                            // for kMax: the row that each element is from
};

// The last bag ends with the indices.
namespace cpu {
// `last_offset`: the offsets have one entry after the bags. Throws when offsets or indices leave their ranges.
// bag_of_index may be null; winners come zeroed.
void embedding_bag(const EmbeddingBag& params, BagMode mode, DType dtype, bool last_offset);
}  // namespace cpu
namespace cuda {
// Rows and offsets that do not exist are reported and left out.
int embedding_bag(const EmbeddingBag& params, BagMode mode, DType dtype, FaultWord* word, Stream stream);
}  // namespace cuda

}  // namespace untorch::kernels
