// Views (the CPU's: they know no device), cat, pad, and factories (aoti_torch_cuda_*).
#include "kernels/cuda/elementwise/cat_pad.h"

#include "shims/cat.h"
#include "shims/cpu/elementwise.h"
#include "shims/cuda/factory.h"
#include "shims/device_ops.h"
#include "shims/nn.h"
#include "shims/pad.h"
#include "shims/view.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

// Dense parts of the result's dtype and row-major order go in one launch; others are copied one by one.
void concatenate(const OnDevice& on, const Concatenation& plan, const Tensor& out) {
  if (out.numel() == 0) return;
  std::int64_t rows = 1, inner = 1;
  for (std::size_t d = 0; d < plan.shape.size(); ++d)
    (d < plan.dim ? rows : inner) *= d == plan.dim ? 1 : plan.shape[d];
  const int bytes = static_cast<int>(element_size(plan.dtype));
  kernels::cuda::Pieces pieces;
  pieces.rows = rows;
  pieces.pitch = plan.shape[plan.dim] * inner;
  const auto flush = [&] {
    on.launched(kernels::cuda::concatenate(pieces, out.raw(), bytes, on.stream()));
    pieces.count = 0;
  };
  const bool row_major = out.is_contiguous();
  for (std::size_t i = 0; i < plan.parts.size(); ++i) {
    const Tensor& part = *plan.parts[i];
    if (part.numel() == 0) continue;
    if (!row_major || part.dtype() != plan.dtype || !part.is_contiguous()) {
      copy(*plan.place(out, i), part);
      continue;
    }
    if (pieces.count == kernels::cuda::kMaxPieces) flush();
    pieces.piece[pieces.count++] = {part.raw(), part.sizes()[plan.dim] * inner, plan.starts[i] * inner};
  }
  if (pieces.count != 0) flush();
}

TensorPtr padded(const Tensor& self, DimSpan pads, const char* mode_name, const double* value) {
  const char* op = "pad";
  const PadMode mode = pad_mode(mode_name);
  check_pads(mode, self, pads, value);
  check(is_known(self.dtype()) && element_size(self.dtype()) <= 16, op, ": dtype ", dtype_name(self.dtype()),
        " is not supported");
  check(self.dim() <= kMaxDims, op, ": ", self.dim(), " dimensions are more than the kernels take (", kMaxDims, ")");
  const TensorPtr constant = scalar_tensor(value == nullptr ? 0.0 : *value, self.dtype());
  const OnDevice on(op, self);
  if (mode == PadMode::kConstant && std::ranges::all_of(pads, [](std::int64_t pad) { return pad <= 0; })) {
    return clone_like(*cropped(self, pads));  // keeps the input's strides where they are dense, as in PyTorch
  }
  const auto ndim = static_cast<std::size_t>(self.dim());
  Dims sizes(self.sizes());
  for (std::size_t i = 0; i < pads.size(); i += 2) sizes[ndim - 1 - i / 2] += pads[i] + pads[i + 1];
  // Circular padding makes a row-major tensor, the others keep the memory format; as in PyTorch.
  const bool keep = mode != PadMode::kCircular && suggests_channels_last(self);
  TensorPtr out = Tensor::empty_strided(sizes, keep ? channels_last_strides(sizes) : contiguous_strides(sizes),
                                        self.dtype(), on.device());
  kernels::cuda::PadSpace space;
  space.numel = out->numel();
  const auto append = [&](std::size_t d) {
    const std::size_t slot = 2 * (ndim - 1 - d);
    const std::int64_t before = slot < pads.size() ? pads[slot] : 0, after = slot < pads.size() ? pads[slot + 1] : 0;
    space.dims[space.ndim++] = {sizes[d], out->strides()[d], self.sizes()[d], self.strides()[d], before, after};
  };
  // Innermost first in the result's memory.
  if (keep) append(1);
  for (std::size_t d = ndim; d-- > 0;) {
    if (!keep || d != 1) append(d);
  }
  const auto how = static_cast<kernels::cuda::Padding>(static_cast<int>(mode));
  on.launched(kernels::cuda::pad(space, how, out->raw(), self.raw(), constant->raw(),
                                 static_cast<int>(element_size(self.dtype())), on.stream()));
  return out;
}

AOTITorchError pad_shim(AtenTensorHandle self, const std::int64_t* pad, std::int64_t pad_len, const char* mode,
                        double* value, AtenTensorHandle* ret0) {
  return guarded("pad",
                 [&] { give(ret0, padded(cuda_input(self, "pad", "self"), ints(pad, pad_len), mode, value), "pad"); });
}

[[maybe_unused]] const bool registered = [] {
  cuda_ops.pad = pad_shim;
  return true;
}();

}  // namespace

UNTORCH_SHIM aoti_torch_cuda_cat(const AtenTensorHandle* tensors, std::int64_t tensors_len_, std::int64_t dim,
                                 AtenTensorHandle* ret0) {
  return guarded("cat", [&] {
    std::vector<const Tensor*> parts;
    for (std::int64_t i = 0; i < tensors_len_; ++i) {
      parts.push_back(&cuda_input(tensors[i], "cat", "tensors"));
      check(parts.back()->device() == parts[0]->device(), "cat: tensor ", i, " is on ",
            device_name(parts.back()->device()), ", tensor 0 on ", device_name(parts[0]->device()),
            ", expected one device");
    }
    const Concatenation plan = check_cat(parts, dim);
    check(is_known(plan.dtype) && element_size(plan.dtype) <= 16, "cat: dtype ", dtype_name(plan.dtype),
          " is not supported");
    const OnDevice on("cat", *parts[0]);
    TensorPtr out = Tensor::empty_strided(plan.shape, plan.strides, plan.dtype, on.device());
    concatenate(on, plan, *out);
    give(ret0, std::move(out), "cat");
  });
}

UNTORCH_SHIM aoti_torch_cuda_pad(AtenTensorHandle self, const std::int64_t* pad, std::int64_t pad_len_,
                                 const char* mode, double* value, AtenTensorHandle* ret0) {
  return pad_shim(self, pad, pad_len_, mode, value, ret0);
}

UNTORCH_SHIM aoti_torch_cuda_narrow(AtenTensorHandle self, std::int64_t dim, std::int64_t start, std::int64_t length,
                                    AtenTensorHandle* ret0) {
  return guarded("narrow",
                 [&] { give(ret0, narrow(cuda_input(self, "narrow", "self"), dim, start, length), "narrow"); });
}

UNTORCH_SHIM aoti_torch_cuda_slice_Tensor(AtenTensorHandle self, std::int64_t dim, std::int64_t* start,
                                          std::int64_t* end, std::int64_t step, AtenTensorHandle* ret0) {
  return guarded("slice",
                 [&] { give(ret0, slice(cuda_input(self, "slice", "self"), dim, start, end, step), "slice"); });
}

UNTORCH_SHIM aoti_torch_cuda_permute(AtenTensorHandle self, const std::int64_t* dims, std::int64_t dims_len_,
                                     AtenTensorHandle* ret0) {
  return guarded("permute",
                 [&] { give(ret0, permute(cuda_input(self, "permute", "self"), ints(dims, dims_len_)), "permute"); });
}

UNTORCH_SHIM aoti_torch_cuda_reshape(AtenTensorHandle self, const std::int64_t* shape, std::int64_t shape_len_,
                                     AtenTensorHandle* ret0) {
  return guarded("reshape",
                 [&] { give(ret0, reshape(cuda_input(self, "reshape", "self"), ints(shape, shape_len_)), "reshape"); });
}

UNTORCH_SHIM aoti_torch_cuda_squeeze_dim(AtenTensorHandle self, std::int64_t dim, AtenTensorHandle* ret0) {
  return guarded("squeeze", [&] { give(ret0, squeeze(cuda_input(self, "squeeze", "self"), dim), "squeeze"); });
}

UNTORCH_SHIM aoti_torch_cuda_view_dtype(AtenTensorHandle self, std::int32_t dtype, AtenTensorHandle* ret0) {
  return guarded("view_dtype",
                 [&] { give(ret0, view_dtype(cuda_input(self, "view_dtype", "self"), dtype), "view_dtype"); });
}

UNTORCH_SHIM aoti_torch_cuda_view_as_real(AtenTensorHandle self, AtenTensorHandle* ret0) {
  return guarded("view_as_real",
                 [&] { give(ret0, view_as_real(cuda_input(self, "view_as_real", "self")), "view_as_real"); });
}

UNTORCH_SHIM aoti_torch_cuda_view_as_complex(AtenTensorHandle self, AtenTensorHandle* ret0) {
  return guarded("view_as_complex",
                 [&] { give(ret0, view_as_complex(cuda_input(self, "view_as_complex", "self")), "view_as_complex"); });
}

UNTORCH_SHIM aoti_torch_cuda_resize_(AtenTensorHandle self, const std::int64_t* size, std::int64_t size_len_,
                                     std::int32_t* memory_format) {
  return guarded("resize_", [&] {
    Tensor& t = cuda_input(self, "resize_", "self");
    resize(t, ints(size, size_len_), memory_format);
  });
}

UNTORCH_SHIM aoti_torch_cuda_resize_as_(AtenTensorHandle self, AtenTensorHandle the_template,
                                        std::int32_t* memory_format) {
  return guarded("resize_as_", [&] {
    Tensor& t = cuda_input(self, "resize_as_", "self");
    resize_as(t, input(the_template, "resize_as_", "the_template"), memory_format);
  });
}

UNTORCH_SHIM aoti_torch_cuda_set__source_Tensor(AtenTensorHandle self, AtenTensorHandle source) {
  return guarded("set_", [&] { set_source(required(self, "set_", "self"), cuda_input(source, "set_", "source")); });
}

UNTORCH_SHIM aoti_torch_cuda__efficientzerotensor(const std::int64_t* size, std::int64_t size_len_, std::int32_t* dtype,
                                                  std::int32_t* layout, std::int32_t* device,
                                                  std::int32_t device_index_, std::int32_t*, AtenTensorHandle* ret0) {
  const char* op = "_efficientzerotensor";
  return guarded(op, [&] {
    const Factory f{dtype, layout, device, device_index_};
    const DType wanted = f.checked(op, DType::kFloat32);
    checked_numel(ints(size, size_len_));
    const OnDevice on(op, f.where());
    // PyTorch's has no memory and exists for autograd only; a compiled model reads it as plain zeros.
    give(ret0, Tensor::zeros(ints(size, size_len_), wanted, on.device()), op);
  });
}

UNTORCH_SHIM aoti_torch_cuda_hann_window(std::int64_t window_length, std::int32_t* dtype, std::int32_t* layout,
                                         std::int32_t* device, std::int32_t device_index_, std::int32_t*,
                                         AtenTensorHandle* ret0) {
  const char* op = "hann_window";
  return guarded(op, [&] {
    const Factory f{dtype, layout, device, device_index_};
    const DType wanted = f.checked(op, DType::kFloat32);
    check(window_length >= 0, op, ": 'window_length' is ", window_length, ", expected 0 or more");
    if (!is_floating(wanted)) {
      throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(wanted),
                  " is not supported, expected a floating type");
    }
    const OnDevice on(op, f.where());
    TensorPtr out = Tensor::empty(DimSpan(&window_length, 1), wanted, on.device());
    on.launched(kernels::cuda::hann_window(out->raw(), out->dtype(), window_length, on.stream()));
    give(ret0, std::move(out), op);
  });
}
