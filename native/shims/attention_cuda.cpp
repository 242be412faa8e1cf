// Attention on CUDA: operands made readable for the kernels, the plan, and the launch.
#include "shims/attention_cuda.h"

#include <algorithm>

#include "shims/layout.h"
#include "tensor/device.h"

namespace untorch::shims::attention {
namespace {

std::int64_t lanes_of(DType dtype) { return 16 / static_cast<std::int64_t>(element_size(dtype)); }

// Whether the kernels can read rows of 16-byte chunks where they are. A row that ends within a chunk may be the last of
// its memory.
bool in_place(const Tensor& t) {
  if (t.numel() == 0) return true;
  const std::int64_t last = t.dim() - 1, lanes = lanes_of(t.dtype());
  if (t.size(last) % lanes != 0) return false;
  if (t.size(last) > 1 && t.stride(last) != 1) return false;
  for (std::int64_t d = 0; d < last; ++d) {
    if (t.size(d) > 1 && t.stride(d) % lanes != 0) return false;
  }
  return reinterpret_cast<std::uintptr_t>(t.raw()) % 16 == 0;
}

// A copy with rows padded to whole chunks, or another handle on the tensor.
TensorPtr readable(const Tensor& t) {
  if (in_place(t)) return std::make_unique<Tensor>(t);
  const std::int64_t lanes = lanes_of(t.dtype());
  Dims strides;
  strides.resize(t.sizes().size());
  std::int64_t next = 1;
  for (std::int64_t d = t.dim() - 1; d >= 0; --d) {
    strides[static_cast<std::size_t>(d)] = next;
    next *= d == t.dim() - 1 ? (t.size(d) + lanes - 1) / lanes * lanes : t.size(d);
  }
  TensorPtr out = Tensor::empty_strided(t.sizes(), strides, t.dtype(), t.device());
  copy(*out, t);
  return out;
}

kernels::cuda::Heads heads_of(const Tensor& t, const Axes& axes) {
  const auto stride = [&](std::int64_t d) { return d < 0 || t.size(d) <= 1 ? 0 : t.stride(d); };
  return {t.raw(), stride(axes.batch), stride(axes.head), stride(axes.row)};
}

}  // namespace

TensorPtr empty_result(const Dims& sizes, const Dims& strides, const Tensor& query) {
  const bool dense_rows = sizes[sizes.size() - 1] == 1 || strides[strides.size() - 1] == 1;
  return Tensor::empty_strided(sizes, dense_rows ? strides : contiguous_strides(sizes), query.dtype(), query.device());
}

TensorPtr in_layout(TensorPtr out, const Dims& strides) {
  if (out->strides() == strides) return out;
  TensorPtr laid = Tensor::empty_strided(out->sizes(), strides, out->dtype(), out->device());
  copy(*laid, *out);
  return laid;
}

kernels::cuda::Attention problem(const Operands& in, const double* scale) {
  kernels::cuda::Attention p;
  p.dtype = in.query.dtype();
  p.batch = static_cast<int>(in.batch()), p.heads = static_cast<int>(in.heads());
  p.kv_heads = static_cast<int>(in.key.size(in.axes.head));
  p.queries = static_cast<int>(in.queries()), p.keys = static_cast<int>(in.keys());
  p.width = static_cast<int>(in.query.size(-1)), p.value_width = static_cast<int>(in.value_width());
  p.scale = static_cast<float>(scale_or_default(scale, in.query.size(-1)));
  return p;
}

namespace {

// In float32: half types of heads wider than their kernels take, such as a diffusion VAE's single one of 512.
void launch_in_float32(const OnDevice& on, const char* op, const Operands& in, const Tensor* bias, const Tensor& out,
                       kernels::cuda::Attention p) {
  const TensorPtr query = to_dtype(in.query, DType::kFloat32), key = to_dtype(in.key, DType::kFloat32),
                  value = to_dtype(in.value, DType::kFloat32),
                  added = bias == nullptr ? nullptr : to_dtype(*bias, DType::kFloat32),
                  result = Tensor::empty(out.sizes(), DType::kFloat32, on.device());
  p.dtype = DType::kFloat32;
  launch(on, op, {*query, *key, *value, in.axes}, added.get(), *result, p);
  copy(out, *result);
}

}  // namespace

void launch(const OnDevice& on, const char* op, const Operands& in, const Tensor* bias, const Tensor& out,
            kernels::cuda::Attention p) {
  if (p.batch == 0 || p.heads == 0 || p.queries == 0) {
    if (p.random_state != nullptr) {
      cuda::check_driver(cuda::driver().memset_d8_async(reinterpret_cast<cuda::DevicePtr>(p.random_state), 0,
                                                        3 * sizeof(std::uint64_t), on.stream()),
                         op);
    }
    return;
  }
  if (p.dtype != DType::kFloat32 && std::max(p.width, p.value_width) > kernels::cuda::kMaxHalfAttentionWidth) {
    launch_in_float32(on, op, in, bias, out, p);
    return;
  }
  const TensorPtr query = readable(in.query), key = readable(in.key), value = readable(in.value);
  p.query = heads_of(*query, in.axes), p.key = heads_of(*key, in.axes), p.value = heads_of(*value, in.axes);
  p.out = heads_of(out, in.axes);
  if (bias != nullptr) {
    const auto stride = [&](std::int64_t d) { return d > bias->dim() || bias->size(-d) == 1 ? 0 : bias->stride(-d); };
    p.bias = bias->raw();
    p.bias_batch = stride(4), p.bias_head = stride(3), p.bias_row = stride(2), p.bias_key = stride(1);
  }
  const cuda::DeviceProperties& device = on.properties();
  if (device.major == 9 && device.minor == 0) {
    const auto wgmma = kernels::cuda::plan_attention_wgmma(p, device.num_sms, device.l2_bytes);
    if (wgmma.valid) {
      on.launched(kernels::cuda::attention_wgmma(p, wgmma, on.stream()));
      return;
    }
  }
  const kernels::cuda::AttentionPlan plan = kernels::cuda::plan_attention(p, device.num_sms, device.l2_bytes);
  check(plan.valid, op, ": the shapes ", to_string(in.query.sizes()), " and ", to_string(in.key.sizes()),
        " are larger than the kernels take");
  StorageRef scratch;
  if (plan.scratch_bytes > 0) scratch = on.scratch(plan.scratch_bytes);
  on.launched(kernels::cuda::attention(p, plan, scratch ? scratch->data() : nullptr, on.stream()));
}

RandomState::RandomState(const OnDevice& on) {
  const TensorPtr words = Tensor::empty(Dims{3}, DType::kUInt64, on.device());
  state = words->view(Dims{2}, Dims{1}, 0);
  unused = words->view(Dims{}, Dims{}, 2);
}

}  // namespace untorch::shims::attention
