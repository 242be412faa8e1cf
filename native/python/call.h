// A call on flat arrays: their views, the run without the interpreter lock, and what Python gets back.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <span>
#include <utility>

#include "convert.h"
#include "gil.h"
#include "stream.h"
#include "tensor.h"
#include "tree.h"

namespace untorch::python {

namespace nb = nanobind;

// The arguments of one call as the library takes them.
class Inputs {
 public:
  // Throws the Python exception of the first that is no array for the taker.
  Inputs(const Taker& taker, std::span<PyObject* const> arrays);

  const untorch_view* views() const noexcept { return views_.data(); }
  std::size_t size() const noexcept { return views_.size(); }
  bool all_numpy() const noexcept { return all_numpy_; }
  Operand& operator[](std::size_t i) noexcept { return operands_[i]; }
  // The array that the address lies in, of the innermost call that runs on this thread; null if there is none.
  static PyObject* owner_on_this_thread(const void* address);
  // Arrays on a GPU that the caller may let go of while the GPU reads them; the references are the caller's.
  std::vector<PyObject*> take_borrowed_from_gpu();

 private:
  friend class RunningInputs;
  static thread_local constinit const Inputs* running_;

  SmallVector<Operand, 8> operands_;
  SmallVector<untorch_view, 8> views_;
  bool all_numpy_ = true, borrows_gpu_ = false;
};

// Tells kernels of the call whose arrays they get.
class RunningInputs {
 public:
  explicit RunningInputs(const Inputs& inputs) : before_(std::exchange(Inputs::running_, &inputs)) {}
  ~RunningInputs() { Inputs::running_ = before_; }
  RunningInputs(const RunningInputs&) = delete;
  RunningInputs& operator=(const RunningInputs&) = delete;

 private:
  const Inputs* const before_;
};

// What a run gives: handles, and of which input each is the memory (-1: none).
struct Outputs {
  explicit Outputs(std::size_t count) : tensors(count), aliases(count) {}
  ~Outputs() {
    for (untorch_tensor* tensor : tensors) untorch_tensor_free(tensor);
  }
  Outputs(const Outputs&) = delete;
  Outputs& operator=(const Outputs&) = delete;
  SmallVector<untorch_tensor*, 8> tensors;
  SmallVector<std::int32_t, 8> aliases;
};

enum class Form { kLikeInputs, kNumpy, kTensor };  // of the outputs; like the inputs: numpy when all of them are

// Makes Python objects of the outputs. Throws.
void collect(Outputs& outputs, Inputs& inputs, bool numpy, const Producer& producer, References& results);

// Runs `body(views, num_inputs, outputs, aliases, num_outputs)`, which returns a status, on flat arrays.
template <class Body>
void run_on_arrays(const Taker& taker, std::span<PyObject* const> arrays, std::size_t num_outputs, Form form,
                   References& results, Body&& body) {
  release_done();
  Inputs inputs(taker, arrays);
  Producer producer;
  if (taker.device_type != 0) producer = current_producer(taker.device_index);
  Outputs outputs(num_outputs);
  untorch_status status;
  {
    const RunningInputs running(inputs);
    const GilRelease release;
    status = body(inputs.views(), inputs.size(), outputs.tensors.data(), outputs.aliases.data(), num_outputs);
  }
  // On a stream of the library's own, nothing else keeps the producer from using the memory again while the GPU reads
  // it. A caller who set the stream also orders what comes after.
  struct Keep {
    Inputs& inputs;
    const Taker& taker;
    const Producer& producer;
    ~Keep() {
      if (taker.device_type == 0 || caller_has_stream()) return;
      PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
      PyErr_Fetch(&type, &value, &traceback);
      keep_until_done(taker.device_index, producer.stream, inputs.take_borrowed_from_gpu());
      PyErr_Restore(type, value, traceback);
    }
  } keep{inputs, taker, producer};
  if (status != UNTORCH_OK) throw_call_error(status);
  if (const char* text = untorch_take_warning(); text != nullptr) [[unlikely]] {
    if (PyErr_WarnEx(PyExc_RuntimeWarning, text, 1) != 0) throw_python();
  }
  const bool numpy = form == Form::kNumpy || (form == Form::kLikeInputs && inputs.all_numpy());
  collect(outputs, inputs, numpy, producer, results);
}

}  // namespace untorch::python
