// Rows of float32, bfloat16 or float16 as vectors of float32. Included by *.isa.cpp files only.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "kernels/cpu/gemm/half_vector.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

// `part` has zeros behind `count` elements; `put` writes `count` of them at most.
struct FloatElements {
  using type = float;
  static Vector<float> load(const float* p) { return UNTORCH_ISA::load(p); }
  static Vector<float> part(const float* p, std::int64_t count) {
    if (count >= kLanes<float>) return UNTORCH_ISA::load(p);
    float values[kLanes<float>] = {};
    for (std::int64_t i = 0; i < count; ++i) values[i] = p[i];
    return UNTORCH_ISA::load(values);
  }
  static void put(float* p, Vector<float> v, std::int64_t count) {
    if (count >= kLanes<float>) return store(p, v);
    float values[kLanes<float>];
    store(values, v);
    for (std::int64_t i = 0; i < count; ++i) p[i] = values[i];
  }
};
template <HalfType H>
struct HalfElements {
  using type = std::uint16_t;
  static Vector<float> load(const type* p) { return load_half<H>(p); }
  static Vector<float> part(const type* p, std::int64_t count) {
    return count >= kLanes<float> ? load_half<H>(p) : load_half_part<H>(p, count);
  }
  static void put(type* p, Vector<float> v, std::int64_t count) {
    if (count >= kLanes<float>) return store_half<H>(p, v);
    store_half_part<H>(p, v, count);
  }
};

template <class Fn>
void with_elements(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kBFloat16:
      return fn(HalfElements<HalfType::kBFloat16>{});
    case DType::kFloat16:
      return fn(HalfElements<HalfType::kFloat16>{});
    default:
      return fn(FloatElements{});
  }
}

}  // namespace
}  // namespace untorch::kernels::UNTORCH_ISA
