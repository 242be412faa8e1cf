// grid_sampler_3d: values of a volume at fractional positions.
#include <algorithm>
#include <cmath>

#include "kernels/cpu/common/parallel_items.h"
#include "shims/nn.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

constexpr const char* kOp = "grid_sampler_3d";
enum class Padding { kZeros = 0, kBorder = 1, kReflection = 2 };

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
C position(C coordinate, std::int64_t size, Padding padding, bool align_corners) {
  C x = align_corners ? (coordinate + 1) / 2 * static_cast<C>(size - 1)
                      : ((coordinate + 1) * static_cast<C>(size) - 1) / 2;
  if (padding == Padding::kReflection) x = align_corners ? reflect(x, 0, 2 * (size - 1)) : reflect(x, -1, 2 * size - 1);
  if (padding != Padding::kZeros) {
    x = x < C(0) ? C(0) : x < static_cast<C>(size - 1) ? x : static_cast<C>(size - 1);  // NaN takes the last
  }
  // Far outside (or NaN): any position that no voxel has; also keeps the conversion to an integer defined.
  if (!(x > C(-1e9) && x < C(1e9))) x = C(-100);
  return x;
}

}  // namespace

UNTORCH_SHIM aoti_torch_cpu_grid_sampler_3d(AtenTensorHandle input_handle, AtenTensorHandle grid_handle,
                                            std::int64_t interpolation_mode, std::int64_t padding_mode,
                                            std::int32_t align_corners, AtenTensorHandle* ret0) {
  return guarded(kOp, [&] {
    const Tensor &input = cpu_input(input_handle, kOp, "input"), &grid = cpu_input(grid_handle, kOp, "grid");
    check(input.dim() == 5, kOp, ": argument 'input' must be 5-D, got shape ", to_string(input.sizes()));
    check(grid.dim() == 5 && grid.size(4) == 3 && grid.size(0) == input.size(0), kOp,
          ": argument 'grid' must have shape [", input.size(0), ", d, h, w, 3], got ", to_string(grid.sizes()));
    check(grid.dtype() == input.dtype(), kOp, ": argument 'grid' must be ", dtype_name(input.dtype()),
          " like input, got ", dtype_name(grid.dtype()));
    check(input.size(2) > 0 && input.size(3) > 0 && input.size(4) > 0, kOp,
          ": argument 'input' must not be empty but for the batch, got shape ", to_string(input.sizes()));
    if (interpolation_mode != 0 && interpolation_mode != 1) {
      throw_error(ErrorKind::kUnsupported, kOp,
                  ": argument 'interpolation_mode' must be 0 (bilinear) or 1 (nearest), got ", interpolation_mode);
    }
    check(padding_mode >= 0 && padding_mode <= 2, kOp,
          ": argument 'padding_mode' must be 0 (zeros), 1 (border) or 2 (reflection), got ", padding_mode);
    const auto padding = static_cast<Padding>(padding_mode);
    const std::int64_t batch = input.size(0), channels = input.size(1), d = input.size(2), h = input.size(3),
                       w = input.size(4);
    const std::int64_t points = grid.size(1) * grid.size(2) * grid.size(3);
    TensorPtr out = Tensor::empty(Dims{batch, channels, grid.size(1), grid.size(2), grid.size(3)}, input.dtype());
    const TensorPtr places = contiguous(grid);
    dispatch_floating(kOp, input.dtype(), [&]<class T>() {
      using C = compute_t<T>;
      const std::int64_t sc = input.stride(1), sd = input.stride(2), sh = input.stride(3), sw = input.stride(4);
      const bool parallel = static_cast<double>(out->numel()) * 8 > kernels::kParallelWork;
      kernels::for_each_item_grained(batch * points, 64, parallel, [&](std::int64_t item) {
        const std::int64_t n = item / points, p = item % points;
        const T* at = places->data<T>() + item * 3;
        const C x = position(static_cast<C>(at[0]), w, padding, align_corners != 0);
        const C y = position(static_cast<C>(at[1]), h, padding, align_corners != 0);
        const C z = position(static_cast<C>(at[2]), d, padding, align_corners != 0);
        const T* from = input.data<T>() + n * input.stride(0);
        T* to = out->data<T>() + n * channels * points + p;
        const auto inside = [&](std::int64_t iz, std::int64_t iy, std::int64_t ix) {
          return iz >= 0 && iz < d && iy >= 0 && iy < h && ix >= 0 && ix < w;
        };
        if (interpolation_mode == 1) {
          const auto ix = static_cast<std::int64_t>(std::nearbyint(x)),
                     iy = static_cast<std::int64_t>(std::nearbyint(y)),
                     iz = static_cast<std::int64_t>(std::nearbyint(z));
          const bool hit = inside(iz, iy, ix);
          for (std::int64_t c = 0; c < channels; ++c) {
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
          const C wx = dx != 0 ? x - x0 : x0 + 1 - x, wy = dy != 0 ? y - y0 : y0 + 1 - y,
                  wz = dz != 0 ? z - z0 : z0 + 1 - z;
          offsets[corner] = inside(iz, iy, ix) ? iz * sd + iy * sh + ix * sw : -1;
          weights[corner] = wx * wy * wz;
        }
        for (std::int64_t c = 0; c < channels; ++c) {
          C sum = 0;
          for (int corner = 0; corner < 8; ++corner) {
            if (offsets[corner] >= 0) sum += static_cast<C>(from[c * sc + offsets[corner]]) * weights[corner];
          }
          to[c * points] = T(sum);
        }
      });
    });
    give(ret0, std::move(out), kOp);
  });
}
