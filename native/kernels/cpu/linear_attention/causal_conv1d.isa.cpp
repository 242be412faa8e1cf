// A causal convolution of 256 channels of one sequence: inputs of 16 tokens and the width − 1 before them lie in a
// window of float32 rows; each output row is `width` fused multiply-adds a vector.
//
// Bound by reading x and writing out once.
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/common/elements.h"
#include "kernels/cpu/linear_attention/linear_attention_levels.h"
#include "kernels/cpu/vecmath/inline.h"
#include "kernels/linear_attention.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

using V = Vector<float>;
constexpr std::int64_t N = kLanes<float>;
constexpr std::int64_t C = kConvChannels;
constexpr std::int64_t kTokens = 16;  // of a window, which stays in L1

// One row of x, weight or bias as float32, zeros behind `count` channels.
template <class E>
void widen(const typename E::type* from, std::int64_t count, float* to) {
  std::int64_t c = 0;
  for (; c < count; c += N) store(to + c, E::part(from + c, count - c));
  for (; c < C; c += N) store(to + c, V{});
}

template <class E>
void item_of(const CausalConv1d& p, std::int64_t sequence, std::int64_t channel, float* memory) {
  using T = typename E::type;
  const std::int64_t count = p.channels - channel < C ? p.channels - channel : C, before = p.width - 1;
  float *const weights = memory, *const bias = weights + p.width * C, *const window = bias + C;
  const T* const weight = static_cast<const T*>(p.weight) + channel * p.width;
  for (std::int64_t i = 0; i < p.width; ++i) {
    for (std::int64_t c = 0; c < C; ++c) weights[i * C + c] = c < count ? E::part(weight + c * p.width + i, 1)[0] : 0;
  }
  const T* const added = static_cast<const T*>(p.bias);
  widen<E>(added == nullptr ? nullptr : added + channel, added == nullptr ? 0 : count, bias);
  float* const state = p.pool.state(sequence);
  const bool begins = state == nullptr || p.pool.begins(sequence);
  for (std::int64_t i = 0; i < before; ++i) {
    widen<FloatElements>(begins ? nullptr : state + i * p.channels + channel, begins ? 0 : count, window + i * C);
  }
  const std::int64_t end = p.pool.end(sequence);
  for (std::int64_t t = p.pool.begin(sequence); t < end; t += kTokens) {
    const std::int64_t tokens = end - t < kTokens ? end - t : kTokens;
    for (std::int64_t i = 0; i < tokens; ++i) {
      widen<E>(static_cast<const T*>(p.x) + (t + i) * p.x_token + channel, count, window + (before + i) * C);
    }
    for (std::int64_t i = 0; i < tokens; ++i) {
      T* const out = static_cast<T*>(p.out) + (t + i) * p.channels + channel;
      for (std::int64_t c = 0; c < count; c += N) {
        V sum = load(bias + c);
        for (std::int64_t j = 0; j < p.width; ++j) {
          sum += load(weights + j * C + c) * load(window + (i + j) * C + c);
        }
        E::put(out + c, p.silu ? vecmath::vsilu(sum) : sum, count - c);
      }
    }
    // The last inputs are what comes before the next ones; rows move towards the front, in order.
    for (std::int64_t i = 0; i < before * C; i += N) store(window + i, load(window + tokens * C + i));
  }
  if (state == nullptr) return;
  for (std::int64_t i = 0; i < before; ++i) {
    for (std::int64_t c = 0; c < count; c += N) {
      FloatElements::put(state + i * p.channels + channel + c, load(window + i * C + c), count - c);
    }
  }
}

}  // namespace

std::int64_t conv1d_workspace(const CausalConv1d& p) { return (p.width + 1 + p.width - 1 + kTokens) * C * 4; }

void conv1d_item(const CausalConv1d& p, std::int64_t sequence, std::int64_t channel, void* workspace) {
  with_elements(p.dtype, [&]<class E>(E) { item_of<E>(p, sequence, channel, static_cast<float*>(workspace)); });
}

}  // namespace untorch::kernels::UNTORCH_ISA
