// Concatenation, padding and windows.
#pragma once

#include "base/strided.h"
#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

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

enum class Padding : int { kConstant, kReflect, kReplicate, kCircular };
// Dimension 0 is the innermost of out. Pads may be negative.
struct PadSpace {
  int ndim = 0;
  std::int64_t numel = 1;  // of out
  struct Dim {
    std::int64_t out_size, out_stride, in_size, in_stride, before, after;
  };
  Dim dims[kMaxDims];
};
// `value`: the bytes of the constant.
int pad(const PadSpace& space, Padding mode, void* out, const void* in, const void* value, int element_bytes,
        Stream stream);

// The periodic Hann window of n > 0 points, in a floating dtype.
int hann_window(void* out, DType dtype, std::int64_t n, Stream stream);

}  // namespace untorch::kernels::cuda
