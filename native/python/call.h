// A call on arrays: operands, the call without the interpreter lock, and what Python gets back.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <memory>
#include <vector>

#include "convert.h"
#include "stream.h"
#include "tensor.h"
#include "untorch/untorch.h"

namespace untorch::python {

namespace nb = nanobind;

inline constexpr std::size_t kFew = 8;

// Runs `body(views, num_inputs, outputs, aliases, num_outputs)` on flat arrays, without the interpreter lock, and makes
// Python objects of the outputs. as_numpy: True, False, or None: numpy when every input is numpy.
template <class Body>
nb::list run_on_arrays(const Taker& taker, const nb::object& inputs, std::size_t num_outputs,
                       const nb::object& as_numpy, Body&& body) {
  release_done();
  const std::size_t num_inputs = nb::len(inputs);
  std::array<Operand, kFew> few;
  std::unique_ptr<Operand[]> many(num_inputs > kFew ? new Operand[num_inputs] : nullptr);
  Operand* operands = many ? many.get() : few.data();
  std::array<untorch_view, kFew> few_views;
  std::vector<untorch_view> many_views(num_inputs > kFew ? num_inputs : 0);
  untorch_view* views = num_inputs > kFew ? many_views.data() : few_views.data();
  bool numpy = true, borrows_gpu = false;
  std::size_t i = 0;
  for (nb::handle input : inputs) {
    if (i == num_inputs) throw nb::value_error("the list of inputs changed while it was read");
    if (!operands[i].set(input.ptr(), taker, i)) throw_python();
    views[i] = operands[i].view();
    numpy = numpy && operands[i].is_numpy();
    borrows_gpu = borrows_gpu || operands[i].must_stay();
    ++i;
  }
  if (i != num_inputs) throw nb::value_error("the list of inputs changed while it was read");
  if (!as_numpy.is_none()) numpy = nb::cast<bool>(as_numpy);
  Producer producer;
  if (taker.device_type != 0) producer = current_producer(taker.device_index);

  std::array<untorch_tensor*, kFew> few_outputs{};
  std::array<std::int32_t, kFew> few_aliases{};
  std::vector<untorch_tensor*> many_outputs(num_outputs > kFew ? num_outputs : 0, nullptr);
  std::vector<std::int32_t> many_aliases(many_outputs.size(), -1);
  untorch_tensor** outputs = many_outputs.empty() ? few_outputs.data() : many_outputs.data();
  std::int32_t* aliases = many_aliases.empty() ? few_aliases.data() : many_aliases.data();
  untorch_status status;
  {
    nb::gil_scoped_release release;
    status = body(views, num_inputs, outputs, aliases, num_outputs);
  }

  nb::list results;
  bool failed = status != UNTORCH_OK;
  if (failed) raise_status(status);
  for (std::size_t o = 0; o < num_outputs && status == UNTORCH_OK; ++o) {
    if (failed) {
      untorch_tensor_free(outputs[o]);
      continue;
    }
    if (outputs[o] == nullptr) {
      results.append(nb::none());
      continue;
    }
    const Operand* alias = aliases[o] >= 0 ? &operands[aliases[o]] : nullptr;
    const bool writable = alias != nullptr ? alias->writable() : untorch_tensor_is_writable(outputs[o]) != 0;
    untorch_view view;
    untorch_tensor_view(outputs[o], &view);
    if (numpy && view.device_type != 0) {
      PyObject* array = copy_to_numpy(outputs[o]);
      failed = array == nullptr;
      if (!failed) results.append(nb::steal(array));
    } else if (numpy) {
      PyObject* array = to_numpy(outputs[o], alias != nullptr ? alias->owner() : nullptr, writable);
      failed = array == nullptr;
      if (!failed) results.append(nb::steal(array));
    } else {
      Producer mine = view.device_type != 0 ? producer : Producer{};
      Tensor* tensor = alias != nullptr ? new Tensor(outputs[o], nb::borrow(alias->owner()), !writable, std::move(mine))
                                        : new Tensor(outputs[o], std::move(mine));
      results.append(nb::cast(tensor, nb::rv_policy::take_ownership));
    }
  }
  // On a stream of the library's own, nothing else keeps the producer from using the memory again while the GPU reads
  // it. A caller who set the stream also orders what comes after.
  if (borrows_gpu && !caller_has_stream()) {
    std::vector<PyObject*> owners;
    for (std::size_t n = 0; n < num_inputs; ++n) {
      if (operands[n].must_stay()) owners.push_back(operands[n].take_owner());
    }
    PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
    PyErr_Fetch(&type, &value, &traceback);
    keep_until_done(taker.device_index, producer.stream, std::move(owners));
    PyErr_Restore(type, value, traceback);
  }
  if (failed) throw_python();
  return results;
}

}  // namespace untorch::python
