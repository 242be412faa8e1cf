// Advanced indexing: index tensors to offsets, gathering and writing through them, and masked fill.
#pragma once

#include <optional>

#include "base/strided.h"
#include "kernels/cuda/common/device_fault.h"
#include "kernels/launcher.h"

namespace untorch::kernels {

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
  Entry entries[kMaxIndices] = {};
};

// Operands of a gather: out, self (stride 0 where an index decides), offsets (stride 0 elsewhere).
// Operands of a put: row-major order, out (as self above), offsets, values.
// `offsets` are in elements and go on top of those of the space.

namespace cpu {
// An index that lies outside of its dimension.
struct IndexFault {
  int entry = 0;  // of the list
  std::int64_t index = 0;
};
// offsets[i] = sum of index · stride over the list, plus what is there with `add`.
std::optional<IndexFault> index_offsets(const IndexList& list, std::int64_t* offsets, bool add);
void index_gather(const Strided<3>& space, DType dtype, void* out, const void* self, const std::int64_t* offsets);
// In order, so that the last of several values for one place stays and sums are the same everywhere.
void index_put(const Strided<4>& space, DType dtype, void* out, const std::int64_t* offsets, const void* values);
void index_add(const Strided<4>& space, DType dtype, void* out, const std::int64_t* offsets, const void* values);
}  // namespace cpu

namespace cuda {
// As the CPU's; -1 when an index is out of range, which is reported. `ids` (may be null) becomes 0, 1, ….
int index_offsets(const IndexList& list, std::int64_t* offsets, bool add, std::uint32_t* ids, FaultWord* word,
                  DeviceFault fault, Stream stream);
// An offset of -1 gives zeros. `offset_unit` divides every offset.
int index_gather(const Strided<3>& space, void* out, const void* self, const std::int64_t* offsets,
                 std::int64_t offset_unit, int element_bytes, Stream stream);
// Offsets of -1 are skipped. Of several values for one place any one stays.
int index_put(const Strided<4>& space, void* out, const std::int64_t* offsets, const void* values, int element_bytes,
              Stream stream);

// out = *value where the mask is set. Operands: out, mask.
int masked_fill(const Strided<2>& space, void* out, const std::uint8_t* mask, const void* value, int element_bytes,
                Stream stream);
}  // namespace cuda

}  // namespace untorch::kernels
