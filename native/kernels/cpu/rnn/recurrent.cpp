// A recurrent layer in one direction: one packed GEMM for the input's share of all steps, then the hidden state's share
// and the cells, step by step. Each thread has some hidden units for the whole layer, whose weights stay in its L2, and
// waits for the others once a step.
//
// Few rows are one pass over the weights with the cells in registers (recurrent.isa.cpp); more rows, and hidden sizes
// that are no multiple of a panel, are a packed GEMM and the cells behind it.
#include <omp.h>

#include <algorithm>

#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/gemm/gemm_levels.h"
#include "kernels/cpu/rnn/recurrent_levels.h"
#include "kernels/rnn.h"

namespace untorch::kernels::cpu {
namespace {

// Operations of a step for which one more thread is worth its waiting.
constexpr double kOperationsPerThread = 1e5;

int threads_of(const RecurrentLayer& p, std::int64_t gates) {
  if (omp_in_parallel() || p.hidden % kPackWidth != 0) return 1;  // threads divide whole panels of w_hidden
  const double operations = 2.0 * static_cast<double>(p.batch * gates) * static_cast<double>(p.hidden);
  const std::int64_t panels = p.hidden / kPackWidth;
  return static_cast<int>(std::clamp<std::int64_t>(static_cast<std::int64_t>(operations / kOperationsPerThread), 1,
                                                   std::min<std::int64_t>(omp_get_max_threads(), panels)));
}

// Whether all rows' sums of a step fit into registers, and every gate begins with a panel.
bool is_narrow(const RecurrentLayer& p) {
  return p.hidden % kPackWidth == 0 && p.batch <= UNTORCH_ISA_CALL(recurrent_rows)();
}

std::int64_t panels_of(const RecurrentLayer& p) { return (gates_of(p.cell) * p.hidden + kPackWidth - 1) / kPackWidth; }

// The elements that bfloat16 weights of the hidden state take as float32, if the packed GEMM has to have them so. The
// pair that an odd row ends with is half padding, which the next panel overwrites.
std::int64_t widened(const RecurrentLayer& p) {
  return !p.hidden_is_bfloat16 || is_narrow(p) ? 0 : (panels_of(p) * p.hidden + 1) * kPackWidth;
}

void widen(const RecurrentLayer& p, float* out) {
  const std::int64_t pairs = (p.hidden + 1) / 2;
  const auto* const packed = static_cast<const std::uint32_t*>(p.w_hidden);
  for (std::int64_t i = 0; i < panels_of(p); ++i) {
    UNTORCH_ISA_CALL(widen_panel)(pairs, packed + i * pairs * kPackWidth, out + i * p.hidden * kPackWidth);
  }
}

// Step `index` of all units [u0, u1), for few rows.
void narrow_step(const RecurrentLayer& p, std::int64_t index, std::int64_t t, std::int64_t u0, std::int64_t u1,
                 const float* from_input, const float* now, float* next) {
  UNTORCH_ISA_CALL(recurrent_step)
  ({.cell = p.cell,
    .bfloat16 = p.hidden_is_bfloat16,
    .backward = index % 2 == 1,
    .step = t,
    .rows = p.batch,
    .hidden = p.hidden,
    .first = u0,
    .last = u1,
    .w_hidden = p.w_hidden,
    .bias = p.bias_hidden,
    .from_input = from_input + t * p.batch * gates_of(p.cell) * p.hidden,
    .now = now,
    .cell_state = p.cell_state,
    .next = next,
    .output = p.output + t * p.batch * p.hidden,
    .lengths = p.lengths});
}

// Hidden units [u0, u1) in step t, from the states `now` to the states `next`.
void step(const RecurrentLayer& p, const float* w_hidden, std::int64_t t, std::int64_t u0, std::int64_t u1,
          const float* from_input, float* from_hidden, const float* now, float* next) {
  const std::int64_t hidden = p.hidden, gates = gates_of(p.cell), width = gates * hidden;
  // All units at once where they are one thread's: the panels need not end with a gate.
  const bool all = u1 - u0 == hidden;
  const std::int64_t pieces = all ? 1 : gates, columns = all ? width : u1 - u0;
  for (std::int64_t g = 0; g < pieces; ++g) {
    const std::int64_t first = g * hidden + u0;
    UNTORCH_ISA_CALL(packed_slice)
    (p.batch, columns, hidden, p.batch, now, hidden, w_hidden + first * hidden,
     p.bias_hidden == nullptr ? nullptr : p.bias_hidden + first, Epilogue{}, nullptr, 0, from_hidden + first, width);
  }
  for (std::int64_t n = 0; n < p.batch; ++n) {
    const std::int64_t own = n * hidden + u0;
    float* const out = p.output + t * p.batch * hidden + own;
    if (p.lengths != nullptr && t >= p.lengths[n]) {
      std::fill_n(out, u1 - u0, 0.0f);
      std::copy_n(now + own, u1 - u0, next + own);
      continue;
    }
    UNTORCH_ISA_CALL(recurrent_cell)
    (p.cell, u1 - u0, hidden, from_input + (t * p.batch + n) * width + u0, from_hidden + n * width + u0, now + own,
     p.cell_state == nullptr ? nullptr : p.cell_state + own, next + own, out);
  }
}

}  // namespace

std::int64_t recurrent_workspace(const RecurrentLayer& layer) {
  return layer.batch * ((layer.steps + 1) * gates_of(layer.cell) + 1) * layer.hidden + widened(layer);
}

void recurrent_layer(const RecurrentLayer& p) {
  const std::int64_t gates = gates_of(p.cell) * p.hidden, state = p.batch * p.hidden;
  if (state == 0 || p.steps == 0) return;
  float* const from_input = p.workspace;
  float* const from_hidden = from_input + p.steps * p.batch * gates;
  float* const states[2] = {p.hidden_state, from_hidden + p.batch * gates};
  kernels::gemm_packed(p.steps * p.batch, gates, p.inputs, p.input, p.inputs, p.w_input, p.bias_input, Epilogue{},
                       nullptr, 0, from_input, gates);
  const bool narrow = is_narrow(p);
  const auto* w_hidden = static_cast<const float*>(p.w_hidden);
  if (const std::int64_t count = widened(p); count > 0) {
    float* const wide = states[1] + state;
    widen(p, wide);
    w_hidden = wide;
  }
  const int threads = threads_of(p, gates);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const std::int64_t count = omp_get_num_threads(), index = omp_get_thread_num();
    const std::int64_t panels = p.hidden / kPackWidth;
    const std::int64_t u0 = count == 1 ? 0 : panels * index / count * kPackWidth;
    const std::int64_t u1 = count == 1 ? p.hidden : panels * (index + 1) / count * kPackWidth;
    for (std::int64_t i = 0; i < p.steps; ++i) {
      const std::int64_t t = p.reverse ? p.steps - 1 - i : i;
      if (narrow) {
        narrow_step(p, i, t, u0, u1, from_input, states[i % 2], states[(i + 1) % 2]);
      } else {
        step(p, w_hidden, t, u0, u1, from_input, from_hidden, states[i % 2], states[(i + 1) % 2]);
      }
      if (count > 1) {
#pragma omp barrier
      }
    }
  }
  if (p.steps % 2 == 1) std::copy_n(states[1], state, p.hidden_state);
}

}  // namespace untorch::kernels::cpu
