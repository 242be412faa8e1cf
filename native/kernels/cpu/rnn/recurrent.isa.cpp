// Cells of recurrent layers: gates through the library's vector mathematics, a row at a time.
#include "kernels/cpu/rnn/recurrent_levels.h"

#include "kernels/cpu/gemm/gemm_micro.h"
#include "kernels/cpu/vecmath/inline.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

using V = Vector<float>;
constexpr int N = kLanes<float>;

[[gnu::always_inline]] inline V relu(V x) { return x < 0.0f ? V{} : x; }  // NaN stays NaN

// The values from `at` on; those behind `count` are 0 and are not written.
[[gnu::always_inline]] inline V take(const float* at, std::int64_t count) {
  if (count >= N) return load(at);
  float part[N] = {};
  for (std::int64_t i = 0; i < count; ++i) part[i] = at[i];
  return load(part);
}
[[gnu::always_inline]] inline void put(float* at, V v, std::int64_t count) {
  if (count >= N) return store(at, v);
  float part[N];
  store(part, v);
  for (std::int64_t i = 0; i < count; ++i) at[i] = part[i];
}

}  // namespace

void recurrent_cell(RecurrentCell kind, std::int64_t count, std::int64_t gate_stride, const float* x, const float* h,
                    const float* hidden, float* cell, float* next, float* output) {
  using vecmath::vsigmoid;
  using vecmath::vtanh;
  for (std::int64_t i = 0; i < count; i += N) {
    const std::int64_t left = count - i;
    const auto gate = [&](std::int64_t g) __attribute__((always_inline)) {
      return take(x + g * gate_stride + i, left) + take(h + g * gate_stride + i, left);
    };
    V result;
    switch (kind) {
      case RecurrentCell::kTanh:
        result = vtanh(gate(0));
        break;
      case RecurrentCell::kRelu:
        result = relu(gate(0));
        break;
      case RecurrentCell::kLstm: {
        const V c = vsigmoid(gate(1)) * take(cell + i, left) + vsigmoid(gate(0)) * vtanh(gate(2));
        put(cell + i, c, left);
        result = vsigmoid(gate(3)) * vtanh(c);
        break;
      }
      case RecurrentCell::kGru: {
        const V reset = vsigmoid(gate(0)), update = vsigmoid(gate(1));
        const V fresh = vtanh(take(x + 2 * gate_stride + i, left) + reset * take(h + 2 * gate_stride + i, left));
        result = fresh + update * (take(hidden + i, left) - fresh);
        break;
      }
    }
    put(next + i, result, left);
    put(output + i, result, left);
  }
}

}  // namespace untorch::kernels::UNTORCH_ISA
