// Elementwise loops in the memory order of the result, and the maximum over dimensions. Bytes: the operands read once,
// the result written once; the half types compute in float.
#include "kernels/elementwise.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <numeric>

#include "base/dispatch.h"
#include "kernels/cpu/common/map.h"

namespace untorch::kernels::cpu {
namespace {

// value as T, in T's arithmetic.
template <class T>
auto widen(double value) {
  if constexpr (kIsComplex<T>) {
    return T(static_cast<typename T::value_type>(value));
  } else {
    return static_cast<compute_t<T>>(value);
  }
}

template <class T>
T integer_power(T base, T exponent) {
  if constexpr (std::is_signed_v<T>) {
    if (exponent < 0) return base == 1 ? T(1) : base == -1 ? (exponent % 2 == 0 ? T(1) : T(-1)) : T(0);
  }
  using U = std::make_unsigned_t<T>;
  std::uint64_t result = 1, factor = static_cast<U>(base), rest = static_cast<U>(exponent);
  for (; rest != 0; rest >>= 1) {
    if ((rest & 1) != 0) result *= factor;
    factor *= factor;
  }
  return static_cast<T>(result);
}

template <class T, class Out = T, class Fn>
void map(const Binary& p, Fn&& fn) {
  map_binary(p.space, static_cast<Out*>(p.out), static_cast<const T*>(p.a.data), static_cast<const T*>(p.b.data), fn);
}

template <class T, class Out, class Fn>
void map(const Unary& p, Fn&& fn) {
  map_unary(p.space, static_cast<Out*>(p.out), static_cast<const T*>(p.input), fn);
}

void add(const Binary& p) {
  dispatch_number("add", p.dtype, [&]<class T>() {
    const auto factor = widen<T>(p.alpha);
    map<T>(p, [factor](T x, T y) {
      if constexpr (std::is_same_v<T, bool>) {
        return x || (factor && y);
      } else {
        return static_cast<T>(x + factor * y);
      }
    });
  });
}

void multiply(const Binary& p) {
  dispatch_number("mul", p.dtype, [&]<class T>() {
    map<T>(p, [](T x, T y) {
      if constexpr (std::is_same_v<T, bool>) {
        return x && y;
      } else {
        return static_cast<T>(x * y);
      }
    });
  });
}

void power(const Binary& p) {
  dispatch_number("pow", p.dtype, [&]<class T>() {
    if constexpr (!std::is_same_v<T, bool>) {
      map<T>(p, [](T x, T y) {
        if constexpr (std::is_integral_v<T>) {
          return integer_power(x, y);
        } else if constexpr (kIsComplex<T>) {
          return std::pow(x, y);
        } else {
          return static_cast<T>(std::pow(static_cast<compute_t<T>>(x), static_cast<compute_t<T>>(y)));
        }
      });
    }
  });
}

void gcd(const Binary& p) {
  dispatch_real("gcd", p.dtype, [&]<class T>() {
    if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
      map<T>(p, [](T x, T y) {
        using U = std::make_unsigned_t<T>;
        const U ux = x < T(0) ? static_cast<U>(U(0) - static_cast<U>(x)) : static_cast<U>(x);
        const U uy = y < T(0) ? static_cast<U>(U(0) - static_cast<U>(y)) : static_cast<U>(y);
        return static_cast<T>(std::gcd(ux, uy));
      });
    }
  });
}

template <class T>
void polar(const Binary& p) {
  map<T, std::complex<T>>(p, [](T r, T phi) { return std::complex<T>(r * std::cos(phi), r * std::sin(phi)); });
}

// NaN wins; the first of equals.
template <class T>
T larger(T best, T value) {
  const compute_t<T> wide = value;
  return wide != wide || static_cast<compute_t<T>>(best) < wide ? value : best;
}

}  // namespace

void absolute(const Unary& p) {
  dispatch_number("abs", p.dtype, [&]<class T>() {
    if constexpr (kIsComplex<T>) {
      map<T, typename T::value_type>(p, [](T x) { return std::abs(x); });
    } else if constexpr (std::is_unsigned_v<T>) {
      if (p.space.contiguous()) {
        std::memcpy(p.out, p.input, static_cast<std::size_t>(p.space.numel) * sizeof(T));
      } else {
        map<T, T>(p, [](T x) { return x; });
      }
    } else if constexpr (std::is_integral_v<T>) {
      // The lowest value has no positive twin and stays, as in PyTorch.
      map<T, T>(p, [](T x) { return x < 0 ? static_cast<T>(-static_cast<std::make_unsigned_t<T>>(x)) : x; });
    } else {
      map<T, T>(p, [](T x) { return static_cast<T>(std::fabs(static_cast<compute_t<T>>(x))); });
    }
  });
}

void angle(const Unary& p) {
  dispatch_number("angle", p.dtype, [&]<class T>() {
    if constexpr (kIsComplex<T>) {
      map<T, typename T::value_type>(p, [](T x) { return std::arg(x); });
    } else if constexpr (std::is_integral_v<T>) {
      map<T, float>(p, [](T x) { return x < T(0) ? std::numbers::pi_v<float> : 0.0f; });
    } else {
      using Wide = compute_t<T>;
      map<T, T>(p, [](T x) {
        const Wide wide = static_cast<Wide>(x);
        return std::isnan(wide) ? x : static_cast<T>(wide < 0 ? std::numbers::pi_v<Wide> : Wide(0));
      });
    }
  });
}

void binary(const Binary& p) {
  switch (p.function) {
    case BinaryFunction::kAdd:
      return add(p);
    case BinaryFunction::kMultiply:
      return multiply(p);
    case BinaryFunction::kPower:
      return power(p);
    case BinaryFunction::kGcd:
      return gcd(p);
    case BinaryFunction::kPolar:
      return p.dtype == DType::kFloat32 ? polar<float>(p) : polar<double>(p);
  }
}

void amax(std::span<const std::int64_t> sizes, std::span<const std::int64_t> out_strides,
          std::span<const std::int64_t> in_strides, std::int64_t out_numel, DType dtype, void* out, const void* input) {
  dispatch_real("amax", dtype, [&]<class T>() {
    using Limits = std::numeric_limits<compute_t<T>>;
    T* const to = static_cast<T*>(out);
    const T* const from = static_cast<const T*>(input);
    std::fill_n(to, out_numel, static_cast<T>(Limits::has_infinity ? -Limits::infinity() : Limits::lowest()));
    // The input's order of dimensions: rows of the result are updated together.
    const StridedLoop<2> loop(sizes, {out_strides, in_strides}, true);
    const auto step = loop.inner();
    // One thread: several elements meet in one place.
    loop.run_serial([&](const std::array<std::int64_t, 2>& at, std::int64_t n) {
      T* const row = to + at[0];
      const T* const values = from + at[1];
      if (step[0] == 0) {
        T best = *row;
        for (std::int64_t i = 0; i < n; ++i) best = larger(best, values[i * step[1]]);
        *row = best;
        return;
      }
      for (std::int64_t i = 0; i < n; ++i) {
        T& best = row[i * step[0]];
        best = larger(best, values[i * step[1]]);
      }
    });
  });
}

}  // namespace untorch::kernels::cpu
