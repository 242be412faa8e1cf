// Fourier transforms along lanes: Stockham's self-sorting passes of mixed radix, Bluestein's convolution for lengths
// with a prime factor above 5.
//
// A pass of radix r over n = r * m * l values reads x[j + m*(q + …)] and writes in transposed order, so that no bit
// reversal is needed: 5 n log2 n operations, n complex values read and written a pass. A lane is gathered into scratch
// of its thread, transformed there, and scattered back.
#include "kernels/fft.h"

#include <cmath>
#include <complex>
#include <map>
#include <memory>
#include <mutex>
#include <numbers>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "kernels/cpu/common/parallel_items.h"

namespace untorch::kernels::cpu {
namespace {

// One length and direction: y[k] = sum over j of x[j] * exp(∓2πi jk / length), not scaled. T is float or double; tables
// are made in double.
template <class T>
class Fft {
 public:
  Fft(std::int64_t length, bool forward);

  std::int64_t length() const noexcept { return length_; }
  // Complex values that run() needs as scratch.
  std::int64_t scratch_size() const noexcept;
  // Transforms data[0 .. length) in place. Safe to call from several threads, each with its own scratch.
  void run(std::complex<T>* data, std::complex<T>* scratch) const;

 private:
  void mixed_radix(std::complex<T>* data, std::complex<T>* scratch) const;
  void bluestein(std::complex<T>* data, std::complex<T>* scratch) const;

  std::int64_t length_;
  bool forward_;
  std::vector<std::int64_t> radices_;                        // empty when the length has another prime factor
  std::vector<std::complex<T>> twiddles_;                    // exp(∓2πi j / length)
  std::vector<std::complex<T>> chirp_;                       // exp(∓πi j² / length)
  std::vector<std::complex<T>> filter_;                      // transform of the conjugate chirp, over the padded length
  std::unique_ptr<Fft<T>> padded_forward_, padded_inverse_;  // of the padded length, a power of two
};

std::complex<double> unit(std::int64_t numerator, std::int64_t denominator, bool forward) {
  const double angle = 2.0 * std::numbers::pi * static_cast<double>(numerator) / static_cast<double>(denominator);
  return {std::cos(angle), forward ? -std::sin(angle) : std::sin(angle)};
}

// Written out: std::complex's operator checks for infinities.
template <class T>
std::complex<T> multiply(std::complex<T> a, std::complex<T> b) {
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
      for (std::int64_t p = 1; p < radix; ++p) out[k + done * p] = multiply(v[p], turn[p]);
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
  padded_forward_ = std::make_unique<Fft<T>>(padded, true);
  padded_inverse_ = std::make_unique<Fft<T>>(padded, false);
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
  return padded_forward_ == nullptr ? length_ : padded_forward_->length() + padded_forward_->scratch_size();
}

template <class T>
void Fft<T>::run(std::complex<T>* data, std::complex<T>* scratch) const {
  if (length_ < 2) return;
  if (padded_forward_ == nullptr) {
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
  const std::int64_t padded = padded_forward_->length();
  std::complex<T>*a = scratch, *rest = scratch + padded;
  for (std::int64_t j = 0; j < length_; ++j) a[j] = multiply(data[j], chirp_[static_cast<std::size_t>(j)]);
  for (std::int64_t j = length_; j < padded; ++j) a[j] = 0;
  padded_forward_->run(a, rest);
  for (std::int64_t j = 0; j < padded; ++j) a[j] = multiply(a[j], filter_[static_cast<std::size_t>(j)]);
  padded_inverse_->run(a, rest);
  for (std::int64_t j = 0; j < length_; ++j) data[j] = multiply(a[j], chirp_[static_cast<std::size_t>(j)]);
}

// The tables of a length, kept for the next call; making them costs more than a short transform.
template <class T>
std::shared_ptr<const Fft<T>> plan_for(std::int64_t length, bool forward) {
  constexpr std::size_t kKept = 64;
  static fork::Mutex mutex;
  // Never destroyed: threads may run when the process exits.
  static auto& plans = *new std::map<std::pair<std::int64_t, bool>, std::shared_ptr<const Fft<T>>>;
  const std::lock_guard lock(mutex);
  auto& plan = plans[{length, forward}];
  if (plan == nullptr) plan = std::make_shared<const Fft<T>>(length, forward);
  const auto kept = plan;
  if (plans.size() > kKept) plans.clear();
  return kept;
}

template <class T>
void transform(const Lanes<1>& lanes, bool forward, T factor, std::complex<T>* data) {
  const std::int64_t length = lanes.n, stride = lanes.step[0];
  const auto shared = plan_for<T>(length, forward);
  const Fft<T>& plan = *shared;
  const double work = static_cast<double>(lanes.rows.numel) * static_cast<double>(length) * 10;
  for_each_item_grained(lanes.rows.numel, 4096 / length + 1, work > kParallelWork, [&](std::int64_t lane) {
    thread_local std::vector<std::complex<T>> buffer;
    buffer.resize(static_cast<std::size_t>(length + plan.scratch_size()));
    std::int64_t rest = lane, offset = 0;
    for (int d = 0; d < lanes.rows.ndim; ++d) {
      offset += rest % lanes.rows.sizes[d] * lanes.rows.strides[0][d];
      rest /= lanes.rows.sizes[d];
    }
    std::complex<T>* row = buffer.data();
    for (std::int64_t i = 0; i < length; ++i) row[i] = data[offset + i * stride];
    plan.run(row, row + length);
    for (std::int64_t i = 0; i < length; ++i) data[offset + i * stride] = row[i] * factor;
  });
}

}  // namespace

void fft(const Lanes<1>& lanes, bool forward, double factor, DType dtype, void* data) {
  if (dtype == DType::kComplex64) {
    transform(lanes, forward, static_cast<float>(factor), static_cast<std::complex<float>*>(data));
  } else {
    transform(lanes, forward, factor, static_cast<std::complex<double>*>(data));
  }
}

}  // namespace untorch::kernels::cpu
