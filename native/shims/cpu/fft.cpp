// Fourier transforms of tensors: complex to complex and real to complex, over any dimensions.
#include "kernels/cpu/fft/fft.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels/cpu/common/parallel_items.h"
#include "shims/fft.h"
#include "shims/nn.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

using DimList = std::vector<std::int64_t>;

// The strides that PyTorch's MKL path gives the result, on which compiled models count: batch dimensions outermost by
// falling input stride, then the transformed ones by falling input stride (for real input the last named stays last).
Dims result_strides(const Tensor& self, DimList dims, bool keep_last, DimSpan sizes) {
  const auto falling = [&](std::int64_t a, std::int64_t b) { return self.stride(a) > self.stride(b); };
  std::stable_sort(dims.begin(), dims.end() - (keep_last ? 1 : 0), falling);
  DimList order;
  for (std::int64_t d = 0; d < self.dim(); ++d) {
    if (std::find(dims.begin(), dims.end(), d) == dims.end()) order.push_back(d);
  }
  std::stable_sort(order.begin(), order.end(), falling);
  order.insert(order.end(), dims.begin(), dims.end());
  Dims strides(sizes);
  std::int64_t step = 1;
  for (std::size_t i = order.size(); i-- > 0;) {
    const auto d = static_cast<std::size_t>(order[i]);
    strides[d] = step;
    step *= std::max<std::int64_t>(sizes[d], 1);
  }
  return strides;
}

// The tables of a length, kept for the next call; making them costs more than a short transform.
template <class T>
std::shared_ptr<const kernels::Fft<T>> plan_for(std::int64_t length, bool forward) {
  constexpr std::size_t kKept = 64;
  static std::mutex mutex;
  static std::map<std::pair<std::int64_t, bool>, std::shared_ptr<const kernels::Fft<T>>> plans;
  const std::lock_guard lock(mutex);
  auto& plan = plans[{length, forward}];
  if (plan == nullptr) plan = std::make_shared<const kernels::Fft<T>>(length, forward);
  const auto kept = plan;
  if (plans.size() > kKept) plans.clear();
  return kept;
}

// Transforms every line of `out` along dimension `dim` in place and multiplies by `scale`.
template <class T>
void transform(const Tensor& out, std::int64_t dim, bool forward, T scale) {
  const std::int64_t length = out.size(dim), stride = out.stride(dim), lines = out.numel() / length;
  const auto shared = plan_for<T>(length, forward);
  const kernels::Fft<T>& plan = *shared;
  auto* data = static_cast<std::complex<T>*>(out.raw());
  const double work = static_cast<double>(out.numel()) * 10;
  kernels::for_each_item_grained(lines, 4096 / length + 1, work > kernels::kParallelWork, [&](std::int64_t line) {
    thread_local std::vector<std::complex<T>> buffer;
    buffer.resize(static_cast<std::size_t>(length + plan.scratch_size()));
    std::int64_t rest = line, offset = 0;
    for (std::int64_t d = out.dim(); d-- > 0;) {
      if (d == dim) continue;
      offset += rest % out.size(d) * out.stride(d);
      rest /= out.size(d);
    }
    std::complex<T>* row = buffer.data();
    for (std::int64_t i = 0; i < length; ++i) row[i] = data[offset + i * stride];
    plan.run(row, row + length);
    for (std::int64_t i = 0; i < length; ++i) data[offset + i * stride] = row[i] * scale;
  });
}

void transform_all(const Tensor& out, const DimList& dims, bool forward, double scale) {
  for (std::size_t i = 0; i < dims.size(); ++i) {
    const double factor = i + 1 == dims.size() ? scale : 1.0;
    if (out.dtype() == DType::kComplex64) {
      transform<float>(out, dims[i], forward, static_cast<float>(factor));
    } else {
      transform<double>(out, dims[i], forward, factor);
    }
  }
}

TensorPtr c2c(const Tensor& self, DimSpan dim, std::int64_t normalization, bool forward) {
  constexpr const char* op = "_fft_c2c";
  if (self.dtype() != DType::kComplex64 && self.dtype() != DType::kComplex128) {
    throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(self.dtype()),
                " is not supported, expected complex64 or complex128");
  }
  const DimList dims = fft_dims(op, self, dim);
  const double scale = fft_scale(op, normalization, self, dims);
  TensorPtr out = Tensor::empty_strided(self.sizes(), result_strides(self, dims, false, self.sizes()), self.dtype());
  if (out->numel() == 0) return out;
  copy_cpu(*out, self);
  transform_all(*out, dims, forward, scale);
  return out;
}

TensorPtr r2c(const Tensor& self, DimSpan dim, std::int64_t normalization, bool onesided) {
  constexpr const char* op = "_fft_r2c";
  if (self.dtype() != DType::kFloat32 && self.dtype() != DType::kFloat64) {
    throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(self.dtype()),
                " is not supported, expected float32 or float64");
  }
  const DimList dims = fft_dims(op, self, dim);
  check(!dims.empty(), op, ": argument 'dim' must name at least one dimension");
  const double scale = fft_scale(op, normalization, self, dims);
  const DType dtype = self.dtype() == DType::kFloat32 ? DType::kComplex64 : DType::kComplex128;
  const auto last = static_cast<std::size_t>(dims.back());
  Dims half(self.sizes());
  if (onesided) half[last] = half[last] / 2 + 1;
  TensorPtr out = Tensor::empty_strided(half, result_strides(self, dims, true, half), dtype);
  if (out->numel() == 0) return out;
  if (!onesided) {
    copy_cpu(*out, self);
    transform_all(*out, dims, true, scale);
    return out;
  }
  // The last dimension first, whole; the half that is kept goes through the others.
  const TensorPtr whole = Tensor::empty(self.sizes(), dtype);
  copy_cpu(*whole, self);
  transform_all(*whole, {dims.back()}, true, 1.0);
  copy_cpu(*out, *whole->view(half, whole->strides(), whole->storage_offset()));
  const DimList others(dims.begin(), dims.end() - 1);
  if (others.empty()) {
    if (scale != 1.0) {
      const auto multiply = [&]<class T>() {
        auto* data = static_cast<std::complex<T>*>(out->raw());
        for (std::int64_t i = 0; i < out->numel(); ++i) data[i] *= static_cast<T>(scale);
      };
      if (dtype == DType::kComplex64) {
        multiply.template operator()<float>();
      } else {
        multiply.template operator()<double>();
      }
    }
    return out;
  }
  transform_all(*out, others, true, scale);
  return out;
}

}  // namespace

UNTORCH_SHIM aoti_torch_cpu__fft_c2c(AtenTensorHandle self, const std::int64_t* dim, std::int64_t dim_len,
                                     std::int64_t normalization, std::int32_t forward, AtenTensorHandle* ret0) {
  return guarded("_fft_c2c", [&] {
    const Tensor& input = cpu_input(self, "_fft_c2c", "self");
    give(ret0, c2c(input, ints(dim, dim_len), normalization, forward != 0), "_fft_c2c");
  });
}

UNTORCH_SHIM aoti_torch__fft_c2c(AtenTensorHandle self, const std::int64_t* dim, std::int64_t dim_len,
                                 std::int64_t normalization, std::int32_t forward, AtenTensorHandle* ret) {
  return aoti_torch_cpu__fft_c2c(self, dim, dim_len, normalization, forward, ret);
}

UNTORCH_SHIM aoti_torch_cpu__fft_r2c(AtenTensorHandle self, const std::int64_t* dim, std::int64_t dim_len,
                                     std::int64_t normalization, std::int32_t onesided, AtenTensorHandle* ret0) {
  return guarded("_fft_r2c", [&] {
    const Tensor& input = cpu_input(self, "_fft_r2c", "self");
    give(ret0, r2c(input, ints(dim, dim_len), normalization, onesided != 0), "_fft_r2c");
  });
}
