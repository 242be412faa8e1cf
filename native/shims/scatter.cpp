// scatter, scatter_reduce and index_reduce.
//
// On the GPU, reductions sort the entries by where they go and combine each place's in the order of the source, so that
// results have the same bits every time, floating sums included. A scatter without a reduction that names a place twice
// keeps any one of the values, as in PyTorch. An index out of range is reported as cuda/device_error.h says.
#include "kernels/scatter.h"

#include <algorithm>

#include "shims/broadcast.h"
#include "shims/layout.h"
#include "shims/op.h"
#include "shims/promotion.h"
#include "shims/reduce_op.h"
#include "shims/segments.h"
#include "tensor/iteration.h"

using namespace untorch;
using namespace untorch::shims;
using kernels::ReduceOp;
using kernels::ScatterParams;
using kernels::cuda::DeviceFault;
using kernels::cuda::ScatterIndex;

namespace {

Tensor as_1d(const Tensor& t) {
  return t.dim() == 0 ? Tensor(t.storage(), t.storage_offset(), t.dtype(), Dims{1}, Dims{1}) : t;
}

void check_index_dtype(const Op& op, const Tensor& index) {
  check(index.dtype() == DType::kInt64 || index.dtype() == DType::kInt32, op, ": 'index' is ",
        dtype_name(index.dtype()), ", expected int64 or int32");
}

void check_reducible(const Op& op, DType dtype) {
  if (is_floating(dtype) || is_integral(dtype) || dtype == DType::kBool) return;
  throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(dtype), " is not supported");
}

// The index as the CPU's kernels take it: int64, row-major, within [0, size) along `dim`.
TensorPtr checked_index(const Op& op, const Tensor& index, std::int64_t dim, std::int64_t size) {
  TensorPtr wide = to_dtype(index, DType::kInt64);
  const auto range = kernels::cpu::index_range({wide->data<std::int64_t>(), static_cast<std::size_t>(wide->numel())});
  check(range.low >= 0 && range.high < size, op, ": index ", range.low < 0 ? range.low : range.high,
        " is out of bounds for dimension ", dim, " with size ", size);
  return wide;
}

// The arguments of a scatter, at least 1-D. `source` is null for a scalar.
struct Scatter {
  Tensor out, self, index;
  std::unique_ptr<Tensor> source;
  std::int64_t dim = 0;
};

Scatter check_scatter(const Op& op, AtenTensorHandle out_handle, AtenTensorHandle self_handle, std::int64_t dim_arg,
                      AtenTensorHandle index_handle, const Tensor* source) {
  const Tensor &out = op.input(out_handle, "out"), &self = op.input(self_handle, "self");
  const Tensor& index = op.input(index_handle, "index");
  check(out.sizes() == self.sizes() && out.dtype() == self.dtype(), op, ": 'out' is ", dtype_name(out.dtype()), " ",
        to_string(out.sizes()), ", expected ", dtype_name(self.dtype()), " ", to_string(self.sizes()), " as 'self'");
  check(is_known(self.dtype()) && element_size(self.dtype()) <= 16, op, ": dtype ", dtype_name(self.dtype()),
        " is not supported");
  check_index_dtype(op, index);
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
void start(Scatter& s) {
  if (s.source && may_overlap(*s.source, s.out)) s.source = clone_contiguous(*s.source);
  if (s.out.numel() == 0) return;
  if (s.out.raw() != s.self.raw() || s.out.strides() != s.self.strides()) copy(s.out, s.self);
}

ScatterParams cpu_params(const Op& op, const Scatter& s, const Tensor& index) {
  ScatterParams params;
  params.lanes = lanes<3>(op, s.dim, {&s.out, s.source.get(), &index});
  params.dtype = s.out.dtype();
  params.out = s.out.raw();
  params.source = s.source->raw();
  params.index = index.data<std::int64_t>();
  return params;
}

ScatterIndex cuda_index(const Scatter& s) {
  return {s.index.raw(), s.index.dtype() == DType::kInt64, s.out.size(s.dim), s.out.stride(s.dim)};
}

Dims out_strides(const Scatter& s) {
  Dims strides = s.out.strides();
  strides[static_cast<std::size_t>(s.dim)] = 0;
  return strides;
}

// `scalar`: 0-D on the CPU, where there is no source.
void scatter(const Op& op, Scatter s, const Tensor* scalar) {
  run(
      op, {&s.out, &s.self, &s.index, s.source.get()},
      [&] {
        TensorPtr index;
        if (s.index.numel() != 0) index = checked_index(op, s.index, s.dim, s.out.size(s.dim));
        start(s);
        if (!index) return;
        if (scalar != nullptr) s.source = std::make_unique<Tensor>(expand(*scalar, s.index.sizes(), op, "value"));
        kernels::cpu::scatter(cpu_params(op, s, *index));
      },
      [&](const auto& on) {
        start(s);
        if (s.index.numel() == 0) return;
        Dims none;
        none.resize(s.index.sizes().size());
        const Dims to = out_strides(s), from = s.source ? s.source->strides() : none;
        const auto space = strided<3>(op, s.index.sizes(), {DimSpan(s.index.strides()), DimSpan(to), DimSpan(from)});
        on.launched(kernels::cuda::scatter(space, cuda_index(s), s.out.raw(), s.source ? s.source->raw() : nullptr,
                                           scalar == nullptr ? nullptr : scalar->raw(),
                                           static_cast<int>(element_size(s.out.dtype())), on.faults(), on.stream()));
      });
}

// The sorted places of an index space (operands of `space`: row-major order, out, index).
[[maybe_unused]] SortedSegments sorted_places(const OnDevice& on, const Strided<3>& space, const ScatterIndex& index,
                                              const Tensor& out, DeviceFault fault) {
  const auto n = static_cast<std::size_t>(space.numel);
  const StorageRef keys = on.scratch(n * sizeof(std::uint64_t)), ids = on.scratch(n * sizeof(std::uint32_t));
  on.launched(kernels::cuda::scatter_keys(space, index, static_cast<std::uint64_t*>(keys->data()),
                                          static_cast<std::uint32_t*>(ids->data()), on.faults(), fault, on.stream()));
  const std::int64_t largest = std::max<std::int64_t>(storage_extent(out.sizes(), out.strides()), 1) - 1;
  return sort_segments(on, keys, ids, space.numel, largest);
}

void scatter_src(const Op& op, AtenTensorHandle out, AtenTensorHandle self, std::int64_t dim, AtenTensorHandle index,
                 AtenTensorHandle src) {
  scatter(op, check_scatter(op, out, self, dim, index, &op.input(src, "src")), nullptr);
}

void scatter_reduce(const Op& op, AtenTensorHandle out, AtenTensorHandle self, std::int64_t dim, AtenTensorHandle index,
                    AtenTensorHandle src, const char* reduce, bool include_self) {
  const ReduceOp how = parse_reduce(reduce, op);
  Scatter s = check_scatter(op, out, self, dim, index, &op.input(src, "src"));
  check_reducible(op, s.out.dtype());
  if (op.on_cuda()) check_entries(s.index.numel(), op);
  run(
      op, {&s.out, &s.self, &s.index, s.source.get()},
      [&] {
        TensorPtr wide;
        if (s.index.numel() != 0) wide = checked_index(op, s.index, s.dim, s.out.size(s.dim));
        start(s);
        if (wide) kernels::cpu::scatter_reduce(cpu_params(op, s, *wide), s.out.size(s.dim), how, include_self);
      },
      [&](const auto& on) {
        start(s);
        if (s.index.numel() == 0) return;
        const Dims order = contiguous_strides(s.index.sizes()), to = out_strides(s);
        const auto space = strided<3>(op, s.index.sizes(), {DimSpan(order), DimSpan(to), DimSpan(s.index.strides())});
        const auto sorted = sorted_places(on, space, cuda_index(s), s.out, DeviceFault::kScatterReduce);
        const auto slice = strided<3>(op, DimSpan{}, {DimSpan{}, DimSpan{}, DimSpan{}});
        const auto positions = strided<2>(op, s.index.sizes(), {DimSpan(order), DimSpan(s.source->strides())});
        on.launched(kernels::cuda::reduce_segments(sorted.segments, slice, positions, s.out.raw(), s.source->raw(),
                                                   s.out.dtype(), how, include_self, on.stream()));
      });
}

// One entry for each index; a slice is everything across the dimension.
[[maybe_unused]] void index_reduce_on(const OnDevice& on, const Op& op, const Tensor& out, std::int64_t dim,
                                      const Tensor& index, const Tensor& source, ReduceOp how, bool include_self) {
  const std::int64_t n = index.numel(), one = 1, zero = 0, step = source.stride(dim);
  const DimSpan shape(&n, 1), order(&one, 1);
  const auto space = strided<3>(op, shape, {order, DimSpan(&zero, 1), DimSpan(index.strides())});
  const ScatterIndex where{index.raw(), index.dtype() == DType::kInt64, out.size(dim), out.stride(dim)};
  const auto sorted = sorted_places(on, space, where, out, DeviceFault::kIndexReduce);
  const auto slice_shape = without(out.sizes(), dim), slice_out = without(out.strides(), dim),
             slice_from = without(source.strides(), dim);
  const Dims slice_order = contiguous_strides(slice_shape);
  const auto slice = strided<3>(op, slice_shape, {DimSpan(slice_order), DimSpan(slice_out), DimSpan(slice_from)});
  const auto positions = strided<2>(op, shape, {order, DimSpan(&step, 1)});
  on.launched(kernels::cuda::reduce_segments(sorted.segments, slice, positions, out.raw(), source.raw(), out.dtype(),
                                             how, include_self, on.stream()));
}

}  // namespace

UNTORCH_OP_AS("scatter", scatter_src_out,
              (AtenTensorHandle out, AtenTensorHandle self, std::int64_t dim, AtenTensorHandle index,
               AtenTensorHandle src),
              out, self, dim, index, src) {
  scatter_src(op, out, self, dim, index, src);
}

UNTORCH_SHIM aoti_torch_scatter_out(AtenTensorHandle out, AtenTensorHandle self, std::int64_t dim,
                                    AtenTensorHandle index, AtenTensorHandle src) {
  return guarded("scatter", [&] { scatter_src(Op::of("scatter", out, "out"), out, self, dim, index, src); });
}

UNTORCH_OP_AS("scatter", scatter_value_out,
              (AtenTensorHandle out, AtenTensorHandle self, std::int64_t dim, AtenTensorHandle index, double value),
              out, self, dim, index, value) {
  Scatter s = check_scatter(op, out, self, dim, index, nullptr);
  const TensorPtr scalar = scalar_tensor(value, s.out.dtype());
  scatter(op, std::move(s), scalar.get());
}

UNTORCH_OP_AS("scatter_reduce", scatter_reduce_two_out,
              (AtenTensorHandle out, AtenTensorHandle self, std::int64_t dim, AtenTensorHandle index,
               AtenTensorHandle src, const char* reduce, std::int32_t include_self),
              out, self, dim, index, src, reduce, include_self) {
  scatter_reduce(op, out, self, dim, index, src, reduce, include_self != 0);
}

UNTORCH_SHIM aoti_torch_scatter_reduce_out(AtenTensorHandle out, AtenTensorHandle self, std::int64_t dim,
                                           AtenTensorHandle index, AtenTensorHandle src, const char* reduce,
                                           std::int32_t include_self) {
  return guarded("scatter_reduce", [&] {
    scatter_reduce(Op::of("scatter_reduce", out, "out"), out, self, dim, index, src, reduce, include_self != 0);
  });
}

UNTORCH_OP(index_reduce,
           (AtenTensorHandle self, std::int64_t dim_arg, AtenTensorHandle index, AtenTensorHandle source,
            const char* reduce, std::int32_t include_self, AtenTensorHandle* ret0),
           self, dim_arg, index, source, reduce, include_self, ret0) {
  const Tensor &t = op.input(self, "self"), &ix = op.input(index, "index"), &src = op.input(source, "source");
  const ReduceOp how = parse_reduce(reduce, op);
  check(how != ReduceOp::kSum, op, ": 'reduce' is \"sum\", expected \"prod\", \"mean\", \"amax\" or \"amin\"");
  check(ix.dim() <= 1, op, ": 'index' must be 1-D, got ", ix.dim(), "-D");
  check_index_dtype(op, ix);
  check(src.dtype() == t.dtype(), op, ": 'source' is ", dtype_name(src.dtype()), ", expected ", dtype_name(t.dtype()),
        " as 'self'");
  check_reducible(op, t.dtype());
  const std::int64_t dim = normalize_dim(dim_arg, t.dim(), op);
  Dims expected = as_1d(t).sizes();
  expected[static_cast<std::size_t>(dim)] = ix.numel();
  check(as_1d(src).sizes() == expected, op, ": 'source' has shape ", to_string(src.sizes()), ", expected ",
        to_string(expected));
  if (op.on_cuda()) check_entries(ix.numel(), op);
  TensorPtr out;
  run(
      op, {&t, &ix, &src},
      [&] {
        const TensorPtr flat = checked_index(op, ix, dim, lane_size(t, dim));
        out = clone_like(t);
        if (ix.numel() == 0 || src.numel() == 0) return;
        Dims strides;
        strides.resize(expected.size());
        strides[static_cast<std::size_t>(dim)] = 1;
        const Tensor everywhere(flat->storage(), flat->storage_offset(), DType::kInt64, expected, strides);
        const Scatter s{as_1d(*out), as_1d(t), everywhere, std::make_unique<Tensor>(as_1d(src)), dim};
        kernels::cpu::scatter_reduce(cpu_params(op, s, everywhere), s.out.size(dim), how, include_self != 0);
      },
      [&](const auto& on) {
        out = clone_like(t);
        if (ix.numel() != 0) {
          index_reduce_on(on, op, as_1d(*out), dim, as_1d(ix), as_1d(src), how, include_self != 0);
        }
      });
  give(ret0, std::move(out), op);
}
