// Pooling of regions of interest: one task a region and channel of the output.
//
// Layout: input [batch, channels, height, width], rois [regions, 5], output [regions, channels, ph, pw], row-major.
// roi_align finds pixels and weights of a region's samples once for all channels, roi_pool the bounds of its bins.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/cpu/common/parallel_items.h"
#include "kernels/detection.h"

namespace untorch::kernels::cpu {
namespace {

constexpr std::int64_t kMaxSamples = 1 << 20;  // of a region that are kept

// A bilinear sample: four pixels of a plane and their weights, 0 outside of the image.
template <class T>
struct Sample {
  std::int64_t at[4] = {0, 0, 0, 0};
  T weight[4] = {0, 0, 0, 0};

  T of(const T* plane) const {
    return weight[0] * plane[at[0]] + weight[1] * plane[at[1]] + weight[2] * plane[at[2]] + weight[3] * plane[at[3]];
  }
};

template <class T>
Sample<T> sample_at(T y, T x, std::int64_t height, std::int64_t width) {
  Sample<T> sample;
  // NaN is outside, too.
  if (!(y >= T(-1) && y <= static_cast<T>(height) && x >= T(-1) && x <= static_cast<T>(width))) return sample;
  y = std::max(y, T(0));
  x = std::max(x, T(0));
  auto top = static_cast<std::int64_t>(y), left = static_cast<std::int64_t>(x);
  std::int64_t bottom = top + 1, right = left + 1;
  if (top >= height - 1) {
    top = bottom = height - 1;
    y = static_cast<T>(top);
  }
  if (left >= width - 1) {
    left = right = width - 1;
    x = static_cast<T>(left);
  }
  const T down = y - static_cast<T>(top), across = x - static_cast<T>(left), up = T(1) - down, back = T(1) - across;
  return {{top * width + left, top * width + right, bottom * width + left, bottom * width + right},
          {up * back, up * across, down * back, down * across}};
}

template <class T>
struct Region {
  std::int64_t image = 0;
  T x1 = 0, y1 = 0, x2 = 0, y2 = 0;
};

template <class T>
Region<T> region_of(const RoiAlign& p, std::int64_t number) {
  const T* const roi = static_cast<const T*>(p.rois) + number * 5;
  return {static_cast<std::int64_t>(roi[0]), roi[1], roi[2], roi[3], roi[4]};
}

// The first region whose image is not in the batch; -1: none.
template <class T>
std::int64_t find_stranger(const RoiAlign& p) {
  for (std::int64_t n = 0; n < p.regions; ++n) {
    const T image = static_cast<const T*>(p.rois)[n * 5];
    if (!(image > T(-1) && image < static_cast<T>(p.batch))) return n;
  }
  return -1;
}

template <class T>
bool is_parallel(const RoiAlign& p) {
  return static_cast<double>(p.regions * p.channels * p.pooled_height * p.pooled_width) * 4 > kParallelWork;
}

// Samples along one side of a bin.
template <class T>
std::int64_t samples_of(const RoiAlign& p, T bin) {
  if (p.sampling_ratio > 0) return p.sampling_ratio;
  const T count = std::ceil(bin);
  return count > T(0) ? static_cast<std::int64_t>(std::min(count, T(1 << 20))) : 0;
}

template <class T>
std::int64_t align(const RoiAlign& p) {
  if (const std::int64_t stranger = find_stranger<T>(p); stranger >= 0) return stranger;
  const std::int64_t bins = p.pooled_height * p.pooled_width, pixels = p.height * p.width;
  const T scale = static_cast<T>(p.spatial_scale), shift = p.aligned ? T(0.5) : T(0);
  for_each_item(p.regions, is_parallel<T>(p), [&](std::int64_t n) {
    const Region<T> region = region_of<T>(p, n);
    const T left = region.x1 * scale - shift, top = region.y1 * scale - shift;
    T width = region.x2 * scale - shift - left, height = region.y2 * scale - shift - top;
    if (!p.aligned) {
      width = std::max(width, T(1));
      height = std::max(height, T(1));
    }
    const T bin_height = height / static_cast<T>(p.pooled_height), bin_width = width / static_cast<T>(p.pooled_width);
    const std::int64_t rows = samples_of(p, bin_height), columns = samples_of(p, bin_width), count = rows * columns;
    const auto sample_of = [&](std::int64_t bin, std::int64_t i) {
      const T y0 = top + static_cast<T>(bin / p.pooled_width) * bin_height,
              x0 = left + static_cast<T>(bin % p.pooled_width) * bin_width;
      const T y = y0 + (static_cast<T>(i / columns) + T(0.5)) * bin_height / static_cast<T>(rows),
              x = x0 + (static_cast<T>(i % columns) + T(0.5)) * bin_width / static_cast<T>(columns);
      return sample_at(y, x, p.height, p.width);
    };
    // A region far larger than any image has more samples than fit into memory: each channel finds them anew.
    const bool kept = count == 0 || bins <= kMaxSamples / count;
    std::vector<Sample<T>> samples;
    if (kept) {
      samples.reserve(static_cast<std::size_t>(bins * count));
      for (std::int64_t bin = 0; bin < bins; ++bin) {
        for (std::int64_t i = 0; i < count; ++i) samples.push_back(sample_of(bin, i));
      }
    }
    const T* plane = static_cast<const T*>(p.input) + region.image * p.channels * pixels;
    T* out = static_cast<T*>(p.out) + n * p.channels * bins;
    for (std::int64_t c = 0; c < p.channels; ++c, plane += pixels) {
      const Sample<T>* next = samples.data();
      for (std::int64_t bin = 0; bin < bins; ++bin) {
        T sum = 0;
        for (std::int64_t i = 0; i < count; ++i) sum += kept ? (next++)->of(plane) : sample_of(bin, i).of(plane);
        *out++ = sum / static_cast<T>(std::max<std::int64_t>(count, 1));
      }
    }
  });
  return -1;
}

// Where a bin of whole pixels begins and ends along one axis.
struct Span {
  std::int64_t first, last;
  bool empty() const { return last <= first; }
};

template <class T>
Span pixels_of(std::int64_t bin, T size, std::int64_t start, std::int64_t limit) {
  const auto first = static_cast<std::int64_t>(std::floor(static_cast<T>(bin) * size)),
             last = static_cast<std::int64_t>(std::ceil(static_cast<T>(bin + 1) * size));
  return {std::clamp<std::int64_t>(first + start, 0, limit), std::clamp<std::int64_t>(last + start, 0, limit)};
}

// A rounded corner; far outside (or NaN) any that no image reaches.
template <class T>
std::int64_t rounded(T corner) {
  const T whole = std::round(corner);
  return whole > T(-1e9) && whole < T(1e9) ? static_cast<std::int64_t>(whole) : whole > T(0) ? 1000000000 : -1000000000;
}

template <class T>
std::int64_t pool(const RoiPool& pool) {
  const RoiAlign& p = pool.regions;
  if (const std::int64_t stranger = find_stranger<T>(p); stranger >= 0) return stranger;
  const std::int64_t bins = p.pooled_height * p.pooled_width, pixels = p.height * p.width;
  const T scale = static_cast<T>(p.spatial_scale);
  for_each_item(p.regions * p.channels, is_parallel<T>(p), [&](std::int64_t item) {
    const std::int64_t n = item / p.channels, c = item % p.channels;
    const Region<T> region = region_of<T>(p, n);
    const std::int64_t left = rounded(region.x1 * scale), top = rounded(region.y1 * scale);
    const std::int64_t width = std::max<std::int64_t>(rounded(region.x2 * scale) - left + 1, 1),
                       height = std::max<std::int64_t>(rounded(region.y2 * scale) - top + 1, 1);
    const T bin_height = static_cast<T>(height) / static_cast<T>(p.pooled_height),
            bin_width = static_cast<T>(width) / static_cast<T>(p.pooled_width);
    const T* const plane = static_cast<const T*>(p.input) + (region.image * p.channels + c) * pixels;
    for (std::int64_t bin = 0; bin < bins; ++bin) {
      const Span rows = pixels_of(bin / p.pooled_width, bin_height, top, p.height),
                 columns = pixels_of(bin % p.pooled_width, bin_width, left, p.width);
      T largest = rows.empty() || columns.empty() ? T(0) : std::numeric_limits<float>::lowest();
      std::int32_t at = -1;
      for (std::int64_t y = rows.first; y < rows.last; ++y) {
        for (std::int64_t x = columns.first; x < columns.last; ++x) {
          if (plane[y * p.width + x] > largest) {
            largest = plane[y * p.width + x];
            at = static_cast<std::int32_t>(y * p.width + x);
          }
        }
      }
      static_cast<T*>(p.out)[item * bins + bin] = largest;
      pool.index[item * bins + bin] = at;
    }
  });
  return -1;
}

// Calls body(region, bin's row, bin's column, plane), which gives the value, for each bin and its own channel.
template <class T, class Body>
std::int64_t for_each_ps_bin(const RoiPool& pool, const Body& body) {
  const RoiAlign& p = pool.regions;
  if (const std::int64_t stranger = find_stranger<T>(p); stranger >= 0) return stranger;
  const std::int64_t bins = p.pooled_height * p.pooled_width, pixels = p.height * p.width, channels = p.channels / bins;
  for_each_item(p.regions * channels, is_parallel<T>(p), [&](std::int64_t item) {
    const Region<T> region = region_of<T>(p, item / channels);
    for (std::int64_t bin = 0; bin < bins; ++bin) {
      const std::int64_t channel = item % channels * bins + bin;
      const T* const plane = static_cast<const T*>(p.input) + (region.image * p.channels + channel) * pixels;
      static_cast<T*>(p.out)[item * bins + bin] = body(region, bin / p.pooled_width, bin % p.pooled_width, plane);
      pool.index[item * bins + bin] = static_cast<std::int32_t>(channel);
    }
  });
  return -1;
}

template <class T>
std::int64_t ps_align(const RoiPool& pool) {
  const RoiAlign& p = pool.regions;
  const T scale = static_cast<T>(p.spatial_scale);
  return for_each_ps_bin<T>(pool, [&](const Region<T>& region, std::int64_t row, std::int64_t column, const T* plane) {
    const T left = region.x1 * scale - T(0.5), top = region.y1 * scale - T(0.5);
    const T bin_height = (region.y2 * scale - T(0.5) - top) / static_cast<T>(p.pooled_height),
            bin_width = (region.x2 * scale - T(0.5) - left) / static_cast<T>(p.pooled_width);
    const T y0 = static_cast<T>(row) * bin_height + top, x0 = static_cast<T>(column) * bin_width + left;
    const std::int64_t rows = samples_of(p, bin_height), columns = samples_of(p, bin_width);
    T sum = 0;
    for (std::int64_t a = 0; a < rows; ++a) {
      const T y = y0 + (static_cast<T>(a) + T(0.5)) * bin_height / static_cast<T>(rows);
      for (std::int64_t b = 0; b < columns; ++b) {
        const T x = x0 + (static_cast<T>(b) + T(0.5)) * bin_width / static_cast<T>(columns);
        sum += sample_at(y, x, p.height, p.width).of(plane);
      }
    }
    return sum / static_cast<T>(rows * columns);
  });
}

template <class T>
std::int64_t ps_pool(const RoiPool& pool) {
  const RoiAlign& p = pool.regions;
  const T scale = static_cast<T>(p.spatial_scale);
  return for_each_ps_bin<T>(pool, [&](const Region<T>& region, std::int64_t row, std::int64_t column, const T* plane) {
    const std::int64_t left = rounded(region.x1 * scale), top = rounded(region.y1 * scale);
    const std::int64_t width = std::max<std::int64_t>(rounded(region.x2 * scale) - left, 1),
                       height = std::max<std::int64_t>(rounded(region.y2 * scale) - top, 1);
    const T bin_height = static_cast<T>(height) / static_cast<T>(p.pooled_height),
            bin_width = static_cast<T>(width) / static_cast<T>(p.pooled_width);
    // torchvision leaves the last row and column out.
    const Span rows = pixels_of(row, bin_height, top, p.height - 1),
               columns = pixels_of(column, bin_width, left, p.width - 1);
    if (rows.empty() || columns.empty()) return T(0);
    T sum = 0;
    for (std::int64_t y = rows.first; y < rows.last; ++y) {
      for (std::int64_t x = columns.first; x < columns.last; ++x) sum += plane[y * p.width + x];
    }
    return sum / static_cast<T>((rows.last - rows.first) * (columns.last - columns.first));
  });
}

}  // namespace

std::int64_t roi_align(const RoiAlign& p) { return p.dtype == DType::kFloat64 ? align<double>(p) : align<float>(p); }

std::int64_t roi_pool(const RoiPool& p) {
  return p.regions.dtype == DType::kFloat64 ? pool<double>(p) : pool<float>(p);
}

std::int64_t ps_roi_align(const RoiPool& p) {
  return p.regions.dtype == DType::kFloat64 ? ps_align<double>(p) : ps_align<float>(p);
}

std::int64_t ps_roi_pool(const RoiPool& p) {
  return p.regions.dtype == DType::kFloat64 ? ps_pool<double>(p) : ps_pool<float>(p);
}

}  // namespace untorch::kernels::cpu
