// Fourier transforms: Stockham's self-sorting passes, radix by radix; Bluestein's convolution where no radix fits.
//
// A pass of radix r over n = r * m * l values reads x[j + m*(q + …)] and writes in transposed order, so that no bit
// reversal is needed: 5 n log2 n operations, n complex values read and written a pass.
#include "kernels/cpu/fft/fft.h"

#include <cmath>
#include <numbers>
#include <utility>

namespace untorch::kernels {
namespace {

std::complex<double> unit(std::int64_t numerator, std::int64_t denominator, bool forward) {
  const double angle = 2.0 * std::numbers::pi * static_cast<double>(numerator) / static_cast<double>(denominator);
  return {std::cos(angle), forward ? -std::sin(angle) : std::sin(angle)};
}

// Plain products: std::complex's operator checks for infinities.
template <class T>
std::complex<T> product(std::complex<T> a, std::complex<T> b) {
  return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
}

// i*a for the inverse transform, -i*a for the forward one.
template <class T>
std::complex<T> quarter_turn(std::complex<T> a, bool forward) {
  return forward ? std::complex<T>{a.imag(), -a.real()} : std::complex<T>{-a.imag(), a.real()};
}

template <class T, std::int64_t radix, bool forward>
void butterfly(std::complex<T>* v) {
  if constexpr (radix == 2) {
    const auto a = v[0], b = v[1];
    v[0] = a + b;
    v[1] = a - b;
  } else if constexpr (radix == 3) {
    constexpr T half_sqrt3 = static_cast<T>(0.86602540378443864676);
    const auto sum = v[1] + v[2], turned = quarter_turn(v[1] - v[2], forward) * half_sqrt3;
    const auto middle = v[0] - sum * static_cast<T>(0.5);
    v[0] += sum;
    v[1] = middle + turned;
    v[2] = middle - turned;
  } else if constexpr (radix == 4) {
    const auto a = v[0] + v[2], b = v[0] - v[2], c = v[1] + v[3], d = quarter_turn(v[1] - v[3], forward);
    v[0] = a + c;
    v[1] = b + d;
    v[2] = a - c;
    v[3] = b - d;
  } else {  // 5
    constexpr T c1 = static_cast<T>(0.30901699437494742410), c2 = static_cast<T>(-0.80901699437494742410);
    constexpr T s1 = static_cast<T>(0.95105651629515357212), s2 = static_cast<T>(0.58778525229247312917);
    const auto a1 = v[1] + v[4], a2 = v[2] + v[3], b1 = v[1] - v[4], b2 = v[2] - v[3];
    const auto m1 = v[0] + a1 * c1 + a2 * c2, m2 = v[0] + a1 * c2 + a2 * c1;
    const auto t1 = quarter_turn(b1 * s1 + b2 * s2, forward), t2 = quarter_turn(b1 * s2 - b2 * s1, forward);
    v[0] += a1 + a2;
    v[1] = m1 + t1;
    v[4] = m1 - t1;
    v[2] = m2 + t2;
    v[3] = m2 - t2;
  }
}

// One pass: `done` interleaved parts of transforms of length radix * m, from[k + done*j].
template <class T, std::int64_t radix, bool forward>
void pass(const std::complex<T>* from, std::complex<T>* to, std::int64_t done, std::int64_t m,
          const std::complex<T>* twiddles) {
  for (std::int64_t j = 0; j < m; ++j) {
    std::complex<T> turn[radix];
    for (std::int64_t p = 1; p < radix; ++p) turn[p] = twiddles[p * j * done];
    const std::complex<T>* in = from + done * j;
    std::complex<T>* out = to + done * radix * j;
    for (std::int64_t k = 0; k < done; ++k) {
      std::complex<T> v[radix];
      for (std::int64_t q = 0; q < radix; ++q) v[q] = in[k + done * m * q];
      butterfly<T, radix, forward>(v);
      out[k] = v[0];
      for (std::int64_t p = 1; p < radix; ++p) out[k + done * p] = product(v[p], turn[p]);
    }
  }
}

template <class T, bool forward>
void run_pass(std::int64_t radix, const std::complex<T>* from, std::complex<T>* to, std::int64_t done, std::int64_t m,
              const std::complex<T>* twiddles) {
  switch (radix) {
    case 2:
      return pass<T, 2, forward>(from, to, done, m, twiddles);
    case 3:
      return pass<T, 3, forward>(from, to, done, m, twiddles);
    case 4:
      return pass<T, 4, forward>(from, to, done, m, twiddles);
    default:
      return pass<T, 5, forward>(from, to, done, m, twiddles);
  }
}

}  // namespace

template <class T>
Fft<T>::Fft(std::int64_t length, bool forward) : length_(length), forward_(forward) {
  std::int64_t rest = length;
  for (const std::int64_t radix : {4, 2, 3, 5}) {
    while (rest % radix == 0 && rest > 1) {
      radices_.push_back(radix);
      rest /= radix;
    }
  }
  if (rest == 1) {
    twiddles_.resize(static_cast<std::size_t>(length));
    for (std::int64_t j = 0; j < length; ++j)
      twiddles_[static_cast<std::size_t>(j)] = std::complex<T>(unit(j, length, forward));
    return;
  }
  radices_.clear();
  std::int64_t padded = 1;
  while (padded < 2 * length - 1) padded *= 2;
  ahead_ = std::make_unique<Fft<T>>(padded, true);
  back_ = std::make_unique<Fft<T>>(padded, false);
  chirp_.resize(static_cast<std::size_t>(length));
  // The filter is made in double so that its rounding does not add to float's.
  std::vector<std::complex<double>> filter(static_cast<std::size_t>(padded));
  std::int64_t square = 0;  // j² modulo 2*length, kept small so that the angle stays exact
  for (std::int64_t j = 0; j < length; ++j) {
    const std::complex<double> turn = unit(square, 2 * length, forward);
    chirp_[static_cast<std::size_t>(j)] = std::complex<T>(turn);
    filter[static_cast<std::size_t>(j)] = std::conj(turn);
    if (j > 0) filter[static_cast<std::size_t>(padded - j)] = std::conj(turn);
    square = (square + 2 * j + 1) % (2 * length);
  }
  const Fft<double> wide(padded, true);
  std::vector<std::complex<double>> scratch(static_cast<std::size_t>(wide.scratch_size()));
  wide.run(filter.data(), scratch.data());
  filter_.resize(filter.size());
  for (std::size_t j = 0; j < filter.size(); ++j) filter_[j] = std::complex<T>(filter[j] / static_cast<double>(padded));
}

template <class T>
std::int64_t Fft<T>::scratch_size() const noexcept {
  return ahead_ == nullptr ? length_ : ahead_->length() + ahead_->scratch_size();
}

template <class T>
void Fft<T>::run(std::complex<T>* data, std::complex<T>* scratch) const {
  if (length_ < 2) return;
  if (ahead_ == nullptr) {
    mixed_radix(data, scratch);
  } else {
    bluestein(data, scratch);
  }
}

template <class T>
void Fft<T>::mixed_radix(std::complex<T>* data, std::complex<T>* scratch) const {
  // Before a pass the data are `done` interleaved parts of transforms of length `left`: x[k + done*j].
  std::complex<T>*from = data, *to = scratch;
  std::int64_t done = 1, left = length_;
  for (const std::int64_t radix : radices_) {
    const std::int64_t m = left / radix;
    if (forward_) {
      run_pass<T, true>(radix, from, to, done, m, twiddles_.data());
    } else {
      run_pass<T, false>(radix, from, to, done, m, twiddles_.data());
    }
    std::swap(from, to);
    done *= radix;
    left = m;
  }
  if (from != data) {
    for (std::int64_t j = 0; j < length_; ++j) data[j] = from[j];
  }
}

template <class T>
void Fft<T>::bluestein(std::complex<T>* data, std::complex<T>* scratch) const {
  const std::int64_t padded = ahead_->length();
  std::complex<T>*a = scratch, *rest = scratch + padded;
  for (std::int64_t j = 0; j < length_; ++j) a[j] = product(data[j], chirp_[static_cast<std::size_t>(j)]);
  for (std::int64_t j = length_; j < padded; ++j) a[j] = 0;
  ahead_->run(a, rest);
  for (std::int64_t j = 0; j < padded; ++j) a[j] = product(a[j], filter_[static_cast<std::size_t>(j)]);
  back_->run(a, rest);
  for (std::int64_t j = 0; j < length_; ++j) data[j] = product(a[j], chirp_[static_cast<std::size_t>(j)]);
}

template class Fft<float>;
template class Fft<double>;

}  // namespace untorch::kernels
