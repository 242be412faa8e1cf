// nvfp4_moe on CUDA: chunks of tokens, the workspace, and the launches of routing, grouped GEMMs and combine.
#include "shims/nvfp4_moe.h"

#include <algorithm>
#include <cstdlib>

#include "kernels/cuda/moe/nvfp4_moe.h"
#include "shims/destination.h"
#include "shims/nvfp4_arguments.h"
#include "shims/w4a16_cuda.h"

namespace untorch::shims {
namespace {

using kernels::cuda::Nvfp4Moe;
using kernels::cuda::Nvfp4MoeWorkspace;

// The environment overrides thresholds, for benchmarks.
const kernels::cuda::Nvfp4MoeThresholds& thresholds() {
  static const kernels::cuda::Nvfp4MoeThresholds made = [] {
    kernels::cuda::Nvfp4MoeThresholds out;
    if (const char* const mean = std::getenv("UNTORCH_NVFP4_MOE_SM80_MEAN")) out.max_mean_sm80 = std::atoll(mean);
    return out;
  }();
  return made;
}

// Tokens of a chunk, so that the workspace does not grow with their number.
std::int64_t tokens_per_chunk(const Nvfp4MoeShape& shape) {
  const std::int64_t row = shape.top_k * shape.k * static_cast<std::int64_t>(sizeof(float));
  return std::clamp<std::int64_t>(kernels::cuda::kMoeChunkBytes / row, 1, shape.tokens);
}

void run_chunk(const OnDevice& on, Nvfp4Moe p) {
  kernels::cuda::nvfp4_moe_plan(p, thresholds());
  const Nvfp4MoeWorkspace bytes = kernels::cuda::nvfp4_moe_workspace(p);
  const StorageRef sorted_pairs = on.scratch(bytes.sorted_pairs), tiles = on.scratch(bytes.tiles),
                   permuted_x = on.scratch(bytes.permuted_x), act = on.scratch(bytes.act),
                   pair_out = on.scratch(bytes.pair_out);
  p.sorted_pairs = static_cast<int*>(sorted_pairs->data()),
  p.tiles = static_cast<kernels::cuda::ExpertTile*>(tiles->data());
  p.permuted_x = permuted_x->data(), p.act = act->data(), p.pair_out = static_cast<float*>(pair_out->data());
  on.launched(kernels::cuda::nvfp4_moe_route(p, on.stream()));
  on.launched(kernels::cuda::nvfp4_moe_gate_up(p, on.stream()));
  on.launched(kernels::cuda::nvfp4_moe_down(p, on.stream()));
  on.launched(kernels::cuda::nvfp4_moe_sum(p, on.stream()));
}

}  // namespace

TensorPtr nvfp4_moe_cuda(const char* op, const OnDevice& on, const Nvfp4MoeArguments& given, const Nvfp4MoeShape& shape,
                         const Tensor* into) {
  check_w4a16_gpu(op, "NVFP4", on);
  const Tensor& x = given.hidden_states;
  TensorPtr out = destination(op, into, Dims{shape.tokens, shape.k}, x.dtype(), on.device());
  if (out->numel() == 0) return out;
  const TensorPtr w13 = aligned_cuda(given.w13), w13_scale = aligned_cuda(given.w13_scale), w2 = aligned_cuda(given.w2),
                  w2_scale = aligned_cuda(given.w2_scale);
  Nvfp4Moe p;
  p.dtype = x.dtype();
  p.k = shape.k, p.experts = shape.experts, p.intermediate = shape.intermediate, p.top_k = shape.top_k;
  p.x_stride = x.strides()[0];
  p.w13 = bytes_of(*w13), p.w13_scale = bytes_of(*w13_scale), p.w2 = bytes_of(*w2), p.w2_scale = bytes_of(*w2_scale);
  p.w13_global = given.w13_global.data<float>(), p.w2_global = given.w2_global.data<float>();
  p.two_scales = shape.two_scales;
  p.swiglu = {static_cast<float>(given.swiglu.alpha), static_cast<float>(given.swiglu.beta),
              given.swiglu.limit_or_infinity()};
  const TensorPtr w2_bias = given.w2_bias == nullptr ? nullptr : aligned_cuda(*given.w2_bias);
  if (given.w13_bias != nullptr) p.w13_bias = given.w13_bias->data<float>();
  if (w2_bias != nullptr) p.w2_bias = w2_bias->data<float>();
  p.has_wgmma = on.properties().major == 9 && on.properties().minor == 0;
  p.fault = on.faults();
  const auto bytes = static_cast<std::int64_t>(element_size(x.dtype()));
  const std::int64_t step = shape.top_k == 0 ? shape.tokens : tokens_per_chunk(shape);
  for (std::int64_t first = 0; first < shape.tokens; first += step) {
    p.tokens = std::min(step, shape.tokens - first);
    p.x = static_cast<const std::byte*>(x.raw()) + first * p.x_stride * bytes;
    p.topk_weights = given.topk_weights.data<float>() + first * shape.top_k;
    p.topk_ids = given.topk_ids.data<std::int32_t>() + first * shape.top_k;
    p.out = static_cast<std::byte*>(out->raw()) + first * shape.k * bytes;
    run_chunk(on, p);
  }
  return out;
}

}  // namespace untorch::shims
