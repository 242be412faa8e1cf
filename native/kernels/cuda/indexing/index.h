// Advanced indexing: index tensors to offsets, gathering and writing through them, and masks.
#pragma once

#include "base/strided.h"
#include "kernels/cuda/common/device_fault.h"
#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

inline constexpr int kMaxIndices = 8;

// Index tensors that were broadcast to one shape (row-major positions, dimensions of size 1 left out).
struct IndexList {
  struct Entry {
    const void* data;
    std::int64_t size, stride;       // of the dimension that is indexed
    std::int64_t strides[kMaxDims];  // of the index tensor, aligned with `sizes`
    bool wide;                       // int64, else int32
  };
  int count = 0, ndim = 0;
  std::int64_t numel = 1;
  std::int64_t sizes[kMaxDims] = {};  // dimension 0 is the innermost
  Entry entries[kMaxIndices];
};

// offsets[i] = sum of index · stride over the list, plus what is there with `add`; -1 when an index is out of range,
// which is reported. `ids` (may be null) becomes 0, 1, ….
int index_offsets(const IndexList& list, std::int64_t* offsets, bool add, std::uint32_t* ids, FaultWord* word,
                  DeviceFault fault, Stream stream);
// Operands: out, self (stride 0 where an index decides), offsets (stride 0 elsewhere). An offset of -1 gives zeros.
// `offset_unit` divides every offset.
int index_gather(const Strided<3>& space, void* out, const void* self, const std::int64_t* offsets,
                 std::int64_t offset_unit, int element_bytes, Stream stream);
// Operands: row-major order, out (as self above), offsets, values. Offsets of -1 are skipped. Of several values for one
// place any one stays.
int index_put(const Strided<4>& space, void* out, const std::int64_t* offsets, const void* values, int element_bytes,
              Stream stream);

// out = *value where the mask is set. Operands: out, mask.
int masked_fill(const Strided<2>& space, void* out, const std::uint8_t* mask, const void* value, int element_bytes,
                Stream stream);
// The row-major coordinates of the set elements of a dense mask: dimension d of the r-th at columns[d * count + r].
// `ranks`: inclusive_count of the mask (radix_sort.h); `sizes` outermost first.
struct Shape {
  int ndim = 0;
  std::int64_t sizes[kMaxDims] = {};
};
int mask_columns(const std::uint8_t* mask, const std::int64_t* ranks, std::int64_t n, const Shape& shape,
                 std::int64_t* columns, std::int64_t count, Stream stream);
// The r-th set element takes source[r]. Operands: out, row-major order (which mask and ranks are in). A set element
// beyond `available` is reported and keeps its value.
int masked_scatter(const Strided<2>& space, void* out, const std::uint8_t* mask, const std::int64_t* ranks,
                   const void* source, std::int64_t available, int element_bytes, FaultWord* word, Stream stream);

}  // namespace untorch::kernels::cuda
