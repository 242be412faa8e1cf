// Arrays in and out: numpy through its C API, anything else through DLPack or the CUDA array interface.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "untorch/untorch.h"

namespace untorch::python {

constexpr int kMaxDims = 64;

// Who takes an array: the method's name, for messages, and the device that it runs on.
struct Taker {
  const char* method;
  std::int32_t device_type, device_index;
};

// An array argument as a view, with what keeps it valid. Not copyable; lives for one call.
class Operand {
 public:
  Operand() = default;
  Operand(const Operand&) = delete;
  Operand& operator=(const Operand&) = delete;
  ~Operand();

  // Fills the view from `object`; the producer of an array on a GPU orders its work before the call stream. On failure
  // sets a Python exception that names the argument, and returns false.
  bool set(PyObject* object, const Taker& taker, std::size_t index);
  const untorch_view& view() const noexcept { return view_; }
  PyObject* owner() const noexcept { return owner_; }  // the array, or the DLPack capsule
  // The same, now the caller's reference.
  PyObject* take_owner() noexcept { return std::exchange(owner_, nullptr); }
  bool is_numpy() const noexcept { return numpy_; }
  // An array on a GPU that may not go away before the call's work is done. Not so for a Tensor of the call's own
  // stream: its memory is used again in that stream's order.
  bool must_stay() const noexcept { return view_.device_type != 0 && !ordered_; }
  bool writable() const noexcept { return writable_; }

 private:
  bool set_numpy(PyObject* array, const char* method, std::size_t index);
  bool set_tensor(PyObject* tensor, const Taker& taker, std::size_t index);
  bool set_dlpack(PyObject* object, const Taker& taker, std::size_t index);
  bool set_cuda_array(PyObject* object, const Taker& taker, std::size_t index);

  untorch_view view_{};
  PyObject* owner_ = nullptr;
  bool numpy_ = false, writable_ = false, ordered_ = false;
  std::int64_t sizes_[kMaxDims], strides_[kMaxDims];
};

// Imports numpy and its C API, once: importing this module does not. Sets a Python exception on failure.
bool need_numpy();
// True for numpy.ndarray and its subclasses and numpy scalars.
bool is_numpy(PyObject* object);
// True for objects that this module can take as tensors.
bool is_array(PyObject* object);

// A numpy array over the tensor's memory; takes the handle over, also on failure (then null, with an exception set).
// `owner` (borrowed, may be null): the input whose memory it is; then the array keeps that alive instead.
PyObject* to_numpy(untorch_tensor* tensor, PyObject* owner, bool writable);

// A numpy array with a copy of a CUDA tensor's values, for which it waits; takes the handle over likewise. On the
// thread whose call made the tensor.
PyObject* copy_to_numpy(untorch_tensor* tensor);

struct DlpackOptions {
  bool versioned, read_only;  // versioned: DLPack 1.x
  bool copied = false;        // the memory is the consumer's alone
  // Of a tensor on a GPU: when the consumer lets go, the producer's stream waits for the consumer's before the memory
  // is used again.
  bool ordered = false;
  std::int32_t device_index = 0;
  void* consumer = nullptr;
  void* producer = nullptr;
  PyObject* stream_owner = nullptr;  // borrowed, may be null: keeps the producer's stream
};

// A DLPack capsule over the tensor (another handle on the same storage). `owner` (borrowed, may be null): whose memory
// it is, when the storage does not own it.
PyObject* to_dlpack(untorch_tensor* tensor, PyObject* owner, const DlpackOptions& options);

// "float32" …; nullptr for an unknown code.
const char* dtype_name(std::int32_t dtype);
// numpy's type string ("<f4"); nullptr where there is none.
const char* typestr(std::int32_t dtype);
// Bytes of an element; 0 for an unknown code.
std::int64_t item_size(std::int32_t dtype);

// Sets the Python exception for a status, with untorch_last_error() as its text.
void raise_status(untorch_status status);
// The status that stands for the Python exception that is set; its text goes to untorch_set_error.
void store_python_error();

}  // namespace untorch::python
