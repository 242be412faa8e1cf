// Views of the arguments, and outputs as Python objects.
#include "call.h"

#include <utility>

namespace untorch::python {

Inputs::Inputs(const Taker& taker, std::span<PyObject* const> arrays)
    : operands_(arrays.size()), views_(arrays.size()) {
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    if (!operands_[i].set(arrays[i], taker, i, views_[i])) throw_python();
    all_numpy_ = all_numpy_ && operands_[i].is_numpy();
    borrows_gpu_ = borrows_gpu_ || operands_[i].must_stay();
  }
}

thread_local constinit const Inputs* Inputs::running_ = nullptr;

PyObject* Inputs::owner_on_this_thread(const void* address) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  for (std::size_t i = 0; running_ != nullptr && i < running_->views_.size(); ++i) {
    const untorch_view& view = running_->views_[i];
    const auto first = reinterpret_cast<std::uintptr_t>(view.data);
    std::int64_t elements = 1;
    for (std::int32_t d = 0; d < view.ndim; ++d) {
      elements = view.sizes[d] == 0 ? 0 : elements + (view.sizes[d] - 1) * view.strides[d];
    }
    const auto nbytes = static_cast<std::uintptr_t>(elements * item_size(view.dtype));
    if (at >= first && at < first + nbytes) return running_->operands_[i].owner();
  }
  return nullptr;
}

std::vector<PyObject*> Inputs::take_borrowed_from_gpu() {
  std::vector<PyObject*> owners;
  if (!borrows_gpu_) return owners;
  for (Operand& operand : operands_) {
    if (operand.must_stay()) owners.push_back(operand.take_owner());
  }
  return owners;
}

void collect(Outputs& outputs, Inputs& inputs, bool numpy, const Producer& producer, References& results) {
  for (std::size_t o = 0; o < outputs.tensors.size(); ++o) {
    untorch_tensor* const handle = std::exchange(outputs.tensors[o], nullptr);
    if (handle == nullptr) {
      results.add(Py_None);
      continue;
    }
    const std::int32_t index = outputs.aliases[o];
    const Operand* const alias = index >= 0 ? &inputs[static_cast<std::size_t>(index)] : nullptr;
    untorch_view view;
    untorch_tensor_view(handle, &view);
    const bool writable = alias != nullptr ? alias->writable() : view.data != nullptr && view.read_only == 0;
    PyObject* object = nullptr;
    if (numpy && view.device_type != 0) {
      object = copy_to_numpy(handle);
    } else if (numpy) {
      object = to_numpy(handle, view, alias != nullptr ? alias->owner() : nullptr, writable);
    } else {
      Producer mine = view.device_type != 0 ? producer : Producer{};
      Tensor* tensor = alias != nullptr ? new Tensor(handle, nb::borrow(alias->owner()), !writable, std::move(mine))
                                        : new Tensor(handle, std::move(mine));
      object = nb::cast(tensor, nb::rv_policy::take_ownership).release().ptr();
    }
    if (object == nullptr) throw_python();
    results.adopt(object);
  }
}

}  // namespace untorch::python
