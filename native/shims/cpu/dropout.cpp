// native_dropout outside of training: a copy and a mask of ones.
#include <algorithm>
#include <vector>

#include "shims/nn.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

// The strides of a copy in PyTorch: the input's own when it is dense, else row-major.
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

}  // namespace

UNTORCH_SHIM aoti_torch_cpu_native_dropout(AtenTensorHandle input, double p, std::int32_t* train,
                                           AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  constexpr const char* op = "native_dropout";
  return guarded(op, [&] {
    const Tensor& self = cpu_input(input, op, "input");
    check(p >= 0 && p <= 1, op, ": argument 'p' must be between 0 and 1, got ", p);
    if (train == nullptr || *train != 0) {
      throw_error(ErrorKind::kUnsupported, op, ": argument 'train' must be false, got ",
                  train == nullptr ? "none (which means true)" : "true", "; call model.eval() before the export");
    }
    const Dims strides = dense_strides(self);
    TensorPtr out = Tensor::empty_strided(self.sizes(), strides, self.dtype());
    TensorPtr mask = Tensor::empty_strided(self.sizes(), strides, DType::kBool);
    copy_cpu(*out, self);
    std::fill_n(mask->data<bool>(), mask->numel(), true);
    check(ret1 != nullptr, op, ": output pointer is null");
    give(ret0, std::move(out), op);
    give(ret1, std::move(mask), op);
  });
}
