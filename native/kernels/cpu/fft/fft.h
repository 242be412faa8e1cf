// Discrete Fourier transforms of one dimension: mixed radix for lengths of 2, 3 and 5, Bluestein's chirp for the rest.
#pragma once

#include <complex>
#include <cstdint>
#include <memory>
#include <vector>

namespace untorch::kernels {

// y[k] = sum over j of x[j] * exp(∓2πi jk / length), not scaled. T is float or double; tables are made in double.
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
  std::vector<std::int64_t> radices_;      // empty when the length has another prime factor
  std::vector<std::complex<T>> twiddles_;  // exp(∓2πi j / length)
  std::vector<std::complex<T>> chirp_;     // exp(∓πi j² / length)
  std::vector<std::complex<T>> filter_;    // transform of the conjugate chirp, over the padded length
  std::unique_ptr<Fft<T>> ahead_, back_;   // of the padded length, a power of two
};

}  // namespace untorch::kernels
