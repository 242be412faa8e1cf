// The scatter family, index_reduce and segment_reduce (aoti_torch_cpu_* and the older names).
#include <algorithm>

#include "shims/cpu/elementwise.h"
#include "shims/device_ops.h"
#include "shims/reduce_op.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

// Every index within [0, size) along `dim`; `index` is int64 and row-major.
void check_indices(const Tensor& index, std::int64_t dim, std::int64_t size, const char* op) {
  const auto* values = index.data<std::int64_t>();
  const std::int64_t n = index.numel();
  std::int64_t low = 0, high = -1;
  for (std::int64_t i = 0; i < n; ++i) {
    low = std::min(low, values[i]);
    high = std::max(high, values[i]);
  }
  check(low >= 0 && high < size, op, ": index ", low < 0 ? low : high, " is out of bounds for dimension ", dim,
        " with size ", size);
}

TensorPtr int64_index(const Tensor& index, const char* op) {
  check(index.dtype() == DType::kInt64 || index.dtype() == DType::kInt32, op, ": 'index' is ",
        dtype_name(index.dtype()), ", expected int64 or int32");
  return to_dtype(index, DType::kInt64);
}

// `t`'s sizes with a 0-D tensor seen as one element.
Dims at_least_1d(const Tensor& t) { return t.dim() == 0 ? Dims{1} : t.sizes(); }

struct Scatter {
  Tensor out, index;  // at least 1-D; index int64, row-major
  TensorPtr source;   // null for a scalar
  std::int64_t dim;
};

Tensor as_1d(const Tensor& t) {
  return t.dim() == 0 ? Tensor(t.storage(), t.storage_offset(), t.dtype(), Dims{1}, Dims{1}) : t;
}

// Checks everything, then brings `self` into `out`.
Scatter prepare(AtenTensorHandle out_handle, AtenTensorHandle self, std::int64_t dim_arg, AtenTensorHandle index_handle,
                AtenTensorHandle src, bool same_dtype, const char* op) {
  const Tensor& out = cpu_input(out_handle, op, "out");
  const Tensor& t = cpu_input(self, op, "self");
  const Tensor& index = cpu_input(index_handle, op, "index");
  check(out.sizes() == t.sizes() && out.dtype() == t.dtype(), op, ": 'out' is ", dtype_name(out.dtype()), " ",
        to_string(out.sizes()), ", expected ", dtype_name(t.dtype()), " ", to_string(t.sizes()), " as 'self'");
  Scatter s{as_1d(out), Tensor(), nullptr, normalize_dim(dim_arg, t.dim(), op)};
  s.index = as_1d(*int64_index(index, op));
  const Dims sizes = at_least_1d(t), index_sizes = s.index.sizes();
  if (s.index.numel() != 0) {
    check(index_sizes.size() == sizes.size(), op, ": 'index' is ", index.dim(), "-D, expected ", t.dim(),
          "-D as 'self'");
    const Tensor* source = src == nullptr ? nullptr : &cpu_input(src, op, "src");
    for (std::size_t d = 0; d < sizes.size(); ++d) {
      const bool fits = static_cast<std::int64_t>(d) == s.dim || index_sizes[d] <= sizes[d];
      check(fits, op, ": 'index' of shape ", to_string(index.sizes()), " is larger than 'self' of shape ",
            to_string(t.sizes()), " in dimension ", d);
    }
    check_indices(s.index, s.dim, sizes[static_cast<std::size_t>(s.dim)], op);
    if (source != nullptr) {
      check(!same_dtype || source->dtype() == t.dtype(), op, ": 'src' is ", dtype_name(source->dtype()), ", expected ",
            dtype_name(t.dtype()), " as 'self'");
      const Dims source_sizes = at_least_1d(*source);
      bool fits = source_sizes.size() == sizes.size();
      for (std::size_t d = 0; fits && d < sizes.size(); ++d) fits = index_sizes[d] <= source_sizes[d];
      check(fits, op, ": 'index' of shape ", to_string(index.sizes()), " is larger than 'src' of shape ",
            to_string(source->sizes()));
      // Out of reach of the writes.
      s.source = source->storage().get() == out.storage().get() ? clone_contiguous(*source)
                                                                : std::make_unique<Tensor>(*source);
      *s.source = as_1d(*s.source);
    }
  }
  if (out.numel() != 0 && (out.raw() != t.raw() || out.strides() != t.strides())) copy_cpu(out, t);
  return s;
}

void scatter_source(const Scatter& s, const char* op) {
  if (s.index.numel() == 0) return;
  const std::int64_t n = s.index.size(s.dim), so = s.out.stride(s.dim), si = s.index.stride(s.dim),
                     ss = s.source->stride(s.dim);
  const auto* index = s.index.data<std::int64_t>();
  dispatch_width(op, s.out.dtype(), [&]<class T>() {
    T* to = s.out.data<T>();
    const T* from = s.source->data<T>();
    for_each_lane<3>({&s.out, &s.index, s.source.get()}, s.dim, s.index.sizes(), n,
                     [&](const std::array<std::int64_t, 3>& at) {
                       for (std::int64_t i = 0; i < n; ++i)
                         to[at[0] + index[at[1] + i * si] * so] = from[at[2] + i * ss];
                     });
  });
}

// Sequential along `dim`, so that sums are the same with any number of threads.
template <class T>
void reduce_lanes(const Scatter& s, Reduce reduce, bool include_self) {
  const std::int64_t n = s.index.size(s.dim), so = s.out.stride(s.dim), si = s.index.stride(s.dim),
                     ss = s.source->stride(s.dim), extent = s.out.size(s.dim);
  const auto* index = s.index.data<std::int64_t>();
  T* out = s.out.data<T>();
  const T* source = s.source->data<T>();
  for_each_lane<3>({&s.out, &s.index, s.source.get()}, s.dim, s.index.sizes(), n * 2,
                   [&](const std::array<std::int64_t, 3>& at) {
                     T* to = out + at[0];
                     const std::int64_t* where = index + at[1];
                     if (!include_self) {
                       for (std::int64_t i = 0; i < n; ++i) to[where[i * si] * so] = reduce_start<T>(reduce);
                     }
                     for (std::int64_t i = 0; i < n; ++i) {
                       T& target = to[where[i * si] * so];
                       target = combine(reduce, target, source[at[2] + i * ss]);
                     }
                   });
  if (reduce != Reduce::kMean) return;
  std::vector<std::int64_t> counts(static_cast<std::size_t>(extent), 0);
  const auto out_strides = without(s.out.strides(), s.dim), index_strides = without(s.index.strides(), s.dim);
  const kernels::StridedLoop<2> lanes(without(s.index.sizes(), s.dim), {DimSpan(out_strides), DimSpan(index_strides)});
  const auto step = lanes.inner();
  lanes.run_serial([&](const std::array<std::int64_t, 2>& start, std::int64_t rows) {
    for (std::int64_t r = 0; r < rows; ++r) {
      T* to = out + start[0] + r * step[0];
      const std::int64_t* where = index + start[1] + r * step[1];
      for (std::int64_t i = 0; i < n; ++i) ++counts[static_cast<std::size_t>(where[i * si])];
      for (std::int64_t i = 0; i < n; ++i) {
        std::int64_t& count = counts[static_cast<std::size_t>(where[i * si])];
        if (count == 0) continue;  // divided already
        T& target = to[where[i * si] * so];
        target = divide_by_count(target, count + (include_self ? 1 : 0));
        count = 0;
      }
    }
  });
}

void scatter_reduce(const Scatter& s, const char* reduce_name, bool include_self, const char* op) {
  const Reduce reduce = parse_reduce(reduce_name, op);
  if (s.index.numel() == 0) return;
  dispatch_real(op, s.out.dtype(), [&]<class T>() { reduce_lanes<T>(s, reduce, include_self); });
}

void scatter_reduce_impl(AtenTensorHandle out, AtenTensorHandle self, std::int64_t dim, AtenTensorHandle index,
                         AtenTensorHandle src, const char* reduce, std::int32_t include_self) {
  parse_reduce(reduce, "scatter_reduce");
  cpu_input(src, "scatter_reduce", "src");
  scatter_reduce(prepare(out, self, dim, index, src, true, "scatter_reduce"), reduce, include_self != 0,
                 "scatter_reduce");
}

void scatter_src_impl(AtenTensorHandle out, AtenTensorHandle self, std::int64_t dim, AtenTensorHandle index,
                      AtenTensorHandle src) {
  cpu_input(src, "scatter", "src");
  scatter_source(prepare(out, self, dim, index, src, true, "scatter"), "scatter");
}

}  // namespace

UNTORCH_SHIM aoti_torch_cpu_scatter_src_out(AtenTensorHandle out, AtenTensorHandle self, std::int64_t dim,
                                            AtenTensorHandle index, AtenTensorHandle src) {
  return guarded("scatter", [&] { scatter_src_impl(out, self, dim, index, src); });
}

UNTORCH_SHIM aoti_torch_scatter_out(AtenTensorHandle out, AtenTensorHandle self, std::int64_t dim,
                                    AtenTensorHandle index, AtenTensorHandle src) {
  if (on_cuda(out) && cuda_ops.scatter_out != nullptr) return cuda_ops.scatter_out(out, self, dim, index, src);
  return guarded("scatter", [&] { scatter_src_impl(out, self, dim, index, src); });
}

UNTORCH_SHIM aoti_torch_cpu_scatter_value_out(AtenTensorHandle out, AtenTensorHandle self, std::int64_t dim,
                                              AtenTensorHandle index, double value) {
  return guarded("scatter", [&] {
    Scatter s = prepare(out, self, dim, index, nullptr, true, "scatter");
    const TensorPtr scalar = scalar_tensor(value, s.out.dtype());
    s.source = std::make_unique<Tensor>(expand(*scalar, s.index.sizes(), "scatter", "value"));
    scatter_source(s, "scatter");
  });
}

UNTORCH_SHIM aoti_torch_cpu_scatter_reduce_two_out(AtenTensorHandle out, AtenTensorHandle self, std::int64_t dim,
                                                   AtenTensorHandle index, AtenTensorHandle src, const char* reduce,
                                                   std::int32_t include_self) {
  return guarded("scatter_reduce", [&] { scatter_reduce_impl(out, self, dim, index, src, reduce, include_self); });
}

UNTORCH_SHIM aoti_torch_scatter_reduce_out(AtenTensorHandle out, AtenTensorHandle self, std::int64_t dim,
                                           AtenTensorHandle index, AtenTensorHandle src, const char* reduce,
                                           std::int32_t include_self) {
  if (on_cuda(out) && cuda_ops.scatter_reduce_out != nullptr) {
    return cuda_ops.scatter_reduce_out(out, self, dim, index, src, reduce, include_self);
  }
  return guarded("scatter_reduce", [&] { scatter_reduce_impl(out, self, dim, index, src, reduce, include_self); });
}

UNTORCH_SHIM aoti_torch_cpu_index_reduce(AtenTensorHandle self, std::int64_t dim_arg, AtenTensorHandle index,
                                         AtenTensorHandle source, const char* reduce, std::int32_t include_self,
                                         AtenTensorHandle* ret0) {
  return guarded("index_reduce", [&] {
    const char* op = "index_reduce";
    const Tensor& t = cpu_input(self, op, "self");
    const Tensor& ix = cpu_input(index, op, "index");
    const Tensor& src = cpu_input(source, op, "source");
    check(parse_reduce(reduce, op) != Reduce::kSum, op,
          ": 'reduce' is \"sum\", expected \"prod\", \"mean\", \"amax\" or \"amin\"");
    check(ix.dim() <= 1, op, ": 'index' must be 1-D, got ", ix.dim(), "-D");
    check(src.dtype() == t.dtype(), op, ": 'source' is ", dtype_name(src.dtype()), ", expected ", dtype_name(t.dtype()),
          " as 'self'");
    const std::int64_t dim = normalize_dim(dim_arg, t.dim(), op);
    Dims expected = at_least_1d(t);
    expected[static_cast<std::size_t>(dim)] = ix.numel();
    check(at_least_1d(src) == expected, op, ": 'source' has shape ", to_string(src.sizes()), ", expected ",
          to_string(expected));
    const TensorPtr flat = int64_index(ix, op);
    check_indices(*flat, dim, lane_size(t, dim), op);
    TensorPtr out = clone_like(t);
    if (ix.numel() != 0 && src.numel() != 0) {
      Dims strides;
      strides.resize(expected.size());
      strides[static_cast<std::size_t>(dim)] = 1;
      Scatter s{as_1d(*out), Tensor(flat->storage(), flat->storage_offset(), DType::kInt64, expected, strides),
                std::make_unique<Tensor>(as_1d(src)), dim};
      scatter_reduce(s, reduce, include_self != 0, op);
    }
    give(ret0, std::move(out), op);
  });
}

UNTORCH_SHIM aoti_torch_cpu_segment_reduce(AtenTensorHandle data, const char* reduce_name, AtenTensorHandle* lengths,
                                           AtenTensorHandle* indices, AtenTensorHandle* offsets, std::int64_t axis_arg,
                                           std::int32_t, double* initial, AtenTensorHandle* ret0) {
  return guarded("segment_reduce", [&] {
    const char* op = "segment_reduce";
    const Tensor& t = cpu_input(data, op, "data");
    const Reduce reduce = parse_reduce(reduce_name, op);
    if (optional_cpu_input(indices, op, "indices") != nullptr) {
      throw_error(ErrorKind::kUnsupported, op,
                  ": argument 'indices' is not supported (nor by PyTorch); pass lengths or offsets");
    }
    const Tensor* given = optional_cpu_input(lengths, op, "lengths");
    const Tensor* bounds = optional_cpu_input(offsets, op, "offsets");
    check(given != nullptr || bounds != nullptr, op, ": either 'lengths' or 'offsets' is needed");
    const std::int64_t axis = normalize_dim(axis_arg, t.dim(), op);
    const bool by_offsets = bounds != nullptr;
    const Tensor& cuts = by_offsets ? *bounds : *given;
    check(t.dim() > 0 && cuts.dim() == axis + 1 &&
              std::equal(cuts.sizes().begin(), cuts.sizes().end() - 1, t.sizes().begin()),
          op, ": '", by_offsets ? "offsets" : "lengths", "' has shape ", to_string(cuts.sizes()),
          ", expected the first ", axis, " sizes of 'data' ", to_string(t.sizes()), " and one more");
    const TensorPtr values = contiguous(t), table = int64_index(cuts, op);
    const std::int64_t row = cuts.size(-1), segments = by_offsets ? row - 1 : row, extent = t.size(axis);
    check(segments >= 0, op, ": 'offsets' is empty");
    Dims shape = t.sizes();
    shape[static_cast<std::size_t>(axis)] = segments;
    std::int64_t outer = 1, inner = 1;
    for (std::int64_t d = 0; d < axis; ++d) outer *= t.size(d);
    for (std::int64_t d = axis + 1; d < t.dim(); ++d) inner *= t.size(d);
    const auto* entries = table->data<std::int64_t>();
    std::vector<std::int64_t> starts;  // `segments` + 1 a row
    for (std::int64_t o = 0; o < outer; ++o) {
      std::int64_t at = by_offsets ? entries[o * row] : 0;
      starts.push_back(at);
      for (std::int64_t s = 0; s < segments; ++s) {
        const std::int64_t next = by_offsets ? entries[o * row + s + 1] : at + entries[o * row + s];
        check(at >= 0 && next >= at && next <= extent, op, ": segment ", s, " runs from ", at, " to ", next,
              ", expected within 0 to ", extent);
        starts.push_back(at = next);
      }
      check(by_offsets || at == extent, op, ": 'lengths' sum to ", at, ", expected ", extent);
    }
    TensorPtr out = Tensor::empty(shape, t.dtype());
    dispatch_floating(op, t.dtype(), [&]<class T>() {
      const T* from = values->data<T>();
      T* to = out->data<T>();
      for (std::int64_t o = 0; o < outer; ++o) {
        for (std::int64_t s = 0; s < segments; ++s) {
          const std::int64_t begin = starts[static_cast<std::size_t>(o * (segments + 1) + s)],
                             end = starts[static_cast<std::size_t>(o * (segments + 1) + s + 1)];
          for (std::int64_t i = 0; i < inner; ++i) {
            T value =
                initial != nullptr ? static_cast<T>(static_cast<compute_t<T>>(*initial)) : reduce_start<T>(reduce);
            for (std::int64_t j = begin; j < end; ++j)
              value = combine(reduce, value, from[(o * extent + j) * inner + i]);
            if (reduce == Reduce::kMean && end > begin) value = divide_by_count(value, end - begin);
            if (reduce == Reduce::kMean && end == begin && initial == nullptr) {
              value = static_cast<T>(std::numeric_limits<compute_t<T>>::quiet_NaN());
            }
            to[(o * segments + s) * inner + i] = value;
          }
        }
      }
    });
    give(ret0, std::move(out), op);
  });
}
