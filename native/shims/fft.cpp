// Fourier transforms over any dimensions: complex to complex and real to complex on any device, complex to real on CUDA
// (on the CPU numpy's kernel serves it).
//
// The strides of the results are PyTorch's, MKL's path on the CPU and cuFFT's on CUDA: compiled models count on them.
#include "kernels/fft.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cuda/fft.h"
#include "kernels/scale.h"
#include "shims/op.h"
#include "shims/proxy_op.h"
#include "tensor/iteration.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

using DimList = std::vector<std::int64_t>;

// The dimensions, wrapped; throws on repeated and empty ones.
DimList fft_dims(const char* op, const Tensor& self, DimSpan dims) {
  DimList out;
  for (const std::int64_t dim : dims) {
    const std::int64_t d = normalize_dim(dim, self.dim(), op);
    check(std::find(out.begin(), out.end(), d) == out.end(), op,
          ": argument 'dim' names a dimension twice: ", to_string(dims));
    check(self.size(d) > 0, op, ": dimension ", d, " of shape ", to_string(self.sizes()), " is empty");
    out.push_back(d);
  }
  return out;
}

// The factor of a normalization (0: none, 1: by root n, 2: by n) over these dimensions of the signal.
double fft_factor(const char* op, std::int64_t normalization, DimSpan sizes, const DimList& dims) {
  double count = 1;
  for (const std::int64_t d : dims) count *= static_cast<double>(sizes[static_cast<std::size_t>(d)]);
  switch (normalization) {
    case 0:
      return 1.0;
    case 1:
      return 1.0 / std::sqrt(count);
    case 2:
      return 1.0 / count;
    default:
      check(false, op, ": argument 'normalization' must be 0 (none), 1 (by root n) or 2 (by n), got ", normalization);
      return 0.0;
  }
}

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
DType real_of(DType dtype) { return dtype == DType::kComplex64 ? DType::kFloat32 : DType::kFloat64; }
bool is_wide(DType dtype) { return dtype == DType::kFloat64 || dtype == DType::kComplex128; }

// On the CPU: batch dimensions outermost by falling input stride, then the transformed ones by falling input stride
// (for real input the last named stays last).
Dims cpu_strides(const Tensor& self, const DimList& dims, bool keep_last, DimSpan sizes) {
  DimList inner = by_falling_stride(self.strides(), DimList(dims.begin(), dims.end() - (keep_last ? 1 : 0)));
  if (keep_last) inner.push_back(dims.back());
  return dense_strides(sizes, order_of(self.strides(), inner));
}

// In place; the factor goes into the last dimension's transform.
void transform(const Op& op, const Tensor& out, const DimList& dims, bool forward, double factor) {
  for (std::size_t i = 0; i < dims.size(); ++i) {
    kernels::cpu::fft(lanes<1>(op, dims[i], {&out}), forward, i + 1 == dims.size() ? factor : 1.0, out.dtype(),
                      out.raw());
  }
}

TensorPtr c2c_on_cpu(const Op& op, const Tensor& self, const DimList& dims, bool forward, double factor) {
  TensorPtr out = Tensor::empty_strided(self.sizes(), cpu_strides(self, dims, false, self.sizes()), self.dtype());
  if (out->numel() == 0) return out;
  copy_cpu(*out, self);
  transform(op, *out, dims, forward, factor);
  return out;
}

TensorPtr r2c_on_cpu(const Op& op, const Tensor& self, const DimList& dims, bool onesided, double factor) {
  const DType dtype = complex_of(self.dtype());
  const auto last = static_cast<std::size_t>(dims.back());
  Dims half(self.sizes());
  if (onesided) half[last] = half[last] / 2 + 1;
  TensorPtr out = Tensor::empty_strided(half, cpu_strides(self, dims, true, half), dtype);
  if (out->numel() == 0) return out;
  if (!onesided) {
    copy_cpu(*out, self);
    transform(op, *out, dims, true, factor);
    return out;
  }
  // The last dimension first, whole; the half that is kept goes through the others.
  const DimList others(dims.begin(), dims.end() - 1);
  const TensorPtr whole = Tensor::empty(self.sizes(), dtype);
  copy_cpu(*whole, self);
  transform(op, *whole, {dims.back()}, true, others.empty() ? factor : 1.0);
  copy_cpu(*out, *whole->view(half, whole->strides(), whole->storage_offset()));
  transform(op, *out, others, true, factor);
  return out;
}

// On CUDA every step leaves the dimensions that it transformed innermost, and the others outside by falling stride of
// what it read.

cuda::FftProblem problem_of(cuda::FftKind kind, const Tensor& signal, const DimList& dims, bool forward) {
  cuda::FftProblem problem;
  problem.kind = kind;
  problem.wide = is_wide(signal.dtype());
  problem.forward = forward;
  problem.rank = static_cast<int>(dims.size());
  problem.batch = signal.numel();
  for (std::size_t d = 0; d < dims.size(); ++d) {
    problem.size[d] = signal.size(dims[d]);
    problem.batch /= problem.size[d];
  }
  return problem;
}

// One transform over at most three dimensions, unscaled; a real input gives the one-sided result.
template <class On>
TensorPtr step(const On& on, const char* op, const Tensor& input, const DimList& dims, bool forward) {
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
  void* from = input.raw();
  TensorPtr dense;
  if (!laid_out(input, wanted) || reinterpret_cast<std::uintptr_t>(from) % element_size(dtype) != 0) {
    // Complex input is put into place in the result itself.
    dense = real ? Tensor::empty_strided(input.sizes(), wanted, input.dtype(), input.device()) : nullptr;
    copy(real ? *dense : *out, input);
    from = real ? dense->raw() : out->raw();
  }
  const auto kind = real ? cuda::FftKind::kRealToComplex : cuda::FftKind::kComplex;
  cuda::fft(op, problem_of(kind, input, dims, forward), from, out->raw(), on.index(), on.stream());
  return out;
}

// The inverse of a one-sided transform over at most three dimensions, unscaled; the last has `last` values. The other
// dimensions lie outside by falling `strides`.
template <class On>
TensorPtr step_to_real(const On& on, const char* op, const Tensor& input, const Dims& strides, const DimList& dims,
                       std::int64_t last) {
  const DimList order = order_of(strides, dims);
  Dims sizes(input.sizes());
  sizes[static_cast<std::size_t>(dims.back())] = last;
  TensorPtr out = Tensor::empty_strided(sizes, dense_strides(sizes, order), real_of(input.dtype()), input.device());
  if (out->numel() == 0) return out;
  // cuFFT overwrites what it reads.
  const TensorPtr dense =
      Tensor::empty_strided(input.sizes(), dense_strides(input.sizes(), order), input.dtype(), input.device());
  copy(*dense, input);
  const cuda::FftProblem problem = problem_of(cuda::FftKind::kComplexToReal, *out, dims, false);
  cuda::fft(op, problem, dense->raw(), out->raw(), on.index(), on.stream());
  return out;
}

// Complex transforms over any number of dimensions, three at a time, the innermost first.
template <class On>
TensorPtr all_steps(const On& on, const char* op, TensorPtr working, DimList dims, bool forward) {
  while (!dims.empty()) {
    dims = by_falling_stride(working->strides(), std::move(dims));
    const std::size_t count = std::min<std::size_t>(dims.size(), cuda::kMaxFftRank);
    const DimList last(dims.end() - static_cast<std::ptrdiff_t>(count), dims.end());
    working = step(on, op, *working, last, forward);
    dims.resize(dims.size() - count);
  }
  return working;
}

template <class On>
void scale(const On& on, const Tensor& out, double factor) {
  if (factor == 1.0) return;
  const std::int64_t values = (is_complex(out.dtype()) ? 2 : 1) * out.numel();
  on.launched(kernels::cuda::scale(values, factor, is_wide(out.dtype()) ? DType::kFloat64 : DType::kFloat32, out.raw(),
                                   on.stream()));
}

template <class On>
TensorPtr c2c_on_cuda(const On& on, const Op& op, const Tensor& self, const DimList& dims, bool forward,
                      double factor) {
  TensorPtr out;
  if (dims.empty()) {  // a copy, in the same order
    out = Tensor::empty_strided(self.sizes(), dense_strides(self.sizes(), order_of(self.strides(), {})), self.dtype(),
                                self.device());
    copy(*out, self);
  } else {
    out = all_steps(on, op, std::make_unique<Tensor>(self), dims, forward);
  }
  scale(on, *out, factor);
  return out;
}

// PyTorch gives cuFFT real transforms over several dimensions as a whole, but for these.
bool at_once(const DimList& dims) {
  return dims.size() <= cuda::kMaxFftRank && !(dims.size() >= 2 && dims[0] == 0 && dims[1] == 1);
}

template <class On>
TensorPtr r2c_onesided(const On& on, const char* op, const Tensor& self, const DimList& dims) {
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

template <class On>
TensorPtr r2c_on_cuda(const On& on, const Op& op, const Tensor& self, const DimList& dims, bool onesided,
                      double factor) {
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
  scale(on, *out, factor);
  return out;
}

template <class On>
TensorPtr c2r_on_cuda(const On& on, const Op& op, const Tensor& self, const DimList& dims, std::int64_t last,
                      double factor) {
  TensorPtr out;
  if (at_once(dims)) {
    out = step_to_real(on, op, self, contiguous_strides(self.sizes()), dims, last);
  } else {
    const DimList others(dims.begin(), dims.end() - 1);
    const TensorPtr half = all_steps(on, op, std::make_unique<Tensor>(self), others, false);
    out = step_to_real(on, op, *half, half->strides(), {dims.back()}, last);
  }
  scale(on, *out, factor);
  return out;
}

void check_complex(const Op& op, const Tensor& input) {
  if (input.dtype() == DType::kComplex64 || input.dtype() == DType::kComplex128) return;
  throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(input.dtype()),
              " is not supported, expected complex64 or complex128");
}

}  // namespace

UNTORCH_OP(_fft_c2c,
           (AtenTensorHandle self, const std::int64_t* dim, std::int64_t dim_len, std::int64_t normalization,
            std::int32_t forward, AtenTensorHandle* ret0),
           self, dim, dim_len, normalization, forward, ret0) {
  const Tensor& input = op.input(self, "self");
  check_complex(op, input);
  const DimList dims = fft_dims(op, input, ints(dim, dim_len));
  const double factor = fft_factor(op, normalization, input.sizes(), dims);
  TensorPtr out;
  run(
      op, {&input}, [&] { out = c2c_on_cpu(op, input, dims, forward != 0, factor); },
      [&](const auto& on) { out = c2c_on_cuda(on, op, input, dims, forward != 0, factor); });
  give(ret0, std::move(out), op);
}

UNTORCH_SHIM aoti_torch__fft_c2c(AtenTensorHandle self, const std::int64_t* dim, std::int64_t dim_len,
                                 std::int64_t normalization, std::int32_t forward, AtenTensorHandle* ret) {
  return guarded("_fft_c2c", [&] {
    _fft_c2c_op(Op::of("_fft_c2c", self, "self"), self, dim, dim_len, normalization, forward, ret);
  });
}

UNTORCH_OP(_fft_r2c,
           (AtenTensorHandle self, const std::int64_t* dim, std::int64_t dim_len, std::int64_t normalization,
            std::int32_t onesided, AtenTensorHandle* ret0),
           self, dim, dim_len, normalization, onesided, ret0) {
  const Tensor& input = op.input(self, "self");
  if (input.dtype() != DType::kFloat32 && input.dtype() != DType::kFloat64) {
    throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(input.dtype()),
                " is not supported, expected float32 or float64");
  }
  const DimList dims = fft_dims(op, input, ints(dim, dim_len));
  check(!dims.empty(), op, ": argument 'dim' must name at least one dimension");
  const double factor = fft_factor(op, normalization, input.sizes(), dims);
  TensorPtr out;
  run(
      op, {&input}, [&] { out = r2c_on_cpu(op, input, dims, onesided != 0, factor); },
      [&](const auto& on) { out = r2c_on_cuda(on, op, input, dims, onesided != 0, factor); });
  give(ret0, std::move(out), op);
}

UNTORCH_PROXY_OP(fft_c2r, "aten::_fft_c2r", kOnCuda) {
  const Tensor& input = call.tensor("self");
  check_complex(op, input);
  const DimList dims = fft_dims(op, input, call.integers("dim"));
  check(!dims.empty(), op, ": argument 'dim' must name at least one dimension");
  const std::int64_t last = call.integer("last_dim_size"), half = input.size(dims.back());
  check(last >= 1 && half == last / 2 + 1, op, ": 'last_dim_size' is ", last, " and dimension ", dims.back(),
        " of shape ", to_string(input.sizes()), " has ", half, " values, expected last_dim_size / 2 + 1");
  Dims sizes(input.sizes());
  sizes[static_cast<std::size_t>(dims.back())] = last;
  const double factor = fft_factor(op, call.integer("normalization"), sizes, dims);
  TensorPtr out;
  run(op, {&input}, [] {}, [&](const auto& on) { out = c2r_on_cuda(on, op, input, dims, last, factor); });
  call.give(0, std::move(out));
}
