// Strided copies: merges dimensions, then moves rows; converts element by element when the dtypes differ.
#include "tensor/copy.h"

#include <algorithm>
#include <type_traits>

#include "base/dispatch.h"

namespace untorch {
namespace {

// A copy as nested loops, outermost first, dimensions of size 1 dropped and mergeable neighbours merged.
struct Loops {
  std::vector<std::int64_t> sizes, dst, src;
};

Loops plan(const Tensor& dst, const Tensor& src) {
  const std::int64_t ndim = dst.dim();
  const std::int64_t lead = ndim - src.dim();
  check(lead >= 0, "copy: shape ", to_string(src.sizes()), " does not broadcast to ", to_string(dst.sizes()));
  struct Dim {
    std::int64_t size, dst, src;
  };
  std::vector<Dim> dims;
  for (std::int64_t d = 0; d < ndim; ++d) {
    const auto i = static_cast<std::size_t>(d);
    const std::int64_t size = dst.sizes()[i];
    std::int64_t src_stride = 0;
    if (d >= lead) {
      const auto j = static_cast<std::size_t>(d - lead);
      check(src.sizes()[j] == size || src.sizes()[j] == 1, "copy: shape ", to_string(src.sizes()),
            " does not broadcast to ", to_string(dst.sizes()));
      src_stride = src.sizes()[j] == 1 ? 0 : src.strides()[j];
    }
    if (size != 1) dims.push_back({size, dst.strides()[i], src_stride});
  }
  // Write in memory order: the smallest destination stride innermost.
  std::stable_sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) { return a.dst > b.dst; });
  Loops loops;
  for (const Dim& dim : dims) {
    if (!loops.sizes.empty() && loops.dst.back() == dim.dst * dim.size && loops.src.back() == dim.src * dim.size) {
      loops.sizes.back() *= dim.size;
      loops.dst.back() = dim.dst;
      loops.src.back() = dim.src;
    } else {
      loops.sizes.push_back(dim.size);
      loops.dst.push_back(dim.dst);
      loops.src.push_back(dim.src);
    }
  }
  if (loops.sizes.empty()) loops = {{1}, {1}, {1}};
  return loops;
}

// Calls row(dst_offset, src_offset) for every innermost row.
template <class Row>
void for_each_row(const Loops& loops, Row&& row) {
  const std::size_t outer = loops.sizes.size() - 1;
  std::vector<std::int64_t> index(outer, 0);
  std::int64_t dst = 0, src = 0;
  while (true) {
    row(dst, src);
    std::size_t d = outer;
    while (d-- > 0) {
      dst += loops.dst[d];
      src += loops.src[d];
      if (++index[d] < loops.sizes[d]) break;
      dst -= loops.dst[d] * loops.sizes[d];
      src -= loops.src[d] * loops.sizes[d];
      index[d] = 0;
    }
    if (d == static_cast<std::size_t>(-1)) return;
  }
}

template <class T>
void move_rows(T* dst, const T* src, const Loops& loops) {
  const std::int64_t n = loops.sizes.back(), ds = loops.dst.back(), ss = loops.src.back();
  for_each_row(loops, [&](std::int64_t d, std::int64_t s) {
    T* to = dst + d;
    const T* from = src + s;
    if (ds == 1 && ss == 1) {
      std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(T));
    } else {
      for (std::int64_t i = 0; i < n; ++i) to[i * ds] = from[i * ss];
    }
  });
}

template <class To, class From>
To convert(From value) {
  if constexpr (std::is_same_v<To, bool>) {
    if constexpr (std::is_same_v<From, Half> || std::is_same_v<From, BFloat16>) {
      return static_cast<float>(value) != 0.0f;
    } else {
      return value != From(0);
    }
  } else {
    using Wide = compute_t<From>;
    using Target = compute_t<To>;
    const Wide wide = static_cast<Wide>(value);
    if constexpr (std::is_floating_point_v<Wide> && std::is_integral_v<To> && std::is_unsigned_v<To>) {
      // Through int64, so that negative values wrap as in PyTorch instead of being undefined.
      return static_cast<To>(static_cast<std::int64_t>(wide));
    } else if constexpr (std::is_floating_point_v<Wide> && std::is_integral_v<To> && sizeof(To) < 4) {
      return static_cast<To>(static_cast<std::int64_t>(wide));
    } else {
      return static_cast<To>(static_cast<Target>(wide));
    }
  }
}

template <class To, class From>
void convert_rows(To* dst, const From* src, const Loops& loops) {
  const std::int64_t n = loops.sizes.back(), ds = loops.dst.back(), ss = loops.src.back();
  for_each_row(loops, [&](std::int64_t d, std::int64_t s) {
    To* to = dst + d;
    const From* from = src + s;
    for (std::int64_t i = 0; i < n; ++i) to[i * ds] = convert<To>(from[i * ss]);
  });
}

// Complex64 and Complex128 to each other, from and to real types.
void convert_complex(const Tensor& dst, const Tensor& src, const Loops& loops) {
  auto with_src = [&](auto load) {
    for_each_row(loops, [&](std::int64_t d, std::int64_t s) {
      for (std::int64_t i = 0; i < loops.sizes.back(); ++i) {
        const Complex128 value = load(s + i * loops.src.back());
        const std::int64_t at = d + i * loops.dst.back();
        if (dst.dtype() == DType::kComplex64) {
          dst.data<Complex64>()[at] = {static_cast<float>(value.re), static_cast<float>(value.im)};
        } else if (dst.dtype() == DType::kComplex128) {
          dst.data<Complex128>()[at] = value;
        } else {
          dispatch_real("copy", dst.dtype(), [&]<class To>() { dst.data<To>()[at] = convert<To>(value.re); });
        }
      }
    });
  };
  if (src.dtype() == DType::kComplex64) {
    const auto* p = src.data<Complex64>();
    with_src([p](std::int64_t i) { return Complex128{p[i].re, p[i].im}; });
  } else if (src.dtype() == DType::kComplex128) {
    const auto* p = src.data<Complex128>();
    with_src([p](std::int64_t i) { return p[i]; });
  } else {
    dispatch_real("copy", src.dtype(), [&]<class From>() {
      const auto* p = src.data<From>();
      with_src([p](std::int64_t i) { return Complex128{convert<double>(p[i]), 0.0}; });
    });
  }
}

}  // namespace

void copy_cpu(const Tensor& dst, const Tensor& src) {
  check(dst.defined() && src.defined(), "copy: undefined tensor");
  check(dst.device().type == DeviceType::kCPU && src.device().type == DeviceType::kCPU,
        "copy: expected CPU tensors, got ", device_name(src.device()), " → ", device_name(dst.device()));
  const Loops loops = plan(dst, src);
  if (dst.numel() == 0) return;
  if (dst.dtype() == src.dtype()) {
    dispatch_width("copy", dst.dtype(), [&]<class T>() { move_rows(dst.data<T>(), src.data<T>(), loops); });
  } else if (is_complex(dst.dtype()) || is_complex(src.dtype())) {
    convert_complex(dst, src, loops);
  } else {
    dispatch_real("copy", dst.dtype(), [&]<class To>() {
      dispatch_real("copy", src.dtype(), [&]<class From>() { convert_rows(dst.data<To>(), src.data<From>(), loops); });
    });
  }
}

}  // namespace untorch
