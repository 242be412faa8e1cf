// Concatenation, padding and windows.
#pragma once

#include "base/strided.h"
#include "kernels/launcher.h"

namespace untorch::kernels {

enum class Padding : int { kConstant, kReflect, kReplicate, kCircular };

// Dimension 0 is the innermost of out. Strides in elements; padding may be negative.
struct Pad {
  int ndim = 0;
  std::int64_t numel = 1;  // of out
  struct Dim {
    std::int64_t out_size, out_stride, in_size, in_stride, before, after;
  };
  Dim dims[kMaxDims];
};

namespace cpu {
// `out` is dense. `value`: the bytes of the constant.
void pad(const Pad& pad, Padding mode, DType dtype, void* out, const void* in, const void* value);
// The periodic Hann window of n points, in a floating dtype.
void hann_window(void* out, DType dtype, std::int64_t n);
}  // namespace cpu

namespace cuda {
// Up to this many dense pieces of one launch: piece p is `rows` rows of `length` elements, which go to out + start, a
// row every `pitch` elements. Others go in further launches.
inline constexpr int kMaxPieces = 64;
struct Piece {
  const void* data;
  std::int64_t length, start;
};
struct Pieces {
  int count = 0;
  std::int64_t rows = 0, pitch = 0;
  Piece piece[kMaxPieces];
};
int concatenate(const Pieces& pieces, void* out, int element_bytes, Stream stream);
int pad(const Pad& pad, Padding mode, DType dtype, void* out, const void* in, const void* value, Stream stream);
int hann_window(void* out, DType dtype, std::int64_t n, Stream stream);
}  // namespace cuda

}  // namespace untorch::kernels
