// untorch::decoder_linears: the linear layers of a decoder between one attention and the next, on CUDA.
//
// One token is one persistent kernel (kernels/decoder_linears.h) where it takes the sizes. Otherwise each linear layer
// is the GEMM that it is by itself, with a kernel between two of them: residual sum and RMSNorm, SwiGLU.
#include "kernels/decoder_linears.h"

#include <vector>

#include "kernels/rms_norm.h"
#include "kernels/silu_and_mul.h"
#include "shims/destination.h"
#include "shims/gemm_cuda.h"
#include "shims/int4_linear.h"
#include "shims/op.h"
#include "shims/w4a16_cuda.h"

namespace untorch::shims {
namespace {

using kernels::cuda::DecoderLinear;
using kernels::cuda::DecoderLinears;

struct Arguments {
  AtenTensorHandle x, residual, o_weight;
  AtenTensorHandle* o_scales;
  AtenTensorHandle norm, gate_up_weight;
  AtenTensorHandle* gate_up_scales;
  AtenTensorHandle down_weight;
  AtenTensorHandle* down_scales;
  AtenTensorHandle next_norm;
  AtenTensorHandle *next_weight, *next_scales, *next_bias;
  std::int64_t group_size;
  double eps, next_eps;
};

// A weight [n, k], checked. scales: null for dense ones.
struct Weight {
  const Tensor* values = nullptr;
  const Tensor* scales = nullptr;
  std::int64_t n = 0, k = 0;
  int inner_k_tiles = 0;
};

struct Problem {
  const Tensor *x, *residual, *norm, *next_norm, *next_bias;
  Weight o, gate_up, down, next;  // next.values is null where there is none
  std::int64_t tokens, width, group;
  double eps, next_eps;
  DType dtype() const { return x->dtype(); }
};

void check_rows(const Op& op, const char* name, const Tensor& tensor, const char* shape) {
  check(is_floating(tensor.dtype()) && tensor.dtype() != DType::kFloat64 && tensor.dim() == 2, op, ": argument '", name,
        "' must be bfloat16, float16 or float32 ", shape, ", got ", dtype_name(tensor.dtype()), " ",
        to_string(tensor.sizes()));
}

Weight check_weight(const Op& op, const Int4Names& names, const Tensor& values, const Tensor* scales,
                    std::int64_t group, DType dtype, std::int64_t k) {
  Weight out{&values, scales};
  if (group == 0) {
    check(scales == nullptr, op, ": argument '", names.scales, "' must be absent with a group_size of 0");
    check(values.dtype() == dtype && values.dim() == 2 && values.is_contiguous(), op, ": argument '", names.weight,
          "' must be ", dtype_name(dtype), " like 'x', contiguous, [n, k], got ", dtype_name(values.dtype()), " ",
          to_string(values.sizes()), " with strides ", to_string(values.strides()));
    out.n = values.size(0), out.k = values.size(1);
  } else {
    check(scales != nullptr, op, ": argument '", names.scales, "' is missing: weights are int4, in groups of ", group);
    const Int4Shape shape = check_int4_weight(op, names, values, group, *scales);
    check(is_floating(scales->dtype()) && scales->dtype() != DType::kFloat64, op, ": argument '", names.scales,
          "' must be float32, bfloat16 or float16, got ", dtype_name(scales->dtype()));
    out.n = shape.n, out.k = shape.k, out.inner_k_tiles = shape.inner_k_tiles;
  }
  check(out.k == k, op, ": argument '", names.weight, "' must have k = ", k, ", got ", out.k);
  return out;
}

void check_outputs(const Op& op, const char* name, const Weight& weight, std::int64_t n) {
  check(weight.n == n, op, ": argument '", name, "' must have n = ", n, ", the width of 'residual', got ", weight.n);
}

Problem check_arguments(const Op& op, const Arguments& in) {
  Problem p{};
  p.x = &op.input(in.x, "x"), p.residual = &op.input(in.residual, "residual");
  const Tensor &o = op.input(in.o_weight, "o_weight"), &gate_up = op.input(in.gate_up_weight, "gate_up_weight"),
               &down = op.input(in.down_weight, "down_weight");
  const Tensor* const next = op.optional_input(in.next_weight, "next_weight");
  const Tensor *const o_scales = op.optional_input(in.o_scales, "o_scales"),
                      *const gate_up_scales = op.optional_input(in.gate_up_scales, "gate_up_scales"),
                      *const down_scales = op.optional_input(in.down_scales, "down_scales"),
                      *const next_scales = op.optional_input(in.next_scales, "next_scales");
  p.norm = &op.input(in.norm, "norm"), p.next_norm = &op.input(in.next_norm, "next_norm");
  p.next_bias = op.optional_input(in.next_bias, "next_bias");
  check_rows(op, "x", *p.x, "[tokens, k]");
  check_rows(op, "residual", *p.residual, "[tokens, width]");
  const DType dtype = p.x->dtype();
  p.tokens = p.x->size(0), p.width = p.residual->size(1), p.group = in.group_size, p.eps = in.eps,
  p.next_eps = in.next_eps;
  check(p.residual->dtype() == dtype && p.residual->size(0) == p.tokens, op, ": argument 'residual' must be ",
        dtype_name(dtype), " with ", p.tokens, " rows, as 'x', got ", dtype_name(p.residual->dtype()), " ",
        to_string(p.residual->sizes()));
  const std::int64_t group = p.group;
  check(group == 0 || group == 32 || group == 64 || group == 128 || group == 256, op,
        ": argument 'group_size' must be 32, 64, 128 or 256 for int4 weights, or 0 for dense ones, got ", group);
  p.o = check_weight(op, {"o_weight", "group_size", "o_scales"}, o, o_scales, group, dtype, p.x->size(1));
  check_outputs(op, "o_weight", p.o, p.width);
  p.gate_up = check_weight(op, {"gate_up_weight", "group_size", "gate_up_scales"}, gate_up, gate_up_scales, group,
                           dtype, p.width);
  check(p.gate_up.n % 2 == 0, op,
        ": argument 'gate_up_weight' must have an even n, the gate's and the up projection's, got ", p.gate_up.n);
  p.down =
      check_weight(op, {"down_weight", "group_size", "down_scales"}, down, down_scales, group, dtype, p.gate_up.n / 2);
  check_outputs(op, "down_weight", p.down, p.width);
  if (next != nullptr) {
    p.next = check_weight(op, {"next_weight", "group_size", "next_scales"}, *next, next_scales, group, dtype, p.width);
  } else {
    check(next_scales == nullptr && p.next_bias == nullptr, op,
          ": arguments 'next_scales' and 'next_bias' must be absent without 'next_weight'");
  }
  check_is(op, "norm", *p.norm, dtype, Dims{p.width});
  check_is(op, "next_norm", *p.next_norm, dtype, Dims{p.width});
  if (p.next_bias != nullptr) check_is(op, "next_bias", *p.next_bias, dtype, Dims{p.next.n});
  return p;
}

// 0 switches the persistent kernel off, for benchmarks.
bool is_switched_on() {
  static const bool on = from_environment("UNTORCH_DECODER_LINEARS", 1) != 0;
  return on;
}

bool is_read_only(const Tensor* tensor) { return tensor == nullptr || tensor->storage()->read_only(); }
bool is_read_only(const Weight& weight) { return is_read_only(weight.values) && is_read_only(weight.scales); }

// What serves_decoder_linears looks at, and what it does not: the layout of int4 weights, and their scales' dtype.
bool describe(const OnDevice& on, const Problem& p, DecoderLinears& out) {
  const cuda::DeviceProperties& gpu = on.properties();
  const DType dtype = p.dtype();
  if (p.tokens != 1 || gpu.major < 9 || dtype == DType::kFloat32 || !is_switched_on()) return false;
  for (const Weight* const weight : {&p.o, &p.gate_up, &p.down, &p.next}) {
    if (weight->scales != nullptr && (weight->inner_k_tiles != 8 || weight->scales->dtype() != dtype)) return false;
  }
  const auto sizes = [](const Weight& weight) { return DecoderLinear{nullptr, nullptr, weight.n, weight.k}; };
  out.dtype = dtype, out.group = p.group;
  out.o = sizes(p.o), out.gate_up = sizes(p.gate_up), out.down = sizes(p.down), out.next = sizes(p.next);
  out.eps = static_cast<float>(p.eps), out.next_eps = static_cast<float>(p.next_eps);
  out.num_sms = gpu.num_sms, out.max_shared_bytes = gpu.max_shared_per_block;
  out.pdl = gpu.has_pdl;
  out.is_constant = is_read_only(p.o) && is_read_only(p.gate_up) && is_read_only(p.down) && is_read_only(p.next) &&
                    is_read_only(p.norm) && is_read_only(p.next_norm) && is_read_only(p.next_bias);
  return serves_decoder_linears(out);
}

// One launch. Operands that are not aligned are copied.
void run_persistent(const OnDevice& on, const Problem& p, DecoderLinears& call, const Tensor& out,
                    const Tensor& residual_out) {
  std::vector<TensorPtr> kept;
  const auto operand = [&](const Tensor* tensor) -> const void* {
    if (tensor == nullptr) return nullptr;
    kept.push_back(aligned_cuda(*tensor));
    return kept.back()->raw();
  };
  const auto give_weight = [&](DecoderLinear& to, const Weight& from) {
    to.weight = operand(from.values), to.scales = operand(from.scales);
  };
  give_weight(call.o, p.o), give_weight(call.gate_up, p.gate_up), give_weight(call.down, p.down),
      give_weight(call.next, p.next);
  call.norm = operand(p.norm), call.next_norm = operand(p.next_norm), call.next_bias = operand(p.next_bias);
  call.x = operand(p.x), call.residual = operand(p.residual);
  const std::size_t bytes = element_size(p.dtype());
  const StorageRef hidden = on.scratch(static_cast<std::size_t>(p.width) * bytes),
                   activated = on.scratch(static_cast<std::size_t>(p.down.k) * bytes);
  call.hidden = hidden->data(), call.activated = activated->data();
  call.residual_out = residual_out.raw(), call.out = out.raw();
  on.launched(kernels::cuda::decoder_linears(call, on.stream()));
}

// x · weightᵀ + bias, as the layer by itself; into `into`, or new memory where it is null.
TensorPtr linear(const Op& op, const OnDevice& on, const Problem& p, const Tensor& x, const Weight& weight,
                 const Tensor* bias = nullptr, const Tensor* into = nullptr) {
  const Dims sizes{p.tokens, weight.n};
  if (p.group != 0) {
    Int4Shape shape;
    shape.m = p.tokens, shape.n = weight.n, shape.k = shape.x_width = weight.k;
    shape.group = p.group, shape.inner_k_tiles = weight.inner_k_tiles, shape.out_sizes = sizes;
    return int4_linear_cuda(op, on, x, *weight.values, *weight.scales, bias, shape, into);
  }
  TensorPtr out = destination(op, into, sizes, p.dtype(), on.device());
  const Tensor& values = *weight.values;
  const TensorPtr turned = values.view(Dims{weight.k, weight.n}, Dims{1, weight.k}, values.storage_offset());
  gemm_cuda(op, on, gemm_problem(*out, x, *turned, bias, 1.0, 1.0));
  return out;
}

// sum = x + added, out = rms_norm(sum). `sum` and `out` may be any of the four.
void add_rms_norm(const OnDevice& on, const Problem& p, const Tensor& x, const Tensor& added, const Tensor& weight,
                  double eps, const Tensor& sum, const Tensor& out) {
  const kernels::RmsNorm call{.dtype = p.dtype(),
                              .rows = p.tokens,
                              .width = p.width,
                              .eps = eps,
                              .x = x.raw(),
                              .weight = weight.raw(),
                              .weight_dtype = p.dtype(),
                              .out = out.raw(),
                              .added = added.raw(),
                              .sum = sum.raw(),
                              .pdl = on.properties().has_pdl};
  on.launched(kernels::cuda::rms_norm(call, on.stream()));
}

// A launch for each linear layer, and one between two.
void run_composed(const Op& op, const OnDevice& on, const Problem& p, const Tensor& out, const Tensor& residual_out) {
  const TensorPtr x = contiguous(*p.x), residual = contiguous(*p.residual);
  const TensorPtr hidden = linear(op, on, p, *x, p.o);
  const TensorPtr normed = Tensor::empty(residual->sizes(), p.dtype(), on.device());
  add_rms_norm(on, p, *hidden, *residual, *p.norm, p.eps, *hidden, *normed);
  const TensorPtr gate_up = linear(op, on, p, *normed, p.gate_up);
  const TensorPtr activated = Tensor::empty(Dims{p.tokens, p.down.k}, p.dtype(), on.device());
  const kernels::cuda::SiluAndMul activation{.dtype = p.dtype(),
                                             .rows = p.tokens,
                                             .width = p.down.k,
                                             .gate_up = gate_up->raw(),
                                             .out = activated->raw(),
                                             .pdl = on.properties().has_pdl};
  on.launched(kernels::cuda::silu_and_mul(activation, on.stream()));
  const TensorPtr down = linear(op, on, p, *activated, p.down);
  const bool has_next = p.next.values != nullptr;
  add_rms_norm(on, p, *down, *hidden, *p.next_norm, p.next_eps, residual_out, has_next ? *normed : out);
  if (has_next) (void)linear(op, on, p, *normed, p.next, p.next_bias, &out);
}

struct Results {
  TensorPtr out, residual_out;
};

// The places null: new memory.
Results decoder_linears(const Op& op, const Arguments& in, const Tensor* out, const Tensor* residual_out) {
  const Problem p = check_arguments(op, in);
  const OnDevice on(op, *p.x,
                    {p.residual, p.o.values, p.o.scales, p.norm, p.gate_up.values, p.gate_up.scales, p.down.values,
                     p.down.scales, p.next_norm, p.next.values, p.next.scales, p.next_bias});
  const Dims sizes{p.tokens, p.next.values == nullptr ? p.width : p.next.n};
  Results results{destination(op, out, sizes, p.dtype(), on.device()),
                  destination(op, residual_out, Dims{p.tokens, p.width}, p.dtype(), on.device())};
  if (p.tokens == 0) return results;
  DecoderLinears call;
  if (describe(on, p, call)) {
    run_persistent(on, p, call, *results.out, *results.residual_out);
  } else {
    run_composed(op, on, p, *results.out, *results.residual_out);
  }
  return results;
}

}  // namespace

// x [tokens, k], residual [tokens, width], weights [n, k] and norms [width] of one dtype, bfloat16, float16 or float32.
// group_size 0: dense weights, without scales; else int4 weights [n/8][k/(16·t)][32][t/2] with scales [k/group][n][2].
// gate_up has the rows of the gate, then those of the up projection. next_weight, next_scales and next_bias may be
// null.
//   residual_out [tokens, width]: hidden + (silu(g) · u) · downᵀ, with hidden = residual + x · oᵀ and
//                                 [g, u] = rms_norm(hidden) · gate_upᵀ
//   out [tokens, n]: rms_norm(residual_out) · nextᵀ + next_bias; without `next` rms_norm(residual_out)
UNTORCH_SHIM aoti_torch_cuda_decoder_linears(AtenTensorHandle x, AtenTensorHandle residual, AtenTensorHandle o_weight,
                                             AtenTensorHandle* o_scales, AtenTensorHandle norm,
                                             AtenTensorHandle gate_up_weight, AtenTensorHandle* gate_up_scales,
                                             AtenTensorHandle down_weight, AtenTensorHandle* down_scales,
                                             AtenTensorHandle next_norm, AtenTensorHandle* next_weight,
                                             AtenTensorHandle* next_scales, AtenTensorHandle* next_bias,
                                             std::int64_t group_size, double eps, double next_eps,
                                             AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  constexpr Op op{"decoder_linears", DeviceType::kCUDA};
  return guarded(op, [&] {
    check_interrupt();
    check(ret0 != nullptr && ret1 != nullptr, op, ": output pointer is null");
    Results results =
        decoder_linears(op,
                        {x, residual, o_weight, o_scales, norm, gate_up_weight, gate_up_scales, down_weight,
                         down_scales, next_norm, next_weight, next_scales, next_bias, group_size, eps, next_eps},
                        nullptr, nullptr);
    give(ret0, std::move(results.out), op);
    give(ret1, std::move(results.residual_out), op);
  });
}

// The same into memory of the caller, on the device of x.
UNTORCH_SHIM untorch_decoder_linears(AtenTensorHandle out, AtenTensorHandle residual_out, AtenTensorHandle x,
                                     AtenTensorHandle residual, AtenTensorHandle o_weight, AtenTensorHandle* o_scales,
                                     AtenTensorHandle norm, AtenTensorHandle gate_up_weight,
                                     AtenTensorHandle* gate_up_scales, AtenTensorHandle down_weight,
                                     AtenTensorHandle* down_scales, AtenTensorHandle next_norm,
                                     AtenTensorHandle* next_weight, AtenTensorHandle* next_scales,
                                     AtenTensorHandle* next_bias, std::int64_t group_size, double eps,
                                     double next_eps) {
  constexpr Op op{"decoder_linears", DeviceType::kCUDA};
  return guarded(op, [&] {
    (void)op.input(x, "x");
    const FromTorch relaxed(op);
    (void)decoder_linears(op,
                          {x, residual, o_weight, o_scales, norm, gate_up_weight, gate_up_scales, down_weight,
                           down_scales, next_norm, next_weight, next_scales, next_bias, group_size, eps, next_eps},
                          &op.input(out, "out"), &op.input(residual_out, "residual_out"));
  });
}

}  // namespace untorch::shims
