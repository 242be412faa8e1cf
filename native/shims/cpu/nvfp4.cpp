// untorch::nvfp4_linear and untorch::nvfp4_moe on the CPU: weights are unpacked, some at a time, and multiplied in
// float32.
#include "kernels/cpu/w4a16/nvfp4.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include "kernels/cpu/gemm/gemm.h"
#include "shims/nvfp4_checks.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

using kernels::Nvfp4Weight;

constexpr std::int64_t kChunkFloats = 1 << 18;  // of weights that are unpacked at a time

// out [m, n] += x [m, x_width] · weightᵀ, the first n rows of it.
void multiply(const Nvfp4Weight& weight, std::int64_t n, std::int64_t m, const float* x, std::int64_t x_width,
              std::int64_t x_stride, float* out, std::int64_t out_stride, std::vector<float>& scratch) {
  if (m == 0 || n == 0 || x_width == 0) return;
  const std::int64_t step = std::max<std::int64_t>(kChunkFloats / weight.k, 16);
  scratch.resize(static_cast<std::size_t>(std::min(step, n) * weight.k));
  for (std::int64_t first = 0; first < n; first += step) {
    const std::int64_t rows = std::min(step, n - first);
    kernels::nvfp4_dequantize(weight, first, first + rows, scratch.data());
    kernels::gemm(m, rows, x_width, 1.0f, {x, x_stride, 1}, {scratch.data(), 1, weight.k}, 1.0f,
                  {out + first, out_stride, 1});
  }
}

const std::uint8_t* bytes_of(const Tensor& tensor) { return static_cast<const std::uint8_t*>(tensor.raw()); }

// The matrix `index` of dense ones [.., rows, k].
Nvfp4Weight matrix_of(const Tensor& codes, const Tensor& scales, std::int64_t index, std::int64_t rows, std::int64_t k,
                      const float* global) {
  Nvfp4Weight out;
  out.k = k;
  out.codes = bytes_of(codes) + index * rows * k / 2;
  out.block_scales = bytes_of(scales) + index * rows * k / kNvfp4Block;
  out.global_scales = global;
  return out;
}

// x in float32 with its rows at one distance.
struct Rows {
  TensorPtr tensor;
  std::int64_t stride;
};
Rows float_rows(const Tensor& x) {
  TensorPtr rows = x.dtype() == DType::kFloat32 ? std::make_unique<Tensor>(x) : to_dtype(x, DType::kFloat32);
  if (const std::optional<std::int64_t> stride = row_stride_of(*rows)) return {std::move(rows), *stride};
  return {clone_contiguous(*rows), x.size(-1)};
}

// The pairs of a token and one of its experts, by expert and then in their order; those of no expert are left out.
struct Routing {
  std::vector<std::int64_t> pairs;   // token * top_k + place
  std::vector<std::int64_t> starts;  // of each expert in `pairs`, and the end
};
Routing route(const char* op, const Tensor& ids, const Nvfp4MoeShape& shape) {
  const std::int32_t* const values = ids.data<std::int32_t>();
  Routing out;
  out.starts.assign(static_cast<std::size_t>(shape.experts + 1), 0);
  for (std::int64_t i = 0; i < shape.tokens * shape.top_k; ++i) {
    check(values[i] >= -1 && values[i] < shape.experts, op, ": argument 'topk_ids' must have experts from 0 to ",
          shape.experts - 1, ", or -1 for none, got ", values[i], " for token ", i / shape.top_k);
    if (values[i] >= 0) ++out.starts[static_cast<std::size_t>(values[i]) + 1];
  }
  std::partial_sum(out.starts.begin(), out.starts.end(), out.starts.begin());
  std::vector<std::int64_t> next = out.starts;
  out.pairs.resize(static_cast<std::size_t>(out.starts.back()));
  for (std::int64_t i = 0; i < shape.tokens * shape.top_k; ++i) {
    if (values[i] >= 0) out.pairs[static_cast<std::size_t>(next[static_cast<std::size_t>(values[i])]++)] = i;
  }
  return out;
}

// gates = (clamp(ups) + beta) · g · sigmoid(alpha · g), g = min(gates, limit).
void swiglu(const Nvfp4MoeArguments& given, std::int64_t rows, std::int64_t width, std::vector<float>& gates,
            const std::vector<float>& ups) {
  using kernels::Activation;
  if (given.is_silu()) {
    kernels::apply_activation(rows, width, Activation::kSilu, gates.data(), width);
    for (std::size_t i = 0; i < gates.size(); ++i) gates[i] *= ups[i];
    return;
  }
  const auto alpha = static_cast<float>(given.swiglu_alpha), beta = static_cast<float>(given.swiglu_beta);
  const float limit = given.limit();
  std::vector<float> open(gates.size());
  for (std::size_t i = 0; i < gates.size(); ++i) {
    gates[i] = std::min(gates[i], limit);  // NaN stays
    open[i] = alpha * gates[i];
  }
  kernels::apply_activation(rows, width, Activation::kSigmoid, open.data(), width);
  for (std::size_t i = 0; i < gates.size(); ++i) gates[i] *= open[i] * (std::clamp(ups[i], -limit, limit) + beta);
}

// The expert's row of a bias, or zeros, in each of the rows [rows, width] from `column` of it on.
std::vector<float> begin_with(const Tensor* bias, std::int64_t expert, std::int64_t column, std::int64_t rows,
                              std::int64_t width) {
  std::vector<float> out(static_cast<std::size_t>(rows * width), 0.0f);
  if (bias == nullptr) return out;
  const float* const from = bias->data<float>() + expert * bias->size(1) + column;
  for (std::int64_t i = 0; i < rows; ++i) std::copy_n(from, width, out.data() + i * width);
  return out;
}

// What expert `e` adds to the sums of its tokens.
void run_expert(const Nvfp4MoeArguments& given, const Nvfp4MoeShape& shape, std::int64_t e, const Rows& x,
                const std::int64_t* pairs, std::int64_t count, float* sums, std::vector<float>& scratch) {
  const std::int64_t k = shape.k, width = shape.width;
  std::vector<float> rows(static_cast<std::size_t>(count * k));
  std::vector<float> gates = begin_with(given.w13_bias, e, 0, count, width),
                     ups = begin_with(given.w13_bias, e, width, count, width),
                     results = begin_with(given.w2_bias, e, 0, count, k);
  for (std::int64_t i = 0; i < count; ++i) {
    std::copy_n(x.tensor->data<float>() + pairs[i] / shape.top_k * x.stride, k, rows.data() + i * k);
  }
  const float* const global = given.w13_global.data<float>() + e * (shape.two_scales ? 2 : 1);
  const Nvfp4Weight gate = matrix_of(given.w13, given.w13_scale, 2 * e, width, k, global);
  const Nvfp4Weight up =
      matrix_of(given.w13, given.w13_scale, 2 * e + 1, width, k, global + (shape.two_scales ? 1 : 0));
  multiply(gate, width, count, rows.data(), k, k, gates.data(), width, scratch);
  multiply(up, width, count, rows.data(), k, k, ups.data(), width, scratch);
  swiglu(given, count, width, gates, ups);
  const Nvfp4Weight down = matrix_of(given.w2, given.w2_scale, e, k, width, given.w2_global.data<float>() + e);
  multiply(down, k, count, gates.data(), width, width, results.data(), k, scratch);
  for (std::int64_t i = 0; i < count; ++i) {
    const float factor = given.topk_weights.data<float>()[pairs[i]];
    float* const sum = sums + pairs[i] / shape.top_k * k;
    for (std::int64_t j = 0; j < k; ++j) sum[j] += factor * results[static_cast<std::size_t>(i * k + j)];
  }
}

}  // namespace

// x [.., k_in] · weightᵀ + bias. Weights are exact whatever `prefill` asks for: a request for speed on GPUs.
UNTORCH_SHIM aoti_torch_cpu_nvfp4_linear(AtenTensorHandle x, AtenTensorHandle weight_packed,
                                         AtenTensorHandle block_scale, AtenTensorHandle global_scale,
                                         AtenTensorHandle* bias, const char* prefill, AtenTensorHandle* ret0) {
  constexpr const char* op = "nvfp4_linear";
  return guarded(op, [&] {
    const Tensor &input = cpu_input(x, op, "x"), &packed = cpu_input(weight_packed, op, "weight_packed"),
                 &scales = cpu_input(block_scale, op, "block_scale"),
                 &global = cpu_input(global_scale, op, "global_scale");
    const Tensor* const added = optional_cpu_input(bias, op, "bias");
    check(ret0 != nullptr, op, ": output pointer is null");
    const Nvfp4Shape shape = check_nvfp4_linear(op, input, packed, scales, global, added);
    check_prefill(op, prefill);
    const Rows rows = float_rows(input);
    TensorPtr out = Tensor::empty(shape.out_sizes, DType::kFloat32);
    std::vector<float> first(static_cast<std::size_t>(shape.n), 0.0f);
    if (added != nullptr) {
      const TensorPtr dense = contiguous(*to_dtype(*added, DType::kFloat32));
      std::copy_n(dense->data<float>(), shape.n, first.data());
    }
    float* const to = out->data<float>();
    for (std::int64_t i = 0; i < shape.m; ++i) std::copy(first.begin(), first.end(), to + i * shape.n);
    Nvfp4Weight weight;
    weight.k = shape.k, weight.codes = packed.raw(), weight.inner_k_tiles = shape.inner_k_tiles;
    weight.block_scales = bytes_of(scales), weight.global_scales = global.data<float>();
    weight.row_scales = shape.row_scales;
    std::vector<float> scratch;
    multiply(weight, shape.n, shape.m, rows.tensor->data<float>(), shape.x_width, rows.stride, to, shape.n, scratch);
    give(ret0, to_dtype(*out, input.dtype()), op);
  });
}

// The weighted sum of each token's experts, gated MLPs.
UNTORCH_SHIM aoti_torch_cpu_nvfp4_moe(AtenTensorHandle hidden_states, AtenTensorHandle topk_weights,
                                      AtenTensorHandle topk_ids, AtenTensorHandle w13, AtenTensorHandle w13_scale,
                                      AtenTensorHandle w2, AtenTensorHandle w2_scale, AtenTensorHandle w13_global,
                                      AtenTensorHandle w2_global, AtenTensorHandle* w13_bias, AtenTensorHandle* w2_bias,
                                      double swiglu_alpha, double swiglu_beta, const double* swiglu_limit,
                                      AtenTensorHandle* ret0) {
  constexpr const char* op = "nvfp4_moe";
  return guarded(op, [&] {
    Nvfp4MoeArguments given{cpu_input(hidden_states, op, "hidden_states"), cpu_input(topk_weights, op, "topk_weights"),
                            cpu_input(topk_ids, op, "topk_ids"),           cpu_input(w13, op, "w13"),
                            cpu_input(w13_scale, op, "w13_scale"),         cpu_input(w2, op, "w2"),
                            cpu_input(w2_scale, op, "w2_scale"),           cpu_input(w13_global, op, "w13_global"),
                            cpu_input(w2_global, op, "w2_global")};
    given.w13_bias = optional_cpu_input(w13_bias, op, "w13_bias");
    given.w2_bias = optional_cpu_input(w2_bias, op, "w2_bias");
    given.swiglu_alpha = swiglu_alpha, given.swiglu_beta = swiglu_beta, given.swiglu_limit = swiglu_limit;
    check(ret0 != nullptr, op, ": output pointer is null");
    const Nvfp4MoeShape shape = check_nvfp4_moe(op, given);
    const Routing routing = route(op, given.topk_ids, shape);
    const Rows rows = float_rows(given.hidden_states);
    TensorPtr out = Tensor::empty(Dims{shape.tokens, shape.k}, DType::kFloat32);
    std::fill_n(out->data<float>(), shape.tokens * shape.k, 0.0f);
    std::vector<float> scratch;
    for (std::int64_t e = 0; e < shape.experts; ++e) {
      const std::int64_t begin = routing.starts[static_cast<std::size_t>(e)],
                         count = routing.starts[static_cast<std::size_t>(e) + 1] - begin;
      if (count > 0) {
        run_expert(given, shape, e, rows, routing.pairs.data() + begin, count, out->data<float>(), scratch);
      }
    }
    give(ret0, to_dtype(*out, given.hidden_states.dtype()), op);
  });
}
