// A step of a recurrent layer: the GEMV of the hidden state with all gates of some units, then their cells, in
// registers.
//
//   for 32 units (LSTM, GRU; 128 of the cells with one gate)
//     for k                 h[k] · W[k, the units' panels of every gate]     8 sums of 16 lanes a row
//     cell                  gates through the library's vector mathematics
//
// A step reads the weights once, from L2 where they fit: 32 bytes a cycle. Steps go through the units forwards and
// backwards in turns, so that of weights a little larger than L2 the greater part is still there.
#include "kernels/cpu/rnn/recurrent_levels.h"

#include <type_traits>

#include "kernels/cpu/gemm/gemm_micro.h"
#include "kernels/cpu/gemm/half_vector.h"
#include "kernels/cpu/vecmath/inline.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

using cpu::RecurrentStep;
using V = Vector<float>;
constexpr int N = kLanes<float>;
constexpr int P = kPanel<float>;
#if defined(__AVX512F__)
constexpr int kRows = 3, kSums = 8;  // sums of a row, in panels
#else
constexpr int kRows = 1, kSums = 4;
#endif

[[gnu::always_inline]] inline V relu(V x) { return vecmath::at_least(x, V{}); }

// The new hidden state of a vector of units. x(g) and h(g): a gate's share of the input and of the hidden state.
template <RecurrentCell K, class X, class H>
[[gnu::always_inline]] inline V cell(X&& x, H&& h, V hidden, V& memory) {
  using vecmath::vsigmoid;
  using vecmath::vtanh;
  if constexpr (K == RecurrentCell::kTanh) {
    return vtanh(x(0) + h(0));
  } else if constexpr (K == RecurrentCell::kRelu) {
    return relu(x(0) + h(0));
  } else if constexpr (K == RecurrentCell::kLstm) {
    memory = vsigmoid(x(1) + h(1)) * memory + vsigmoid(x(0) + h(0)) * vtanh(x(2) + h(2));
    return vsigmoid(x(3) + h(3)) * vtanh(memory);
  } else {
    const V reset = vsigmoid(x(0) + h(0)), update = vsigmoid(x(1) + h(1));
    const V fresh = vtanh(x(2) + reset * h(2));
    return fresh + update * (hidden - fresh);
  }
}

// sums[i][w] += a row's hidden state times the panels of `gates` gates, which lie gate_step apart, U side by side.
template <bool kHalf, int MR, int G, int U>
[[gnu::always_inline]] inline void add_products(const RecurrentStep& s, std::int64_t u,
                                                V (&sums)[MR][G * U * kVectorsPerPanel]) {
  using Word = std::conditional_t<kHalf, std::uint32_t, float>;
  constexpr int W = G * U * kVectorsPerPanel;
  const std::int64_t count = kHalf ? s.hidden / 2 : s.hidden, panel_step = count * P;
  const std::int64_t gate_step = s.hidden / P * panel_step;
  const Word* from[G];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) from[g] = static_cast<const Word*>(s.w_hidden) + u / P * panel_step + g * gate_step;
  const float* now = s.now;
  const std::int64_t hidden = s.hidden;
  for (std::int64_t k = 0; k < count; ++k) {
    const Word* at[W];
#pragma GCC unroll 32
    for (int w = 0; w < W; ++w) {
      constexpr int kEach = U * kVectorsPerPanel;
      at[w] = from[w / kEach] + w % kEach / kVectorsPerPanel * panel_step + w % kVectorsPerPanel * N;
    }
#pragma GCC unroll 8
    for (int p = 0; p < G * U; ++p) __builtin_prefetch(at[p * kVectorsPerPanel] + kPrefetchSteps * P);
    if constexpr (kHalf) {
#pragma GCC unroll 32
      for (int w = 0; w < W; ++w) {
        V even, odd;
        widen_pairs<HalfType::kBFloat16>(load_words<V>(at[w]), even, odd);
#pragma GCC unroll 3
        for (int i = 0; i < MR; ++i) {
          sums[i][w] += (now[i * hidden + 2 * k] - V{}) * even;
          sums[i][w] += (now[i * hidden + 2 * k + 1] - V{}) * odd;
        }
      }
    } else {
#pragma GCC unroll 32
      for (int w = 0; w < W; ++w) {
        const V row = load(at[w]);
#pragma GCC unroll 3
        for (int i = 0; i < MR; ++i) sums[i][w] += (now[i * hidden + k] - V{}) * row;
      }
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) from[g] += P;
  }
}

// U panels of hidden units from u on.
template <RecurrentCell K, bool kHalf, int MR, int U>
[[gnu::noinline]] void units(const RecurrentStep& s, std::int64_t u) {
  constexpr int G = static_cast<int>(gates_of(K)), kEach = U * kVectorsPerPanel;
  V sums[MR][G * kEach] = {};
  add_products<kHalf, MR, G, U>(s, u, sums);
  for (int i = 0; i < MR; ++i) {
    const std::int64_t own = i * s.hidden + u;
    const bool over = s.lengths != nullptr && s.step >= s.lengths[i];
    const float* const input = s.from_input + i * G * s.hidden + u;
#pragma GCC unroll 16
    for (int j = 0; j < kEach; ++j) {
      const std::int64_t at = own + j * N;
      if (over) {
        store(s.next + at, load(s.now + at));
        store(s.output + at, V{});
        continue;
      }
      const auto x = [&](int g) __attribute__((always_inline)) { return load(input + g * s.hidden + j * N); };
      const auto h = [&](int g) __attribute__((always_inline)) {
        const V sum = sums[i][g * kEach + j];
        return s.bias == nullptr ? sum : sum + load(s.bias + g * s.hidden + u + j * N);
      };
      V memory = K == RecurrentCell::kLstm ? load(s.cell_state + at) : V{};
      const V result = cell<K>(x, h, load(s.now + at), memory);
      if constexpr (K == RecurrentCell::kLstm) store(s.cell_state + at, memory);
      store(s.next + at, result);
      store(s.output + at, result);
    }
  }
}

template <RecurrentCell K, bool kHalf, int MR>
void all_units(const RecurrentStep& s) {
  constexpr int G = static_cast<int>(gates_of(K)), U = kSums / G < 1 ? 1 : kSums / G;
  const std::int64_t panels = (s.last - s.first) / P, groups = panels / U;
  if (s.backward) {
    for (std::int64_t p = panels; p-- > groups * U;) units<K, kHalf, MR, 1>(s, s.first + p * P);
  }
  for (std::int64_t n = 0; n < groups; ++n) {
    units<K, kHalf, MR, U>(s, s.first + (s.backward ? groups - 1 - n : n) * U * P);
  }
  if (!s.backward) {
    for (std::int64_t p = groups * U; p < panels; ++p) units<K, kHalf, MR, 1>(s, s.first + p * P);
  }
}

template <RecurrentCell K>
void of_rows(const RecurrentStep& s) {
  if (s.rows == 1) return s.bfloat16 ? all_units<K, true, 1>(s) : all_units<K, false, 1>(s);
  if constexpr (kRows > 1) {
    if (s.rows == 2) return s.bfloat16 ? all_units<K, true, 2>(s) : all_units<K, false, 2>(s);
    if (s.rows == 3) return s.bfloat16 ? all_units<K, true, 3>(s) : all_units<K, false, 3>(s);
  }
}

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

template <RecurrentCell K>
void cells(std::int64_t count, std::int64_t gate_stride, const float* from_input, const float* from_hidden,
           const float* hidden, float* cell_state, float* next, float* output) {
  for (std::int64_t i = 0; i < count; i += N) {
    const std::int64_t left = count - i;
    const auto x = [&](std::int64_t g) __attribute__((always_inline)) {
      return take(from_input + g * gate_stride + i, left);
    };
    const auto h = [&](std::int64_t g) __attribute__((always_inline)) {
      return take(from_hidden + g * gate_stride + i, left);
    };
    V memory = K == RecurrentCell::kLstm ? take(cell_state + i, left) : V{};
    const V result = cell<K>(x, h, take(hidden + i, left), memory);
    if constexpr (K == RecurrentCell::kLstm) put(cell_state + i, memory, left);
    put(next + i, result, left);
    put(output + i, result, left);
  }
}

}  // namespace

std::int64_t recurrent_rows() { return kRows; }

void recurrent_step(const RecurrentStep& s) {
  switch (s.cell) {
    case RecurrentCell::kTanh:
      return of_rows<RecurrentCell::kTanh>(s);
    case RecurrentCell::kRelu:
      return of_rows<RecurrentCell::kRelu>(s);
    case RecurrentCell::kLstm:
      return of_rows<RecurrentCell::kLstm>(s);
    case RecurrentCell::kGru:
      return of_rows<RecurrentCell::kGru>(s);
  }
}

void recurrent_cell(RecurrentCell kind, std::int64_t count, std::int64_t gate_stride, const float* x, const float* h,
                    const float* hidden, float* cell, float* next, float* output) {
  switch (kind) {
    case RecurrentCell::kTanh:
      return cells<RecurrentCell::kTanh>(count, gate_stride, x, h, hidden, cell, next, output);
    case RecurrentCell::kRelu:
      return cells<RecurrentCell::kRelu>(count, gate_stride, x, h, hidden, cell, next, output);
    case RecurrentCell::kLstm:
      return cells<RecurrentCell::kLstm>(count, gate_stride, x, h, hidden, cell, next, output);
    case RecurrentCell::kGru:
      return cells<RecurrentCell::kGru>(count, gate_stride, x, h, hidden, cell, next, output);
  }
}

void widen_panel(std::int64_t pairs, const void* packed, float* out) {
  const auto* from = static_cast<const std::uint32_t*>(packed);
  for (std::int64_t p = 0; p < pairs; ++p, from += P, out += 2 * P) {
    for (int j = 0; j < P; j += N) {
      V even, odd;
      widen_pairs<HalfType::kBFloat16>(load_words<V>(from + j), even, odd);
      store(out + j, even);
      store(out + P + j, odd);
    }
  }
}

}  // namespace untorch::kernels::UNTORCH_ISA
