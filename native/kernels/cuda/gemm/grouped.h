// Matrix products over groups whose sizes only the device knows (mixture of experts).
#pragma once

#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

// float16 or bfloat16, summed in float32. Group g reaches from ends[g - 1] (0 for the first) to ends[g] along the rows
// of a and out, or along k. Ends that decrease or pass the whole size are cut to it. Strides are elements.
struct GroupedGemm {
  DType dtype = DType::kBFloat16;
  bool along_k = false;
  std::int64_t groups = 0;
  const void* ends = nullptr;  // int32
  std::int64_t ends_stride = 1;
  std::int64_t m = 0, n = 0, k = 0;  // of all groups together where they divide
  const void* a = nullptr;           // [m, k]
  std::int64_t a_row = 0, a_col = 0;
  const void* b = nullptr;  // a [k, n] matrix for each group, or one [k, n] divided along k (b_group 0)
  std::int64_t b_group = 0, b_row = 0, b_col = 0;
  void* out = nullptr;  // [m, n], or one for each group (out_group) when they divide k
  std::int64_t out_group = 0, out_row = 0, out_col = 0;
};

// Enqueues one kernel. Rows of out behind the last group are not written.
int gemm_grouped(const GroupedGemm& product, Stream stream);

}  // namespace untorch::kernels::cuda
