// The maximum of rows of bytes, a vector in registers over all rows: one load and one max a vector and row.
#include "kernels/cpu/w8a8/max_pool.h"

#include "kernels/cpu/gemm/gemm_micro.h"

namespace untorch::kernels::UNTORCH_ISA {

typedef std::uint8_t MaxBytes __attribute__((vector_size(kVectorBytes)));
typedef std::uint8_t LooseMaxBytes __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));

void max_bytes(const std::uint8_t* const* rows, std::int64_t count, std::int64_t n, std::uint8_t* out) {
  std::int64_t j = 0;
  for (; j + kVectorBytes <= n; j += kVectorBytes) {
    MaxBytes best = (MaxBytes) * reinterpret_cast<const LooseMaxBytes*>(rows[0] + j);
    for (std::int64_t r = 1; r < count; ++r) {
      const MaxBytes value = (MaxBytes) * reinterpret_cast<const LooseMaxBytes*>(rows[r] + j);
      best = value > best ? value : best;
    }
    *reinterpret_cast<LooseMaxBytes*>(out + j) = (LooseMaxBytes)best;
  }
  for (; j < n; ++j) {
    std::uint8_t best = rows[0][j];
    for (std::int64_t r = 1; r < count; ++r) best = rows[r][j] > best ? rows[r][j] : best;
    out[j] = best;
  }
}

}  // namespace untorch::kernels::UNTORCH_ISA
