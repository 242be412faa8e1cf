// Scattering: writing through an index along one dimension, and reductions of everything that meets in one place.
#pragma once

#include <span>

#include "base/lanes.h"
#include "kernels/cuda/common/device_fault.h"
#include "kernels/launcher.h"
#include "kernels/reduce_op.h"

namespace untorch::kernels {

// out[…, index, …] = source, or out op source. Operands of `lanes`: 0 out, 1 the source, 2 the index (int64, checked),
// whose shape counts.
struct ScatterParams {
  Lanes<3> lanes;
  DType dtype = DType::kFloat32;
  void* out = nullptr;
  const void* source = nullptr;
  const std::int64_t* index = nullptr;
};

namespace cpu {
// The smallest and the largest of the indices; at least [0, -1].
struct IndexRange {
  std::int64_t low = 0, high = -1;
};
IndexRange index_range(std::span<const std::int64_t> indices);
// Any dtype of up to 16 bytes. Of several values for one place the last of a row stays.
void scatter(const ScatterParams& params);
// Real dtypes. `extent`: the size of out along the dimension. Without include_self the value in out does not count.
// Sequential along the dimension, so that sums are the same with any number of threads.
void scatter_reduce(const ScatterParams& params, std::int64_t extent, ReduceOp op, bool include_self);
}  // namespace cpu

namespace cuda {
// An int64 or int32 index into a dimension of that size and stride (of the destination).
struct ScatterIndex {
  const void* data = nullptr;
  bool wide = true;
  std::int64_t size = 0, stride = 0;
};

// out[…, index, …] = source. Operands: index, out (stride 0 along the dimension), source; a null source means `value`,
// the bytes of one element. An index out of range is reported and skipped. Of several values for one place any one
// stays.
int scatter(const Strided<3>& space, const ScatterIndex& index, void* out, const void* source, const void* value,
            int element_bytes, FaultWord* word, Stream stream);

// keys[i] = where the i-th element of the space (operands: row-major order, out, index) goes in out, all ones where the
// index is out of range, which is reported; ids[i] = i.
int scatter_keys(const Strided<3>& space, const ScatterIndex& index, std::uint64_t* keys, std::uint32_t* ids,
                 FaultWord* word, DeviceFault fault, Stream stream);

// Keys in ascending order: elements of one key meet in one place of out. Keys of all ones are skipped.
struct Segments {
  const std::uint64_t* keys = nullptr;
  const std::uint32_t* ids = nullptr;
  std::int64_t count = 0;
};
// out[key + s] = out[key + s] op source[of id + s] for every id of the key, in the order of the ids, for every element
// s of a slice. Operands of `slice`: row-major order, out, source; of `positions`: row-major order (the ids), source.
// Without include_self the value in out does not count. Halves add up in float; a mean of integers rounds down. Complex
// dtypes have kSum only. Deterministic.
int reduce_segments(const Segments& segments, const Strided<3>& slice, const Strided<2>& positions, void* out,
                    const void* source, DType dtype, ReduceOp op, bool include_self, Stream stream);
}  // namespace cuda

}  // namespace untorch::kernels
