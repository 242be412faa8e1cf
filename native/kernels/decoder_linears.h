// The linear layers of a decoder between one attention and the next, for one token, as one persistent kernel.
//
//   hidden       = residual + x · oᵀ
//   activated    = silu(g) · u,  g and u the halves of rms_norm(hidden) · gate_upᵀ
//   residual_out = hidden + activated · downᵀ
//   out          = rms_norm(residual_out) · nextᵀ + next_bias      without `next`: rms_norm(residual_out)
//
// rms_norm(v) = weight · v / √(mean(v²) + eps). Each result is rounded to dtype; where a vector is multiplied by a
// weight, 15 bits of a group's largest element are left of it.
#pragma once

#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

// An int4 weight [n, k] in the layout of w4a16/problem.h (inner_k_tiles 8) with scales [k / group][n][2]. 16-byte
// aligned.
struct DecoderLinear {
  const void* weight = nullptr;
  const void* scales = nullptr;
  std::int64_t n = 0, k = 0;
};

struct DecoderLinears {
  DType dtype = DType::kBFloat16;  // of all vectors and scales: bfloat16 or float16
  std::int64_t group = 0;          // of the weights: 32, 64, 128 or 256
  // The n of o and down, and the k of gate_up and next, are the width. next.n is 0 where there is none.
  DecoderLinear o, gate_up, down, next;
  const void *norm = nullptr, *next_norm = nullptr;  // [width]
  float eps = 0, next_eps = 0;
  const void* next_bias = nullptr;               // [next.n], or null
  const void *x = nullptr, *residual = nullptr;  // [o.k], [width]; 16-byte aligned, as are all vectors
  void *hidden = nullptr, *activated = nullptr;  // scratch memory: [width], [down.k]
  void *residual_out = nullptr, *out = nullptr;  // [width], [next.n] or [width]
  int num_sms = 0, max_shared_bytes = 0;
  bool pdl = false;  // Launch::pdl
  // The weights and norms are constant: they are read before the kernels before this one have ended (PDL).
  bool is_constant = false;
};

// Whether the kernel takes the sizes: widths that are multiples of 256 up to 8192, n multiples of 16, and no more in a
// CTA's share than its shared memory holds. Looks at sizes, group, num_sms and max_shared_bytes alone.
bool serves_decoder_linears(const DecoderLinears& p);

// For GPUs of compute capability 9.0 and newer. All CTAs are on the GPU at the same time (a cooperative launch).
int decoder_linears(const DecoderLinears& p, Stream stream);

}  // namespace untorch::kernels::cuda
