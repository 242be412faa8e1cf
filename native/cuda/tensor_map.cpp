// Tensor maps by the driver's cuTensorMapEncodeTiled.
#include "kernels/cuda/sm90/tensor_map.h"

#include "cuda/driver.h"

namespace untorch::kernels::cuda {
namespace {

// CU_TENSOR_MAP_…: DATA_TYPE_UINT8, UINT16 and UINT32, INTERLEAVE_NONE, SWIZZLE_NONE and 128B, L2_PROMOTION_L2_128B,
// FLOAT_OOB_FILL_NONE
constexpr int kUint8 = 0, kUint16 = 1, kUint32 = 2, kNoInterleave = 0, kNoSwizzle = 0, kSwizzle128 = 3, kPromote128 = 2,
              kFillZeros = 0;

}  // namespace

int encode_tensor_map(const TensorMapSpec& spec, TensorMap& out) {
  const std::uint64_t sizes[3] = {static_cast<std::uint64_t>(spec.columns), static_cast<std::uint64_t>(spec.rows),
                                  static_cast<std::uint64_t>(spec.matrices)};
  const std::uint64_t strides[2] = {static_cast<std::uint64_t>(spec.row_bytes),
                                    static_cast<std::uint64_t>(spec.matrix_bytes)};
  const std::uint32_t box[3] = {static_cast<std::uint32_t>(spec.box_columns), static_cast<std::uint32_t>(spec.box_rows),
                                1};
  const std::uint32_t element_strides[3] = {1, 1, 1};
  const int type = spec.element_bytes == 1 ? kUint8 : spec.element_bytes == 2 ? kUint16 : kUint32;
  return untorch::cuda::driver().tensor_map_encode_tiled(
      &out, type, spec.matrices > 0 ? 3 : 2, const_cast<void*>(spec.base), sizes, strides, box, element_strides,
      kNoInterleave, spec.swizzle ? kSwizzle128 : kNoSwizzle, kPromote128, kFillZeros);
}

int encode_tensor_map(const TensorMap4dSpec& spec, TensorMap& out) {
  const auto word = [](std::int64_t value) { return static_cast<std::uint64_t>(value); };
  const std::uint64_t sizes[4] = {word(spec.columns), word(spec.rows), word(spec.middle), word(spec.outer)};
  const std::uint64_t strides[3] = {word(spec.row_bytes), word(spec.middle_bytes), word(spec.outer_bytes)};
  const std::uint32_t box[4] = {64, static_cast<std::uint32_t>(spec.box_rows),
                                static_cast<std::uint32_t>(spec.box_middle),
                                static_cast<std::uint32_t>(spec.box_outer)};
  const std::uint32_t element_strides[4] = {1, 1, 1, 1};
  return untorch::cuda::driver().tensor_map_encode_tiled(&out, kUint16, 4, const_cast<void*>(spec.base), sizes, strides,
                                                         box, element_strides, kNoInterleave, kSwizzle128, kPromote128,
                                                         kFillZeros);
}

}  // namespace untorch::kernels::cuda
