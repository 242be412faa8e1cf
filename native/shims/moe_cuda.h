// Fused MoE with W4A16 weights on CUDA: chunks of tokens, the workspace, and the launches of routing, grouped GEMMs and
// combine.
#pragma once

#include <algorithm>

#include "cuda/on_device.h"
#include "kernels/cuda/moe/w4a16_moe.h"
#include "shims/moe_arguments.h"
#include "shims/w4a16_cuda.h"

namespace untorch::shims {

// The environment overrides thresholds, for benchmarks: `variable` is the largest mean M per expert of the sm_80 GEMM.
inline kernels::cuda::MoeThresholds moe_thresholds(const char* variable) {
  kernels::cuda::MoeThresholds out;
  out.max_mean_sm80 = from_environment(variable, out.max_mean_sm80);
  return out;
}

// The grouped GEMMs of a format: Moe is Nvfp4Moe or Int4Moe.
template <class Moe>
struct MoeGemms {
  int (*gate_up)(const Moe& p, kernels::cuda::Stream stream);
  int (*down)(const Moe& p, kernels::cuda::Stream stream);
};

template <class Moe>
void run_moe_chunk(const OnDevice& on, Moe p, const kernels::cuda::MoeThresholds& thresholds,
                   const MoeGemms<Moe>& gemms) {
  kernels::cuda::moe_plan(p, thresholds);
  const kernels::cuda::MoeWorkspace bytes = kernels::cuda::moe_workspace(p);
  const StorageRef sorted_pairs = on.scratch(bytes.sorted_pairs), tiles = on.scratch(bytes.tiles),
                   copied_x = on.scratch(bytes.copied_x), act = on.scratch(bytes.act),
                   pair_out = on.scratch(bytes.pair_out);
  p.sorted_pairs = static_cast<int*>(sorted_pairs->data()),
  p.tiles = static_cast<kernels::cuda::ExpertTile*>(tiles->data());
  p.copied_x = copied_x->data(), p.act = act->data(), p.pair_out = static_cast<float*>(pair_out->data());
  on.launched(kernels::cuda::moe_route(p, on.stream()));
  on.launched(gemms.gate_up(p, on.stream()));
  on.launched(gemms.down(p, on.stream()));
  on.launched(kernels::cuda::moe_sum(p, on.stream()));
}

// out [tokens, k], not empty, of x's dtype. `p` has its weights.
template <class Moe>
void run_moe(const OnDevice& on, const MoeArguments& given, const MoeShape& shape, const Tensor& out, Moe p,
             const kernels::cuda::MoeThresholds& thresholds, const MoeGemms<Moe>& gemms) {
  const Tensor& x = given.hidden_states;
  p.dtype = x.dtype();
  p.k = shape.k, p.experts = shape.experts, p.intermediate = shape.intermediate, p.top_k = shape.top_k;
  p.x_stride = x.strides()[0];
  p.swiglu = {static_cast<float>(given.swiglu.alpha), static_cast<float>(given.swiglu.beta),
              given.swiglu.limit_or_infinity()};
  const TensorPtr w2_bias = given.w2_bias == nullptr ? nullptr : aligned_cuda(*given.w2_bias);
  if (given.w13_bias != nullptr) p.w13_bias = given.w13_bias->data<float>();
  if (w2_bias != nullptr) p.w2_bias = w2_bias->data<float>();
  p.has_wgmma = on.properties().major == 9 && on.properties().minor == 0;
  p.pdl = on.properties().has_pdl;
  p.fault = on.faults();
  const auto bytes = static_cast<std::int64_t>(element_size(x.dtype()));
  // Tokens of a chunk, so that the workspace does not grow with their number.
  const std::int64_t pairs_bytes = shape.top_k * shape.k * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t step =
      shape.top_k == 0 ? shape.tokens
                       : std::clamp<std::int64_t>(kernels::cuda::kMoeChunkBytes / pairs_bytes, 1, shape.tokens);
  for (std::int64_t first = 0; first < shape.tokens; first += step) {
    p.tokens = std::min(step, shape.tokens - first);
    p.x = static_cast<const std::byte*>(x.raw()) + first * p.x_stride * bytes;
    p.topk_weights = given.topk_weights.data<float>() + first * shape.top_k;
    p.topk_ids = given.topk_ids.data<std::int32_t>() + first * shape.top_k;
    p.out = static_cast<std::byte*>(out.raw()) + first * shape.k * bytes;
    run_moe_chunk(on, p, thresholds, gemms);
  }
}

}  // namespace untorch::shims
