// Ordered compaction and repetition: one thread, in row-major order. Bytes: the flags once, and what is kept.
#include "kernels/compact.h"

#include <algorithm>

#include "base/dispatch.h"
#include "kernels/cpu/common/strided_loop.h"

namespace untorch::kernels::cpu {

std::vector<std::vector<std::int64_t>> nonzero(const char* op, std::span<const std::int64_t> sizes, DType dtype,
                                               const void* values) {
  std::vector<std::vector<std::int64_t>> columns(sizes.size());
  std::int64_t n = 1;
  for (const std::int64_t size : sizes) n *= size;
  std::vector<std::int64_t> index(columns.size(), 0);
  dispatch_number(op, dtype, [&]<class T>() {
    const T* from = static_cast<const T*>(values);
    for (std::int64_t i = 0; i < n; ++i) {
      bool set;
      if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>) {
        set = static_cast<float>(from[i]) != 0.0f;
      } else {
        set = from[i] != T(0);
      }
      if (set) {
        for (std::size_t d = 0; d < columns.size(); ++d) columns[d].push_back(index[d]);
      }
      for (std::size_t d = columns.size(); d-- > 0;) {
        if (++index[d] < sizes[d]) break;
        index[d] = 0;
      }
    }
  });
  return columns;
}

std::int64_t count_set(const std::uint8_t* flags, std::int64_t n) {
  return std::count_if(flags, flags + n, [](std::uint8_t flag) { return flag != 0; });
}

void masked_select(DType dtype, const std::uint8_t* flags, const void* values, std::int64_t n, void* out) {
  dispatch_width("masked_select", dtype, [&]<class T>() {
    const T* from = static_cast<const T*>(values);
    T* to = static_cast<T*>(out);
    for (std::int64_t i = 0; i < n; ++i) {
      if (flags[i] != 0) *to++ = from[i];
    }
  });
}

void masked_scatter(const Strided<2>& space, DType dtype, const std::uint8_t* flags, const void* source, void* out) {
  const StridedLoop<2> loop(space);
  const auto step = loop.inner();
  dispatch_width("masked_scatter", dtype, [&]<class T>() {
    const T* from = static_cast<const T*>(source);
    T* to = static_cast<T*>(out);
    loop.run_serial([&](const std::array<std::int64_t, 2>& at, std::int64_t count) {
      for (std::int64_t i = 0; i < count; ++i) {
        if (flags[at[0] + i * step[0]] != 0) to[at[1] + i * step[1]] = *from++;
      }
    });
  });
}

CountSum sum_counts(const void* counts, DType dtype, std::int64_t n, std::int64_t step) {
  CountSum out;
  dispatch_index("repeat_interleave", dtype, [&]<class T>() {
    const T* from = static_cast<const T*>(counts);
    for (std::int64_t i = 0; i < n; ++i) {
      if (from[i * step] < 0) {
        out.negative = from[i * step];
        out.negative_at = i;
        return;
      }
      out.total += from[i * step];
    }
  });
  return out;
}

void expand_rows(const void* counts, DType dtype, std::int64_t n, std::int64_t step, void* out) {
  dispatch_index("repeat_interleave", dtype, [&]<class T>() {
    const T* from = static_cast<const T*>(counts);
    T* to = static_cast<T*>(out);
    for (std::int64_t i = 0; i < n; ++i) to = std::fill_n(to, from[i * step], static_cast<T>(i));
  });
}

}  // namespace untorch::kernels::cpu
