// Concatenation in one launch for all pieces, padding as a gather, and windows: grid-stride loops.
//
//   result    row 0  | piece 0      | piece 1 | piece 2 |     grid y: the piece; grid x: its elements, 16-byte vectors
//             row 1  | piece 0      | piece 1 | piece 2 |     where lengths and addresses allow it
//                      start ^        length      pitch
//
// Roofline: bound by memory. Bytes: every element of the inputs that is shown read once, every one of the result
// written once; padding takes a few integer operations a dimension.
#include "kernels/cat_pad.h"
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/common/divide.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads) copy_pieces(Pieces pieces, T* out) {
  const Piece& piece = pieces.piece[blockIdx.y];
  const T* const from = static_cast<const T*>(piece.data);
  const std::int64_t total = pieces.rows * piece.length, step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < total; i += step) {
    const std::int64_t row = divided(i, piece.length, total);
    out[row * pieces.pitch + piece.start + (i - row * piece.length)] = from[i];
  }
}

// Where position i of the padded dimension comes from, -1: the constant.
__device__ __forceinline__ std::int64_t source_of(Padding mode, std::int64_t i, const Pad::Dim& dim) {
  if (mode == Padding::kCircular) {
    // Negative padding crops first; what is left wraps around.
    const std::int64_t first = dim.before < 0 ? -dim.before : 0;
    const std::int64_t length = dim.in_size - (dim.after < 0 ? -dim.after : 0) - first;
    const std::int64_t at = (i - (dim.before > 0 ? dim.before : 0)) % length;
    return first + (at < 0 ? at + length : at);
  }
  const std::int64_t at = i - dim.before;
  if (at >= 0 && at < dim.in_size) return at;
  if (mode == Padding::kConstant) return -1;
  if (mode == Padding::kReflect) return at < 0 ? -at : 2 * (dim.in_size - 1) - at;
  return at < 0 ? 0 : dim.in_size - 1;
}

template <class T>
__global__ void __launch_bounds__(kThreads) pad_all(Pad space, Padding mode, T* out, const T* in, T value) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < space.numel; i += step) {
    std::int64_t rest = i, to = 0, from = 0;
    bool shown = true;
    for (int d = 0; d < space.ndim; ++d) {
      const Pad::Dim& dim = space.dims[d];
      const std::int64_t quotient = divided(rest, dim.out_size, space.numel), position = rest - quotient * dim.out_size;
      rest = quotient;
      const std::int64_t source = source_of(mode, position, dim);
      shown = shown && source >= 0;
      to += position * dim.out_stride;
      from += source * dim.in_stride;
    }
    out[to] = shown ? in[from] : value;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) fill_hann(T* out, std::int64_t n) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += step) {
    // One period of the raised cosine, its last point left out.
    const double value = n == 1 ? 1.0 : 0.5 - 0.5 * cospi(2.0 * static_cast<double>(i) / static_cast<double>(n));
    out[i] = narrow<T>(static_cast<Compute<T>>(value));
  }
}

bool divides(std::int64_t unit, std::int64_t value) { return value % unit == 0; }

}  // namespace

int concatenate(const Pieces& pieces, void* out, int element_bytes, Stream stream) {
  std::int64_t longest = 0;
  bool wide = divides(16, pieces.pitch * element_bytes) && divides(16, reinterpret_cast<std::intptr_t>(out));
  for (int p = 0; p < pieces.count; ++p) {
    const Piece& piece = pieces.piece[p];
    longest = piece.length > longest ? piece.length : longest;
    wide = wide && divides(16, piece.length * element_bytes) && divides(16, piece.start * element_bytes) &&
           divides(16, reinterpret_cast<std::intptr_t>(piece.data));
  }
  if (longest == 0 || pieces.rows == 0) return 0;
  Pieces units = pieces;
  int bytes = element_bytes;
  if (wide) {
    const auto in_units = [&](std::int64_t elements) { return elements * element_bytes / 16; };
    units.pitch = in_units(pieces.pitch);
    longest = in_units(longest);
    for (int p = 0; p < pieces.count; ++p) {
      units.piece[p].length = in_units(pieces.piece[p].length);
      units.piece[p].start = in_units(pieces.piece[p].start);
    }
    bytes = 16;
  }
  const dim3 grid(blocks_for(pieces.rows * longest, kThreads), static_cast<unsigned>(pieces.count));
  return dispatch_bytes(bytes, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    copy_pieces<<<grid, kThreads, 0, stream>>>(units, static_cast<T*>(out));
    return cudaGetLastError();
  });
}

int pad(const Pad& space, Padding mode, DType dtype, void* out, const void* in, const void* value, Stream stream) {
  if (space.numel == 0) return 0;
  return dispatch_bytes(static_cast<int>(element_size(dtype)), [&](auto type) -> int {
    using T = typename decltype(type)::type;
    pad_all<<<blocks_for(space.numel, kThreads), kThreads, 0, stream>>>(
        space, mode, static_cast<T*>(out), static_cast<const T*>(in), *static_cast<const T*>(value));
    return cudaGetLastError();
  });
}

int hann_window(void* out, DType dtype, std::int64_t n, Stream stream) {
  if (n == 0) return 0;
  return dispatch_floating(dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    fill_hann<<<blocks_for(n, kThreads), kThreads, 0, stream>>>(static_cast<T*>(out), n);
    return cudaGetLastError();
  });
}

}  // namespace untorch::kernels::cuda
