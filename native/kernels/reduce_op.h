// The reductions of scatter_reduce, index_reduce and segment_reduce.
#pragma once

namespace untorch::kernels {

enum class ReduceOp : int { kSum, kProd, kMean, kMax, kMin };

}  // namespace untorch::kernels
