// untorch::nvfp4_moe on CUDA.
#include "kernels/cuda/moe/nvfp4_moe.h"

#include <algorithm>
#include <cstdlib>

#include "shims/cuda/shim.h"
#include "shims/cuda/w4a16_linear.h"
#include "shims/nvfp4_checks.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

using kernels::cuda::Nvfp4Moe;
using kernels::cuda::Nvfp4MoeSpace;

// For benchmarks, which measure where one kernel should take over from the other.
const kernels::cuda::Nvfp4MoeLimits& limits() {
  static const kernels::cuda::Nvfp4MoeLimits made = [] {
    kernels::cuda::Nvfp4MoeLimits out;
    if (const char* const mean = std::getenv("UNTORCH_NVFP4_MOE_MMA_MEAN")) out.before_wgmma = std::atoll(mean);
    return out;
  }();
  return made;
}

const std::uint8_t* bytes_of(const Tensor& tensor) { return static_cast<const std::uint8_t*>(tensor.raw()); }

// Tokens that are served at a time, so that what lies between does not grow with their number.
std::int64_t tokens_at_a_time(const Nvfp4MoeShape& shape) {
  const std::int64_t row = shape.top_k * shape.k * static_cast<std::int64_t>(sizeof(float));
  return std::clamp<std::int64_t>(kernels::cuda::kMoeResultBytes / row, 1, shape.tokens);
}

void run_tokens(const OnDevice& on, Nvfp4Moe p) {
  kernels::cuda::nvfp4_moe_plan(p, limits());
  const Nvfp4MoeSpace space = kernels::cuda::nvfp4_moe_space(p);
  const StorageRef sorted = on.scratch(space.sorted), list = on.scratch(space.list),
                   arranged = on.scratch(space.arranged), act = on.scratch(space.act),
                   results = on.scratch(space.results);
  p.sorted = static_cast<int*>(sorted->data()), p.list = static_cast<kernels::cuda::MoeBlock*>(list->data());
  p.arranged = arranged->data(), p.act = act->data(), p.results = static_cast<float*>(results->data());
  on.launched(kernels::cuda::nvfp4_moe_route(p, on.stream()));
  on.launched(kernels::cuda::nvfp4_moe_gate_up(p, on.stream()));
  on.launched(kernels::cuda::nvfp4_moe_down(p, on.stream()));
  on.launched(kernels::cuda::nvfp4_moe_sum(p, on.stream()));
}

TensorPtr multiply(const OnDevice& on, const Nvfp4MoeArguments& given, const Nvfp4MoeShape& shape) {
  const Tensor& x = given.hidden_states;
  TensorPtr out = Tensor::empty(Dims{shape.tokens, shape.k}, x.dtype(), on.device());
  if (out->numel() == 0) return out;
  const TensorPtr w13 = aligned_cuda(given.w13), w13_scale = aligned_cuda(given.w13_scale), w2 = aligned_cuda(given.w2),
                  w2_scale = aligned_cuda(given.w2_scale);
  Nvfp4Moe p;
  p.dtype = x.dtype();
  p.k = shape.k, p.experts = shape.experts, p.width = shape.width, p.top_k = shape.top_k;
  p.x_row = x.strides()[0];
  p.w13 = bytes_of(*w13), p.w13_scale = bytes_of(*w13_scale), p.w2 = bytes_of(*w2), p.w2_scale = bytes_of(*w2_scale);
  p.w13_global = given.w13_global.data<float>(), p.w2_global = given.w2_global.data<float>();
  p.two_scales = shape.two_scales;
  p.swiglu = {static_cast<float>(given.swiglu_alpha), static_cast<float>(given.swiglu_beta), given.limit()};
  const TensorPtr w2_bias = given.w2_bias == nullptr ? nullptr : aligned_cuda(*given.w2_bias);
  if (given.w13_bias != nullptr) p.w13_bias = given.w13_bias->data<float>();
  if (w2_bias != nullptr) p.w2_bias = w2_bias->data<float>();
  p.has_wgmma = on.properties().major == 9 && on.properties().minor == 0;
  p.fault = cuda::DeviceErrors::word(on.index());
  const auto bytes = static_cast<std::int64_t>(element_size(x.dtype()));
  const std::int64_t step = shape.top_k == 0 ? shape.tokens : tokens_at_a_time(shape);
  for (std::int64_t first = 0; first < shape.tokens; first += step) {
    p.tokens = std::min(step, shape.tokens - first);
    p.x = static_cast<const std::byte*>(x.raw()) + first * p.x_row * bytes;
    p.topk_weights = given.topk_weights.data<float>() + first * shape.top_k;
    p.topk_ids = given.topk_ids.data<std::int32_t>() + first * shape.top_k;
    p.out = static_cast<std::byte*>(out->raw()) + first * shape.k * bytes;
    run_tokens(on, p);
  }
  return out;
}

}  // namespace

// The weighted sum of each token's experts, gated MLPs.
UNTORCH_SHIM aoti_torch_cuda_nvfp4_moe(AtenTensorHandle hidden_states, AtenTensorHandle topk_weights,
                                       AtenTensorHandle topk_ids, AtenTensorHandle w13, AtenTensorHandle w13_scale,
                                       AtenTensorHandle w2, AtenTensorHandle w2_scale, AtenTensorHandle w13_global,
                                       AtenTensorHandle w2_global, AtenTensorHandle* w13_bias,
                                       AtenTensorHandle* w2_bias, double swiglu_alpha, double swiglu_beta,
                                       const double* swiglu_limit, AtenTensorHandle* ret0) {
  constexpr const char* op = "nvfp4_moe";
  return guarded(op, [&] {
    Nvfp4MoeArguments given{
        cuda_input(hidden_states, op, "hidden_states"), cuda_input(topk_weights, op, "topk_weights"),
        cuda_input(topk_ids, op, "topk_ids"),           cuda_input(w13, op, "w13"),
        cuda_input(w13_scale, op, "w13_scale"),         cuda_input(w2, op, "w2"),
        cuda_input(w2_scale, op, "w2_scale"),           cuda_input(w13_global, op, "w13_global"),
        cuda_input(w2_global, op, "w2_global")};
    given.w13_bias = optional_cuda_input(w13_bias, op, "w13_bias");
    given.w2_bias = optional_cuda_input(w2_bias, op, "w2_bias");
    given.swiglu_alpha = swiglu_alpha, given.swiglu_beta = swiglu_beta, given.swiglu_limit = swiglu_limit;
    check(ret0 != nullptr, op, ": output pointer is null");
    const Nvfp4MoeShape shape = check_nvfp4_moe(op, given);
    const OnDevice on(op, given.hidden_states,
                      {&given.topk_weights, &given.topk_ids, &given.w13, &given.w13_scale, &given.w2, &given.w2_scale,
                       &given.w13_global, &given.w2_global, given.w13_bias, given.w2_bias});
    check_w4a16_gpu(op, "NVFP4", on);
    give(ret0, multiply(on, given, shape), op);
  });
}
