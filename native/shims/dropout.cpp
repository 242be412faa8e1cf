// native_dropout: on the CPU outside of training alone.
#include <algorithm>
#include <vector>

#include "shims/layout.h"
#include "shims/random.h"
#include "tensor/iteration.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

// The strides of a copy in PyTorch on the CPU: the input's own when it is dense, else row-major.
Dims dense_strides(const Tensor& self) {
  std::vector<std::size_t> order(self.sizes().size());
  for (std::size_t d = 0; d < order.size(); ++d) order[d] = d;
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return self.strides()[a] > self.strides()[b]; });
  Dims strides(self.sizes());
  std::int64_t step = 1;
  for (std::size_t i = order.size(); i-- > 0;) {
    const std::size_t d = order[i];
    if (self.sizes()[d] != 1 && self.strides()[d] != step) return contiguous_strides(self.sizes());
    strides[d] = self.strides()[d];
    step *= self.sizes()[d];
  }
  return strides;
}

TensorPtr result_like(const Op& op, const Tensor& t, DType dtype) {
  return op.on_cuda() ? empty_like(t, dtype) : Tensor::empty_strided(t.sizes(), dense_strides(t), dtype);
}

}  // namespace

UNTORCH_OP(native_dropout,
           (AtenTensorHandle self, double p, std::int32_t* train, AtenTensorHandle* ret0, AtenTensorHandle* ret1), self,
           p, train, ret0, ret1) {
  const Tensor& t = op.input(self, "input");
  check(p >= 0 && p <= 1, op, ": argument 'p' must be between 0 and 1, got ", p);
  const bool training = train == nullptr || *train != 0;
  if (training && !op.on_cuda()) {
    throw_error(ErrorKind::kUnsupported, op, ": argument 'train' must be false, got ",
                train == nullptr ? "none (which means true)" : "true", "; call model.eval() before the export");
  }
  if (training && !is_floating(t.dtype())) {
    throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(t.dtype()),
                " is not supported, expected a floating type");
  }
  check(ret0 != nullptr && ret1 != nullptr, op, ": output pointer is null");
  TensorPtr out = result_like(op, t, t.dtype()), mask = result_like(op, t, DType::kBool);
  run(
      op, {&t},
      [&] {
        copy_cpu(*out, t);
        std::fill_n(mask->data<bool>(), mask->numel(), true);
      },
      [&](const auto& on) {
        const auto set = [&](const Tensor& to, std::uint8_t byte) {
          cuda::check_driver(cuda::driver().memset_d8_async(
                                 reinterpret_cast<cuda::DevicePtr>(to.raw()), byte,
                                 static_cast<std::size_t>(to.numel()) * element_size(to.dtype()), on.stream()),
                             op);
        };
        if (t.numel() == 0) {
          // Nothing to draw for.
        } else if (!training) {
          copy(*out, t);
          set(*mask, 1);
        } else if (p == 1) {
          set(*out, 0);
          set(*mask, 0);
        } else {
          draw(op, on, *out, 4, nullptr, [&](const auto& state, unsigned ctas) {
            return kernels::cuda::dropout(strided<3>(op, out->sizes(), {out.get(), mask.get(), &t}), out->raw(),
                                          mask->data<bool>(), t.raw(), t.dtype(), p, state, ctas, on.stream());
          });
        }
      });
  give(ret0, std::move(out), op);
  give(ret1, std::move(mask), op);
}
