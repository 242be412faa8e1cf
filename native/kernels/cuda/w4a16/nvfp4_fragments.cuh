// NVFP4 to fragments: E2M1 codes and E4M3 block scales as pairs of bfloat16 or float16, in registers.
//
// A code's exponent and mantissa, three bits, put where T has its last two exponent bits and its first mantissa bit,
// are a T, subnormal for 0.5: its value times 2^(1 - bias of T). One multiplication takes that to the value and applies
// the block scale. scale_pair_of prepares scales for it, times 2^-kShift so that nothing leaves T's range; code · scale
// is exact, six significant bits. The global scale, applied to accumulators, makes up for the shift: kUnshift.
#pragma once

#include "kernels/cuda/common/half_pair.cuh"

namespace untorch::kernels::cuda {

// (b & mask) | (a & ~mask) in one lop3; the compiler would make two of it where it knows that bits are 0.
__device__ __forceinline__ std::uint32_t choose_bits(std::uint32_t a, std::uint32_t b, std::uint32_t mask) {
  std::uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xd8;" : "=r"(out) : "r"(a), "r"(b), "r"(mask));
  return out;
}

template <class T>
struct Nvfp4Values {
  static constexpr bool kHalf = std::is_same_v<T, __half>;
  static_assert(kHalf || std::is_same_v<T, __nv_bfloat16>);
  static constexpr int kShift = kHalf ? 8 : 10;
  static constexpr float kUnshift = kHalf ? 256.0f : 1024.0f;
  // Shifts of exponent and mantissa, and of the sign, of a nibble in bits 0 to 3.
  static constexpr int kUp = kHalf ? 9 : 6, kSignUp = 12;
  static constexpr std::uint32_t kMask = kHalf ? 0x0e000e00u : 0x01c001c0u, kSign = 0x80008000u;

  __device__ static __forceinline__ std::uint32_t product(std::uint32_t a, std::uint32_t b) {
    return bits_of_pair(__hmul2(pair_of_bits<T>(a), pair_of_bits<T>(b)));
  }

  // The codes in nibbles P and P + 4, the first in the lower half, times prepared scales.
  template <int P>
  __device__ static __forceinline__ std::uint32_t pair(std::uint32_t word, std::uint32_t scales) {
    constexpr int kTo = kUp - 4 * P, kSignTo = kSignUp - 4 * P;
    const std::uint32_t value = kTo >= 0 ? word << (kTo >= 0 ? kTo : 0) : word >> (kTo >= 0 ? 0 : -kTo);
    return product(value & kMask | (word << kSignTo) & kSign, scales);
  }

  // The four pairs of a word, unscaled: the codes in nibbles p and p + 4. Exponents and mantissas of two nibbles at a
  // time are moved beside their signs: most of the instructions that dequantize are here.
  __device__ static __forceinline__ void codes(std::uint32_t word, std::uint32_t (&pairs)[4]) {
    constexpr std::uint32_t kBits = kMask | kSign;
    if constexpr (kHalf) {
      constexpr std::uint32_t kSigns = 0x80808080u;
      const std::uint32_t odd = choose_bits(word >> 3, word, kSigns), even = choose_bits(word << 1, word << 4, kSigns);
      pairs[0] = (even << 8) & kBits, pairs[1] = (odd << 8) & kBits;
      pairs[2] = even & kBits, pairs[3] = odd & kBits;
    } else {
      constexpr std::uint32_t kSigns = 0x88008800u;
      const std::uint32_t high = choose_bits(word >> 6, word, kSigns), low = choose_bits(word << 2, word << 8, kSigns);
      pairs[0] = (low << 4) & kBits, pairs[1] = low & kBits;
      pairs[2] = (high << 4) & kBits, pairs[3] = high & kBits;
    }
  }

  // Times the lower or the upper half of a prepared pair, broadcast.
  __device__ static __forceinline__ std::uint32_t times_lower(std::uint32_t pair, std::uint32_t scales) {
    if constexpr (kHalf) {
      return bits_of_pair(__hmul2(pair_of_bits<T>(pair), __low2half2(pair_of_bits<T>(scales))));
    } else {
      return bits_of_pair(__hmul2(pair_of_bits<T>(pair), __low2bfloat162(pair_of_bits<T>(scales))));
    }
  }
  __device__ static __forceinline__ std::uint32_t times_upper(std::uint32_t pair, std::uint32_t scales) {
    if constexpr (kHalf) {
      return bits_of_pair(__hmul2(pair_of_bits<T>(pair), __high2half2(pair_of_bits<T>(scales))));
    } else {
      return bits_of_pair(__hmul2(pair_of_bits<T>(pair), __high2bfloat162(pair_of_bits<T>(scales))));
    }
  }

  // Prepares two E4M3 scales, in bits 0 to 7 and 16 to 23, for `pair`, in the lower and the upper half.
  __device__ static __forceinline__ std::uint32_t scale_pair_of(std::uint32_t bytes) {
    const std::uint32_t sign = (bytes << 8) & kSign;
    if constexpr (kHalf) {  // e4m3·2^-8; by 2^14 for codes and 2^-8
      return product((bytes << 7) & 0x3f803f80u | sign, 0x74007400u);
    } else {  // e4m3·2^-120; by 2^126 for codes, 2^120 and 2^-10, more than one T can be
      return product(product((bytes << 4) & 0x07f007f0u | sign, 0x7a807a80u), 0x7a807a80u);
    }
  }
};

}  // namespace untorch::kernels::cuda
