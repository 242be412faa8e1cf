// scatter, scatter_reduce and index_reduce (aoti_torch_cuda_*), and the older names for CUDA tensors.
//
// Reductions sort the entries by where they go and combine each place's in the order of the source, so that results
// have the same bits every time, floating sums included. A scatter without a reduction that names a place twice keeps
// any one of the values, as in PyTorch. An index out of range is reported as cuda/device_error.h says.
#include "kernels/cuda/indexing/scatter.h"

#include "shims/cpu/elementwise.h"
#include "shims/cuda/sorting.h"
#include "shims/device_ops.h"
#include "shims/reduce_op.h"

using namespace untorch;
using namespace untorch::shims;
using kernels::cuda::DeviceFault;
using kernels::cuda::ReduceOp;

namespace {

Tensor as_1d(const Tensor& t) {
  return t.dim() == 0 ? Tensor(t.storage(), t.storage_offset(), t.dtype(), Dims{1}, Dims{1}) : t;
}

void check_index_dtype(const Tensor& index, const char* op) {
  check(index.dtype() == DType::kInt64 || index.dtype() == DType::kInt32, op, ": 'index' is ",
        dtype_name(index.dtype()), ", expected int64 or int32");
}

ReduceOp reduce_op(Reduce reduce) {
  switch (reduce) {
    case Reduce::kProd:
      return ReduceOp::kProd;
    case Reduce::kMean:
      return ReduceOp::kMean;
    case Reduce::kAMax:
      return ReduceOp::kMax;
    case Reduce::kAMin:
      return ReduceOp::kMin;
    case Reduce::kSum:
      break;
  }
  return ReduceOp::kSum;
}

void check_reducible(DType dtype, const char* op) {
  if (is_floating(dtype) || is_integral(dtype) || dtype == DType::kBool) return;
  throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(dtype), " is not supported");
}

// The arguments of a scatter, at least 1-D. `source` is null for a scalar.
struct Scatter {
  Tensor out, self, index;
  std::unique_ptr<Tensor> source;
  std::int64_t dim = 0;
};

Scatter check_scatter(AtenTensorHandle out_handle, AtenTensorHandle self_handle, std::int64_t dim_arg,
                      AtenTensorHandle index_handle, const Tensor* source, const char* op) {
  const Tensor& out = cuda_input(out_handle, op, "out");
  const Tensor& self = cuda_input(self_handle, op, "self");
  const Tensor& index = cuda_input(index_handle, op, "index");
  check(out.sizes() == self.sizes() && out.dtype() == self.dtype(), op, ": 'out' is ", dtype_name(out.dtype()), " ",
        to_string(out.sizes()), ", expected ", dtype_name(self.dtype()), " ", to_string(self.sizes()), " as 'self'");
  check(is_known(self.dtype()) && element_size(self.dtype()) <= 16, op, ": dtype ", dtype_name(self.dtype()),
        " is not supported");
  check_index_dtype(index, op);
  Scatter s{as_1d(out), as_1d(self), as_1d(index), nullptr, normalize_dim(dim_arg, self.dim(), op)};
  const Dims &sizes = s.self.sizes(), &index_sizes = s.index.sizes();
  if (source != nullptr) s.source = std::make_unique<Tensor>(as_1d(*source));
  if (s.index.numel() == 0) return s;
  check(index_sizes.size() == sizes.size(), op, ": 'index' is ", index.dim(), "-D, expected ", self.dim(),
        "-D as 'self'");
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    check(static_cast<std::int64_t>(d) == s.dim || index_sizes[d] <= sizes[d], op, ": 'index' of shape ",
          to_string(index.sizes()), " is larger than 'self' of shape ", to_string(self.sizes()), " in dimension ", d);
  }
  if (source == nullptr) return s;
  check(source->dtype() == self.dtype(), op, ": 'src' is ", dtype_name(source->dtype()), ", expected ",
        dtype_name(self.dtype()), " as 'self'");
  bool fits = s.source->sizes().size() == sizes.size();
  for (std::size_t d = 0; fits && d < sizes.size(); ++d) fits = index_sizes[d] <= s.source->sizes()[d];
  check(fits, op, ": 'index' of shape ", to_string(index.sizes()), " is larger than 'src' of shape ",
        to_string(source->sizes()));
  return s;
}

// By address: two handles on one memory may have storages of their own.
bool may_overlap(const Tensor& a, const Tensor& b) {
  const auto begin = [](const Tensor& t) { return static_cast<const std::byte*>(t.raw()); };
  const auto end = [&](const Tensor& t) {
    return begin(t) + storage_extent(t.sizes(), t.strides()) * static_cast<std::int64_t>(element_size(t.dtype()));
  };
  return a.numel() != 0 && b.numel() != 0 && begin(a) < end(b) && begin(b) < end(a);
}

// Brings self into out. The source moves out of reach of the writes first.
void start(const OnDevice& on, Scatter& s) {
  if (s.source && may_overlap(*s.source, s.out)) {
    TensorPtr kept = Tensor::empty(s.source->sizes(), s.source->dtype(), on.device());
    copy(*kept, *s.source);
    s.source = std::move(kept);
  }
  if (s.out.numel() == 0) return;
  if (s.out.raw() != s.self.raw() || s.out.strides() != s.self.strides()) copy(s.out, s.self);
}

kernels::cuda::ScatterIndex scatter_index(const Scatter& s) {
  return {s.index.raw(), s.index.dtype() == DType::kInt64, s.out.size(s.dim), s.out.stride(s.dim)};
}

Dims out_strides(const Scatter& s) {
  Dims strides = s.out.strides();
  strides[static_cast<std::size_t>(s.dim)] = 0;
  return strides;
}

// `value`: the bytes of one element where there is no source.
void scatter_elements(const OnDevice& on, Scatter& s, const void* value, const char* op) {
  start(on, s);
  if (s.index.numel() == 0) return;
  Dims none;
  none.resize(s.index.sizes().size());
  const Dims to = out_strides(s), from = s.source ? s.source->strides() : none;
  const auto space = space_of<3>(op, s.index.sizes(), {DimSpan(s.index.strides()), DimSpan(to), DimSpan(from)});
  on.launched(kernels::cuda::scatter(space, scatter_index(s), s.out.raw(), s.source ? s.source->raw() : nullptr, value,
                                     static_cast<int>(element_size(s.out.dtype())),
                                     cuda::DeviceErrors::word(on.index()), on.stream()));
}

// The sorted places of an index space (operands of `space`: row-major order, out, index).
SortedSegments sorted_places(const OnDevice& on, const Strided<3>& space, const kernels::cuda::ScatterIndex& index,
                             std::int64_t largest, DeviceFault fault) {
  const auto n = static_cast<std::size_t>(space.numel);
  const StorageRef keys = on.scratch(n * sizeof(std::uint64_t)), ids = on.scratch(n * sizeof(std::uint32_t));
  on.launched(kernels::cuda::scatter_keys(space, index, static_cast<std::uint64_t*>(keys->data()),
                                          static_cast<std::uint32_t*>(ids->data()),
                                          cuda::DeviceErrors::word(on.index()), fault, on.stream()));
  return sort_segments(on, keys, ids, space.numel, largest);
}

std::int64_t largest_offset(const Tensor& t) {
  return std::max<std::int64_t>(storage_extent(t.sizes(), t.strides()), 1) - 1;
}

AOTITorchError scatter_src(AtenTensorHandle out, AtenTensorHandle self, std::int64_t dim, AtenTensorHandle index,
                           AtenTensorHandle src) {
  const char* op = "scatter";
  return guarded(op, [&] {
    const Tensor& source = cuda_input(src, op, "src");
    Scatter s = check_scatter(out, self, dim, index, &source, op);
    const OnDevice on(op, s.out, {&s.self, &s.index, &source});
    scatter_elements(on, s, nullptr, op);
  });
}

AOTITorchError scatter_reduce(AtenTensorHandle out, AtenTensorHandle self, std::int64_t dim, AtenTensorHandle index,
                              AtenTensorHandle src, const char* reduce, std::int32_t include_self) {
  const char* op = "scatter_reduce";
  return guarded(op, [&] {
    const ReduceOp how = reduce_op(parse_reduce(reduce, op));
    const Tensor& source = cuda_input(src, op, "src");
    Scatter s = check_scatter(out, self, dim, index, &source, op);
    check_reducible(s.out.dtype(), op);
    check_entries(s.index.numel(), op);
    const OnDevice on(op, s.out, {&s.self, &s.index, &source});
    start(on, s);
    if (s.index.numel() == 0) return;
    const Dims order = contiguous_strides(s.index.sizes()), to = out_strides(s);
    const auto space = space_of<3>(op, s.index.sizes(), {DimSpan(order), DimSpan(to), DimSpan(s.index.strides())});
    const auto sorted = sorted_places(on, space, scatter_index(s), largest_offset(s.out), DeviceFault::kScatterReduce);
    const auto slice = space_of<3>(op, DimSpan{}, {DimSpan{}, DimSpan{}, DimSpan{}});
    const auto positions = space_of<2>(op, s.index.sizes(), {DimSpan(order), DimSpan(s.source->strides())});
    on.launched(kernels::cuda::reduce_segments(sorted.segments, slice, positions, s.out.raw(), s.source->raw(),
                                               s.out.dtype(), how, include_self != 0, on.stream()));
  });
}

[[maybe_unused]] const bool registered = [] {
  cuda_ops.scatter_out = scatter_src;
  cuda_ops.scatter_reduce_out = scatter_reduce;
  return true;
}();

}  // namespace

UNTORCH_SHIM aoti_torch_cuda_scatter_src_out(AtenTensorHandle out, AtenTensorHandle self, std::int64_t dim,
                                             AtenTensorHandle index, AtenTensorHandle src) {
  return scatter_src(out, self, dim, index, src);
}

UNTORCH_SHIM aoti_torch_cuda_scatter_value_out(AtenTensorHandle out, AtenTensorHandle self, std::int64_t dim,
                                               AtenTensorHandle index, double value) {
  const char* op = "scatter";
  return guarded(op, [&] {
    Scatter s = check_scatter(out, self, dim, index, nullptr, op);
    const TensorPtr scalar = scalar_tensor(value, s.out.dtype());
    const OnDevice on(op, s.out, {&s.self, &s.index});
    scatter_elements(on, s, scalar->raw(), op);
  });
}

UNTORCH_SHIM aoti_torch_cuda_scatter_reduce_two_out(AtenTensorHandle out, AtenTensorHandle self, std::int64_t dim,
                                                    AtenTensorHandle index, AtenTensorHandle src, const char* reduce,
                                                    std::int32_t include_self) {
  return scatter_reduce(out, self, dim, index, src, reduce, include_self);
}

UNTORCH_SHIM aoti_torch_cuda_index_reduce(AtenTensorHandle self, std::int64_t dim_arg, AtenTensorHandle index,
                                          AtenTensorHandle source, const char* reduce, std::int32_t include_self,
                                          AtenTensorHandle* ret0) {
  const char* op = "index_reduce";
  return guarded(op, [&] {
    const Tensor& t = cuda_input(self, op, "self");
    const Tensor& ix = cuda_input(index, op, "index");
    const Tensor& src = cuda_input(source, op, "source");
    const Reduce how = parse_reduce(reduce, op);
    check(how != Reduce::kSum, op, ": 'reduce' is \"sum\", expected \"prod\", \"mean\", \"amax\" or \"amin\"");
    check(ix.dim() <= 1, op, ": 'index' must be 1-D, got ", ix.dim(), "-D");
    check_index_dtype(ix, op);
    check(src.dtype() == t.dtype(), op, ": 'source' is ", dtype_name(src.dtype()), ", expected ", dtype_name(t.dtype()),
          " as 'self'");
    check_reducible(t.dtype(), op);
    const std::int64_t dim = normalize_dim(dim_arg, t.dim(), op);
    const Tensor from = as_1d(src), positions_1d = as_1d(ix);
    Dims expected = as_1d(t).sizes();
    expected[static_cast<std::size_t>(dim)] = ix.numel();
    check(from.sizes() == expected, op, ": 'source' has shape ", to_string(src.sizes()), ", expected ",
          to_string(expected));
    check_entries(ix.numel(), op);
    const OnDevice on(op, t, {&ix, &src});
    TensorPtr result = clone_like(t);
    const Tensor out = as_1d(*result);
    if (ix.numel() != 0) {
      // One entry for each index; a slice is everything across the dimension.
      const std::int64_t n = ix.numel(), one = 1, zero = 0, step = from.stride(dim);
      const DimSpan shape(&n, 1), order(&one, 1);
      const auto space = space_of<3>(op, shape, {order, DimSpan(&zero, 1), DimSpan(positions_1d.strides())});
      const kernels::cuda::ScatterIndex where{positions_1d.raw(), ix.dtype() == DType::kInt64, out.size(dim),
                                              out.stride(dim)};
      const auto sorted = sorted_places(on, space, where, largest_offset(out), DeviceFault::kIndexReduce);
      const auto slice_shape = without(out.sizes(), dim), slice_out = without(out.strides(), dim),
                 slice_from = without(from.strides(), dim);
      const Dims slice_order = contiguous_strides(slice_shape);
      const auto slice = space_of<3>(op, slice_shape, {DimSpan(slice_order), DimSpan(slice_out), DimSpan(slice_from)});
      const auto positions = space_of<2>(op, shape, {order, DimSpan(&step, 1)});
      on.launched(kernels::cuda::reduce_segments(sorted.segments, slice, positions, out.raw(), from.raw(), out.dtype(),
                                                 reduce_op(how), include_self != 0, on.stream()));
    }
    give(ret0, std::move(result), op);
  });
}
