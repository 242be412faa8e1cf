// Grid sampling: one task a run of grid points, which finds the corners and weights of a point once and walks the
// channels.
#include "kernels/grid_sampler.h"

#include <cmath>

#include "base/dispatch.h"
#include "kernels/cpu/common/parallel_items.h"

namespace untorch::kernels::cpu {
namespace {

// Folds x into [low/2, high/2] as between two mirrors.
template <class C>
C reflect(C x, std::int64_t low, std::int64_t high) {
  if (low == high) return C(0);
  const C least = static_cast<C>(low) / 2, span = static_cast<C>(high - low) / 2;
  const C distance = std::fabs(x - least), rest = std::fmod(distance, span);
  const bool even = std::fmod(std::floor(distance / span), C(2)) == C(0);
  return even ? rest + least : span - rest + least;
}

// A grid coordinate in [-1, 1] as a position in [0, size), with the padding rule applied.
template <class C>
C position(C coordinate, std::int64_t size, GridPadding padding, bool align_corners) {
  C x = align_corners ? (coordinate + 1) / 2 * static_cast<C>(size - 1)
                      : ((coordinate + 1) * static_cast<C>(size) - 1) / 2;
  if (padding == GridPadding::kReflection)
    x = align_corners ? reflect(x, 0, 2 * (size - 1)) : reflect(x, -1, 2 * size - 1);
  if (padding != GridPadding::kZeros) {
    x = x < C(0) ? C(0) : x < static_cast<C>(size - 1) ? x : static_cast<C>(size - 1);  // NaN takes the last
  }
  // Far outside (or NaN): any position that no voxel has; also keeps the conversion to an integer defined.
  if (!(x > C(-1e9) && x < C(1e9))) x = C(-100);
  return x;
}

template <class T>
void sample_point(const GridSample& p, std::int64_t n, std::int64_t point, const T* input, const T* grid, T* output) {
  using C = compute_t<T>;
  const std::int64_t d = p.input[0], h = p.input[1], w = p.input[2];
  const std::int64_t points = p.output[0] * p.output[1] * p.output[2];
  const std::int64_t column = point % p.output[2], row = point / p.output[2] % p.output[1],
                     plane = point / (p.output[1] * p.output[2]);
  const T* const at = grid + n * p.grid_at[0] + plane * p.grid_at[2] + row * p.grid_at[3] + column * p.grid_at[4];
  const C x = position(static_cast<C>(at[0]), w, p.padding, p.align_corners);
  const C y = position(static_cast<C>(at[p.grid_at[1]]), h, p.padding, p.align_corners);
  const C z = position(static_cast<C>(at[2 * p.grid_at[1]]), d, p.padding, p.align_corners);
  const std::int64_t sc = p.in_at[1], sd = p.in_at[2], sh = p.in_at[3], sw = p.in_at[4];
  const T* const from = input + n * p.in_at[0];
  T* const to = output + n * p.channels * points + point;
  const auto inside = [&](std::int64_t iz, std::int64_t iy, std::int64_t ix) {
    return iz >= 0 && iz < d && iy >= 0 && iy < h && ix >= 0 && ix < w;
  };
  if (p.nearest) {
    const auto ix = static_cast<std::int64_t>(std::nearbyint(x)), iy = static_cast<std::int64_t>(std::nearbyint(y)),
               iz = static_cast<std::int64_t>(std::nearbyint(z));
    const bool hit = inside(iz, iy, ix);
    for (std::int64_t c = 0; c < p.channels; ++c) {
      to[c * points] = hit ? from[c * sc + iz * sd + iy * sh + ix * sw] : T(0.0f);
    }
    return;
  }
  const C x0 = std::floor(x), y0 = std::floor(y), z0 = std::floor(z);
  std::int64_t offsets[8];
  C weights[8];
  for (int corner = 0; corner < 8; ++corner) {
    const int dx = corner & 1, dy = corner >> 1 & 1, dz = corner >> 2;
    const auto ix = static_cast<std::int64_t>(x0) + dx, iy = static_cast<std::int64_t>(y0) + dy,
               iz = static_cast<std::int64_t>(z0) + dz;
    const C wx = dx != 0 ? x - x0 : x0 + 1 - x, wy = dy != 0 ? y - y0 : y0 + 1 - y, wz = dz != 0 ? z - z0 : z0 + 1 - z;
    offsets[corner] = inside(iz, iy, ix) ? iz * sd + iy * sh + ix * sw : -1;
    weights[corner] = wx * wy * wz;
  }
  for (std::int64_t c = 0; c < p.channels; ++c) {
    C sum = 0;
    for (int corner = 0; corner < 8; ++corner) {
      if (offsets[corner] >= 0) sum += static_cast<C>(from[c * sc + offsets[corner]]) * weights[corner];
    }
    to[c * points] = T(sum);
  }
}

}  // namespace

void grid_sample(const GridSample& p, DType dtype, const void* input, const void* grid, void* output) {
  const std::int64_t points = p.output[0] * p.output[1] * p.output[2];
  const bool parallel = static_cast<double>(p.batch * p.channels * points) * 8 > kParallelWork;
  dispatch_floating("grid_sampler_3d", dtype, [&]<class T>() {
    for_each_item_grained(p.batch * points, 64, parallel, [&](std::int64_t i) {
      sample_point(p, i / points, i % points, static_cast<const T*>(input), static_cast<const T*>(grid),
                   static_cast<T*>(output));
    });
  });
}

}  // namespace untorch::kernels::cpu
