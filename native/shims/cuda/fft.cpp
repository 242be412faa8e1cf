// Fourier transforms on CUDA: complex to complex and real to complex, over any dimensions, by cuFFT.
//
// The strides of the results are those of PyTorch's cuFFT path, on which compiled models count: every step leaves the
// dimensions that it transformed innermost, and the others outside by falling stride of what it read.
#include "shims/fft.h"

#include <algorithm>

#include "cuda/fft.h"
#include "kernels/cuda/gemm/scale.h"
#include "shims/cuda/shim.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

using DimList = std::vector<std::int64_t>;

DimList by_falling_stride(const Dims& strides, DimList dims) {
  std::stable_sort(dims.begin(), dims.end(), [&](std::int64_t a, std::int64_t b) {
    return strides[static_cast<std::size_t>(a)] > strides[static_cast<std::size_t>(b)];
  });
  return dims;
}

// The other dimensions by falling stride, then `dims` as they stand.
DimList order_of(const Dims& strides, const DimList& dims) {
  DimList order;
  for (std::int64_t d = 0; d < static_cast<std::int64_t>(strides.size()); ++d) {
    if (std::find(dims.begin(), dims.end(), d) == dims.end()) order.push_back(d);
  }
  order = by_falling_stride(strides, std::move(order));
  order.insert(order.end(), dims.begin(), dims.end());
  return order;
}

// Strides that lay `sizes` out densely in the order, the last dimension innermost.
Dims dense_strides(DimSpan sizes, const DimList& order) {
  Dims strides(sizes);
  std::int64_t step = 1;
  for (std::size_t i = order.size(); i-- > 0;) {
    const auto d = static_cast<std::size_t>(order[i]);
    strides[d] = step;
    step *= std::max<std::int64_t>(sizes[d], 1);
  }
  return strides;
}

bool laid_out(const Tensor& tensor, const Dims& strides) {
  for (std::size_t d = 0; d < strides.size(); ++d) {
    if (tensor.sizes()[d] != 1 && tensor.strides()[d] != strides[d]) return false;
  }
  return true;
}

DType complex_of(DType dtype) { return dtype == DType::kFloat32 ? DType::kComplex64 : DType::kComplex128; }
bool is_wide(DType dtype) { return dtype == DType::kFloat64 || dtype == DType::kComplex128; }

// One transform over at most three dimensions, unscaled; a real input gives the one-sided result.
TensorPtr step(const OnDevice& on, const char* op, const Tensor& input, const DimList& dims, bool forward) {
  const bool real = !is_complex(input.dtype());
  const DType dtype = real ? complex_of(input.dtype()) : input.dtype();
  const DimList order = order_of(input.strides(), dims);
  Dims sizes(input.sizes());
  if (real) {
    std::int64_t& last = sizes[static_cast<std::size_t>(dims.back())];
    last = last / 2 + 1;
  }
  TensorPtr out = Tensor::empty_strided(sizes, dense_strides(sizes, order), dtype, input.device());
  if (out->numel() == 0) return out;
  const Dims wanted = dense_strides(input.sizes(), order);
  const void* from = input.raw();
  TensorPtr dense;
  if (!laid_out(input, wanted) || reinterpret_cast<std::uintptr_t>(from) % element_size(dtype) != 0) {
    // Complex input is put into place in the result itself.
    dense = real ? Tensor::empty_strided(input.sizes(), wanted, input.dtype(), input.device()) : nullptr;
    copy(real ? *dense : *out, input);
    from = real ? dense->raw() : out->raw();
  }
  cuda::FftProblem problem;
  problem.real_input = real;
  problem.wide = is_wide(dtype);
  problem.forward = forward;
  problem.rank = static_cast<int>(dims.size());
  problem.batch = input.numel();
  for (std::size_t d = 0; d < dims.size(); ++d) {
    problem.size[d] = input.size(dims[d]);
    problem.batch /= problem.size[d];
  }
  cuda::fft(op, problem, from, out->raw(), on.index(), on.stream());
  return out;
}

// Complex transforms over any number of dimensions, three at a time, the innermost first.
TensorPtr all_steps(const OnDevice& on, const char* op, TensorPtr working, DimList dims, bool forward) {
  while (!dims.empty()) {
    dims = by_falling_stride(working->strides(), std::move(dims));
    const std::size_t count = std::min<std::size_t>(dims.size(), cuda::kMaxFftRank);
    const DimList last(dims.end() - static_cast<std::ptrdiff_t>(count), dims.end());
    working = step(on, op, *working, last, forward);
    dims.resize(dims.size() - count);
  }
  return working;
}

void multiply(const OnDevice& on, const Tensor& out, double factor) {
  if (factor == 1.0) return;
  on.launched(kernels::cuda::scale(2 * out.numel(), factor, is_wide(out.dtype()) ? DType::kFloat64 : DType::kFloat32,
                                   out.raw(), on.stream()));
}

TensorPtr c2c(const Tensor& self, DimSpan dim, std::int64_t normalization, bool forward) {
  constexpr const char* op = "_fft_c2c";
  if (self.dtype() != DType::kComplex64 && self.dtype() != DType::kComplex128) {
    throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(self.dtype()),
                " is not supported, expected complex64 or complex128");
  }
  const DimList dims = fft_dims(op, self, dim);
  const double factor = fft_scale(op, normalization, self, dims);
  const OnDevice on(op, self);
  TensorPtr out;
  if (dims.empty()) {  // a copy, in the same order
    out = Tensor::empty_strided(self.sizes(), dense_strides(self.sizes(), order_of(self.strides(), {})), self.dtype(),
                                self.device());
    copy(*out, self);
  } else {
    out = all_steps(on, op, std::make_unique<Tensor>(self), dims, forward);
  }
  multiply(on, *out, factor);
  return out;
}

// PyTorch gives cuFFT real transforms over several dimensions as a whole, but for these.
bool at_once(const DimList& dims) {
  return dims.size() <= cuda::kMaxFftRank && !(dims.size() >= 2 && dims[0] == 0 && dims[1] == 1);
}

TensorPtr r2c_onesided(const OnDevice& on, const char* op, const Tensor& self, const DimList& dims) {
  if (at_once(dims)) return step(on, op, self, dims, true);
  TensorPtr out = step(on, op, self, {dims.back()}, true);
  return all_steps(on, op, std::move(out), DimList(dims.begin(), dims.end() - 1), true);
}

// The strides of a two-sided result, which are those of a one-sided one unless it was made in several steps: then it is
// row-major, where it is larger than the one-sided one.
Dims twosided_strides(const Tensor& self, const DimList& dims) {
  Dims strides = self.strides();
  if (at_once(dims)) return dense_strides(self.sizes(), order_of(strides, dims));
  const std::int64_t last = self.size(dims.back());
  if (dims.size() > 1 && last / 2 + 1 != last) return contiguous_strides(self.sizes());
  strides = dense_strides(self.sizes(), order_of(strides, {dims.back()}));
  DimList others(dims.begin(), dims.end() - 1);
  while (!others.empty()) {
    others = by_falling_stride(strides, std::move(others));
    const std::size_t count = std::min<std::size_t>(others.size(), cuda::kMaxFftRank);
    strides = dense_strides(
        self.sizes(), order_of(strides, DimList(others.end() - static_cast<std::ptrdiff_t>(count), others.end())));
    others.resize(others.size() - count);
  }
  return strides;
}

TensorPtr r2c(const Tensor& self, DimSpan dim, std::int64_t normalization, bool onesided) {
  constexpr const char* op = "_fft_r2c";
  if (self.dtype() != DType::kFloat32 && self.dtype() != DType::kFloat64) {
    throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(self.dtype()),
                " is not supported, expected float32 or float64");
  }
  const DimList dims = fft_dims(op, self, dim);
  check(!dims.empty(), op, ": argument 'dim' must name at least one dimension");
  const double factor = fft_scale(op, normalization, self, dims);
  const OnDevice on(op, self);
  TensorPtr out;
  if (onesided) {
    out = r2c_onesided(on, op, self, dims);
  } else {
    const Dims strides = twosided_strides(self, dims);
    TensorPtr whole = Tensor::empty_strided(self.sizes(), strides, complex_of(self.dtype()), self.device());
    copy(*whole, self);
    out = all_steps(on, op, std::move(whole), dims, true);
    if (!laid_out(*out, strides)) {
      TensorPtr placed = Tensor::empty_strided(self.sizes(), strides, out->dtype(), self.device());
      copy(*placed, *out);
      out = std::move(placed);
    }
  }
  multiply(on, *out, factor);
  return out;
}

}  // namespace

UNTORCH_SHIM aoti_torch_cuda__fft_c2c(AtenTensorHandle self, const std::int64_t* dim, std::int64_t dim_len,
                                      std::int64_t normalization, std::int32_t forward, AtenTensorHandle* ret0) {
  return guarded("_fft_c2c", [&] {
    const Tensor& input = cuda_input(self, "_fft_c2c", "self");
    give(ret0, c2c(input, ints(dim, dim_len), normalization, forward != 0), "_fft_c2c");
  });
}

UNTORCH_SHIM aoti_torch_cuda__fft_r2c(AtenTensorHandle self, const std::int64_t* dim, std::int64_t dim_len,
                                      std::int64_t normalization, std::int32_t onesided, AtenTensorHandle* ret0) {
  return guarded("_fft_r2c", [&] {
    const Tensor& input = cuda_input(self, "_fft_r2c", "self");
    give(ret0, r2c(input, ints(dim, dim_len), normalization, onesided != 0), "_fft_r2c");
  });
}
