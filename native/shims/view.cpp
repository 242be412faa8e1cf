// Views and shape changes: narrow, slice, permute, reshape, squeeze, dtype and complex views, resize_, set_.
#include "shims/view.h"

#include <algorithm>

#include "shims/layout.h"
#include "shims/op.h"
#include "tensor/device.h"
#include "tensor/iteration.h"

namespace untorch::shims {

bool view_strides(const Tensor& t, DimSpan shape, Dims& strides) {
  strides.resize(shape.size());
  if (t.numel() == 0) {
    strides = DimSpan(shape).size() == t.sizes().size() && std::equal(shape.begin(), shape.end(), t.sizes().begin())
                  ? t.strides()
                  : contiguous_strides(shape);
    return true;
  }
  if (t.dim() == 0) {
    std::fill(strides.begin(), strides.end(), 1);
    return true;
  }
  std::int64_t target = static_cast<std::int64_t>(shape.size()) - 1;
  std::int64_t base = t.strides()[t.sizes().size() - 1], chunk = 1, placed = 1;
  for (std::size_t d = t.sizes().size(); d-- > 0;) {
    chunk *= t.sizes()[d];
    const bool ends = d == 0 || (t.sizes()[d - 1] != 1 && t.strides()[d - 1] != chunk * base);
    if (!ends) continue;
    while (target >= 0 && (placed < chunk || shape[static_cast<std::size_t>(target)] == 1)) {
      strides[static_cast<std::size_t>(target)] = placed * base;
      placed *= shape[static_cast<std::size_t>(target)];
      --target;
    }
    if (placed != chunk) return false;
    if (d > 0) {
      base = t.strides()[d - 1];
      chunk = placed = 1;
    }
  }
  return target == -1;
}

TensorPtr narrow(const Tensor& t, std::int64_t dim_arg, std::int64_t start, std::int64_t length) {
  check(t.dim() > 0, "narrow: a 0-D tensor has no dimension to narrow");
  const auto dim = static_cast<std::size_t>(normalize_dim(dim_arg, t.dim(), "narrow"));
  const std::int64_t size = t.sizes()[dim];
  check(length >= 0, "narrow: 'length' is ", length, ", expected 0 or more");
  check(start >= -size && start <= size, "narrow: 'start' is ", start, ", expected ", -size, " to ", size);
  if (start < 0) start += size;
  check(start <= size - length, "narrow: start ", start, " and length ", length, " leave dimension ", dim, " of size ",
        size);
  Dims sizes = t.sizes();
  sizes[dim] = length;
  return std::make_unique<Tensor>(t.storage(), t.storage_offset() + start * t.strides()[dim], t.dtype(), sizes,
                                  t.strides());
}

TensorPtr slice(const Tensor& t, std::int64_t dim_arg, const std::int64_t* start, const std::int64_t* end,
                std::int64_t step) {
  check(t.dim() > 0, "slice: a 0-D tensor cannot be sliced");
  check(step > 0, "slice: 'step' is ", step, ", expected 1 or more");
  const auto dim = static_cast<std::size_t>(normalize_dim(dim_arg, t.dim(), "slice"));
  const std::int64_t size = t.sizes()[dim];
  auto wrapped = [size](std::int64_t at) { return std::clamp<std::int64_t>(at < 0 ? at + size : at, 0, size); };
  const std::int64_t first = start == nullptr ? 0 : wrapped(*start);
  const std::int64_t last = std::max(first, end == nullptr ? size : wrapped(*end));
  Dims sizes = t.sizes(), strides = t.strides();
  sizes[dim] = (last - first) / step + ((last - first) % step != 0 ? 1 : 0);
  strides[dim] *= step;
  return std::make_unique<Tensor>(t.storage(), t.storage_offset() + first * t.strides()[dim], t.dtype(), sizes,
                                  strides);
}

TensorPtr permute(const Tensor& t, DimSpan dims) {
  check(static_cast<std::int64_t>(dims.size()) == t.dim(), "permute: ", dims.size(), " dimensions for a ", t.dim(),
        "-D tensor");
  Dims sizes = t.sizes(), strides = t.strides();
  std::vector<bool> seen(sizes.size(), false);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const auto d = static_cast<std::size_t>(normalize_dim(dims[i], t.dim(), "permute"));
    check(!seen[d], "permute: dimension ", d, " appears twice in ", to_string(dims));
    seen[d] = true;
    sizes[i] = t.sizes()[d];
    strides[i] = t.strides()[d];
  }
  return std::make_unique<Tensor>(t.storage(), t.storage_offset(), t.dtype(), sizes, strides);
}

TensorPtr reshape(const Tensor& t, DimSpan shape) {
  Dims sizes(shape);
  std::int64_t known = 1, open = -1;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == -1) {
      check(open < 0, "reshape: only one size of ", to_string(sizes), " may be -1");
      open = static_cast<std::int64_t>(d);
    } else {
      check(sizes[d] >= 0, "reshape: negative size in ", to_string(sizes));
      known *= sizes[d];
    }
  }
  const bool fits = open < 0 ? known == t.numel() : known != 0 && t.numel() % known == 0;
  check(fits, "reshape: shape ", to_string(sizes), " does not fit ", t.numel(), " elements");
  if (open >= 0) sizes[static_cast<std::size_t>(open)] = t.numel() / known;
  Dims strides;
  if (view_strides(t, sizes, strides)) {
    return std::make_unique<Tensor>(t.storage(), t.storage_offset(), t.dtype(), sizes, strides);
  }
  const TensorPtr dense = Tensor::empty(t.sizes(), t.dtype(), t.device());
  copy(*dense, t);
  return dense->view(sizes, contiguous_strides(sizes), 0);
}

TensorPtr squeeze(const Tensor& t, std::int64_t dim_arg) {
  const std::int64_t dim = normalize_dim(dim_arg, t.dim(), "squeeze");
  const bool drops = t.dim() > 0 && t.size(dim) == 1;
  const std::vector<std::int64_t> sizes =
      drops ? without(t.sizes(), dim) : std::vector<std::int64_t>(t.sizes().begin(), t.sizes().end());
  const std::vector<std::int64_t> strides =
      drops ? without(t.strides(), dim) : std::vector<std::int64_t>(t.strides().begin(), t.strides().end());
  return std::make_unique<Tensor>(t.storage(), t.storage_offset(), t.dtype(), sizes, strides);
}

TensorPtr view_as_real(const Tensor& t) {
  check(is_complex(t.dtype()), "view_as_real: 'self' is ", dtype_name(t.dtype()), ", expected a complex dtype");
  std::vector<std::int64_t> sizes(t.sizes().begin(), t.sizes().end()), strides;
  for (const std::int64_t stride : t.strides()) strides.push_back(stride * 2);
  sizes.push_back(2);
  strides.push_back(1);
  const DType dtype = t.dtype() == DType::kComplex128  ? DType::kFloat64
                      : t.dtype() == DType::kComplex64 ? DType::kFloat32
                                                       : DType::kFloat16;
  return std::make_unique<Tensor>(t.storage(), t.storage_offset() * 2, dtype, sizes, strides);
}

TensorPtr view_as_complex(const Tensor& t) {
  const char* op = "view_as_complex";
  check(t.dtype() == DType::kFloat16 || t.dtype() == DType::kFloat32 || t.dtype() == DType::kFloat64, op,
        ": 'self' is ", dtype_name(t.dtype()), ", expected float16, float32 or float64");
  check(t.dim() > 0 && t.size(-1) == 2, op, ": the last dimension must have size 2, got shape ", to_string(t.sizes()));
  check(t.stride(-1) == 1, op, ": the last dimension must have stride 1, got ", t.stride(-1));
  check(t.storage_offset() % 2 == 0, op, ": the storage offset must be even, got ", t.storage_offset());
  std::vector<std::int64_t> sizes = without(t.sizes(), t.dim() - 1), strides = without(t.strides(), t.dim() - 1);
  for (std::int64_t& stride : strides) {
    check(stride % 2 == 0, op, ": strides must be even, got ", to_string(t.strides()));
    stride /= 2;
  }
  const DType dtype = t.dtype() == DType::kFloat64   ? DType::kComplex128
                      : t.dtype() == DType::kFloat32 ? DType::kComplex64
                                                     : DType::kComplex32;
  return std::make_unique<Tensor>(t.storage(), t.storage_offset() / 2, dtype, sizes, strides);
}

TensorPtr view_dtype(const Tensor& t, std::int32_t code) {
  const char* op = "view_dtype";
  const auto dtype = static_cast<DType>(code);
  check(is_known(dtype), op, ": unknown dtype code ", code);
  const auto from = static_cast<std::int64_t>(element_size(t.dtype())),
             to = static_cast<std::int64_t>(element_size(dtype));
  Dims sizes = t.sizes(), strides = t.strides();
  std::int64_t offset = t.storage_offset();
  if (from != to) {
    check(t.dim() > 0, op, ": a 0-D tensor of ", dtype_name(t.dtype()), " cannot be viewed as ", dtype_name(dtype),
          ", which has another size");
    const std::size_t last = sizes.size() - 1;
    check(strides[last] == 1 || sizes[last] == 1 || t.numel() == 0, op, ": the last dimension must have stride 1, got ",
          strides[last]);
    if (from > to) {
      const std::int64_t ratio = from / to;
      for (std::size_t d = 0; d < last; ++d) strides[d] *= ratio;
      sizes[last] *= ratio;
      offset *= ratio;
    } else {
      const std::int64_t ratio = to / from;
      check(sizes[last] % ratio == 0, op, ": the last dimension's size ", sizes[last], " is no multiple of ", ratio);
      check(offset % ratio == 0, op, ": the storage offset ", offset, " is no multiple of ", ratio);
      for (std::size_t d = 0; d < last; ++d) {
        check(strides[d] % ratio == 0, op, ": stride ", strides[d], " of dimension ", d, " is no multiple of ", ratio);
        strides[d] /= ratio;
      }
      sizes[last] /= ratio;
      offset /= ratio;
    }
    strides[last] = 1;
  }
  return std::make_unique<Tensor>(t.storage(), offset, dtype, sizes, strides);
}

namespace {

// Gives the handle new sizes and strides; memory that is too small is replaced by a larger block with the same start.
void give_shape(Tensor& t, DimSpan sizes, DimSpan strides) {
  const std::int64_t needed = storage_extent(sizes, strides) + t.storage_offset();
  const auto itemsize = static_cast<std::int64_t>(element_size(t.dtype()));
  StorageRef storage = t.storage();
  if (needed * itemsize > static_cast<std::int64_t>(storage->nbytes())) {
    storage = StorageRef::allocate(static_cast<std::size_t>(needed * itemsize), t.device());
    if (t.device().type == DeviceType::kCPU) {
      std::memcpy(storage->data(), t.storage()->data(), t.storage()->nbytes());
    } else {
      device_table(t.device().type)
          .copy_bytes(storage->data(), t.device(), t.storage()->data(), t.device(), t.storage()->nbytes());
    }
  }
  t = Tensor(std::move(storage), t.storage_offset(), t.dtype(), sizes, strides);
}

void check_resize_format(const std::int32_t* memory_format, const char* op) {
  if (memory_format != nullptr && *memory_format != 0 && *memory_format != 1) {
    throw_error(ErrorKind::kUnsupported, op, ": memory format code ", *memory_format,
                " is not supported, expected contiguous (0) or preserve (1)");
  }
}

}  // namespace

void resize(Tensor& t, DimSpan sizes, const std::int32_t* memory_format) {
  check_resize_format(memory_format, "resize_");
  give_shape(t, sizes, contiguous_strides(sizes));
}

void resize_as(Tensor& t, const Tensor& model, const std::int32_t* memory_format) {
  check_resize_format(memory_format, "resize_as_");
  const bool preserve = memory_format != nullptr && *memory_format == 1 && is_dense(model.sizes(), model.strides());
  const Dims sizes = model.sizes(), strides = preserve ? model.strides() : contiguous_strides(model.sizes());
  give_shape(t, sizes, strides);
}

void set_source(Tensor& t, const Tensor& from) {
  check(!t.defined() || t.dtype() == from.dtype(), "set_: 'source' is ", dtype_name(from.dtype()), ", expected ",
        dtype_name(t.dtype()), " as 'self'");
  if (&t != &from) t = from;
}

}  // namespace untorch::shims

using namespace untorch;
using namespace untorch::shims;

UNTORCH_OP(narrow,
           (AtenTensorHandle self, std::int64_t dim, std::int64_t start, std::int64_t length, AtenTensorHandle* ret0),
           self, dim, start, length, ret0) {
  give(ret0, narrow(op.input(self, "self"), dim, start, length), op);
}

UNTORCH_SHIM aoti_torch_aten_narrow(AtenTensorHandle self, std::int64_t dim, std::int64_t start, std::int64_t length,
                                    AtenTensorHandle* ret0) {
  return guarded("narrow", [&] { give(ret0, narrow(input(self, "narrow", "self"), dim, start, length), "narrow"); });
}

UNTORCH_OP_AS("slice", slice_Tensor,
              (AtenTensorHandle self, std::int64_t dim, std::int64_t* start, std::int64_t* end, std::int64_t step,
               AtenTensorHandle* ret0),
              self, dim, start, end, step, ret0) {
  give(ret0, slice(op.input(self, "self"), dim, start, end, step), op);
}

UNTORCH_OP(permute, (AtenTensorHandle self, const std::int64_t* dims, std::int64_t dims_len, AtenTensorHandle* ret0),
           self, dims, dims_len, ret0) {
  give(ret0, permute(op.input(self, "self"), ints(dims, dims_len)), op);
}

UNTORCH_OP(reshape, (AtenTensorHandle self, const std::int64_t* shape, std::int64_t shape_len, AtenTensorHandle* ret0),
           self, shape, shape_len, ret0) {
  give(ret0, reshape(op.input(self, "self"), ints(shape, shape_len)), op);
}

UNTORCH_OP_AS("squeeze", squeeze_dim, (AtenTensorHandle self, std::int64_t dim, AtenTensorHandle* ret0), self, dim,
              ret0) {
  give(ret0, squeeze(op.input(self, "self"), dim), op);
}

UNTORCH_OP(view_dtype, (AtenTensorHandle self, std::int32_t dtype, AtenTensorHandle* ret0), self, dtype, ret0) {
  give(ret0, view_dtype(op.input(self, "self"), dtype), op);
}

UNTORCH_SHIM aoti_torch_view_dtype(AtenTensorHandle self, std::int32_t dtype, AtenTensorHandle* ret) {
  return guarded("view_dtype", [&] { give(ret, view_dtype(input(self, "view_dtype", "self"), dtype), "view_dtype"); });
}

UNTORCH_OP(view_as_real, (AtenTensorHandle self, AtenTensorHandle* ret0), self, ret0) {
  give(ret0, view_as_real(op.input(self, "self")), op);
}

UNTORCH_SHIM aoti_torch_view_as_real(AtenTensorHandle self, AtenTensorHandle* ret) {
  return guarded("view_as_real", [&] { give(ret, view_as_real(input(self, "view_as_real", "self")), "view_as_real"); });
}

UNTORCH_OP(view_as_complex, (AtenTensorHandle self, AtenTensorHandle* ret0), self, ret0) {
  give(ret0, view_as_complex(op.input(self, "self")), op);
}

UNTORCH_OP(resize_,
           (AtenTensorHandle self, const std::int64_t* size, std::int64_t size_len, std::int32_t* memory_format), self,
           size, size_len, memory_format) {
  resize(op.input(self, "self"), ints(size, size_len), memory_format);
}

// The template gives a shape; it may be on any device.
UNTORCH_OP(resize_as_, (AtenTensorHandle self, AtenTensorHandle the_template, std::int32_t* memory_format), self,
           the_template, memory_format) {
  resize_as(op.input(self, "self"), input(the_template, op, "the_template"), memory_format);
}

UNTORCH_OP_AS("set_", set__source_Tensor, (AtenTensorHandle self, AtenTensorHandle source), self, source) {
  set_source(required(self, op, "self"), op.input(source, "source"));
}
