// Arrays in and out: numpy through its C API, anything else through DLPack or the CUDA array interface.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "model/capi.h"

namespace untorch::python {

constexpr int kMaxDims = 64;

// Who takes an array: the method's name, for messages, and the device that it runs on. `unordered`: producers do not
// order their work before the call stream; in a capture that would make it depend on work outside.
struct Taker {
  const char* method;
  std::int32_t device_type, device_index;
  bool unordered = false;
};

// What keeps the view of an array argument valid: its owner, and room for sizes and strides. Lives for one call.
class Operand {
 public:
  Operand() = default;
  Operand(const Operand&) = delete;
  Operand& operator=(const Operand&) = delete;
  ~Operand() { Py_XDECREF(owner_); }

  // Fills `view` from `object`; the producer of an array on a GPU orders its work before the call stream. On failure
  // sets a Python exception that names the argument, and returns false.
  bool set(PyObject* object, const Taker& taker, std::size_t index, untorch_view& view);
  PyObject* owner() const noexcept { return owner_; }  // the array, or the DLPack capsule
  // The same, now the caller's reference.
  PyObject* take_owner() noexcept { return std::exchange(owner_, nullptr); }
  bool is_numpy() const noexcept { return numpy_; }
  // An array on a GPU that may not go away before the call's work is done. Not so for a Tensor of the call's own
  // stream: its memory is used again in that stream's order.
  bool must_stay() const noexcept { return on_gpu_ && !ordered_; }
  bool writable() const noexcept { return writable_; }

 private:
  bool set_numpy(PyObject* array, const char* method, std::size_t index, untorch_view& view);
  bool set_tensor(PyObject* tensor, const Taker& taker, std::size_t index, untorch_view& view);
  bool set_dlpack(PyObject* object, const Taker& taker, std::size_t index, untorch_view& view);
  bool take_capsule(PyObject* object, const Taker& taker, std::size_t index);
  bool set_cuda_array(PyObject* object, const Taker& taker, std::size_t index, untorch_view& view);
  // Room for sizes and strides of `ndim` dimensions.
  void make_room(int ndim) {
    sizes_.resize(static_cast<std::size_t>(ndim));
    strides_.resize(static_cast<std::size_t>(ndim));
  }

  PyObject* owner_ = nullptr;
  bool numpy_ = false, writable_ = false, on_gpu_ = false, ordered_ = false;
  SmallVector<std::int64_t, 6> sizes_, strides_;
};

// Imports numpy and its C API, once: importing this module does not. Sets a Python exception on failure.
bool need_numpy();
// True for numpy.ndarray and its subclasses. Throws when numpy is missing.
bool is_ndarray(PyObject* object);
// True for what can be taken through DLPack or the CUDA array interface.
bool has_array_protocol(PyObject* object);
inline bool has_attribute(PyObject* object, const char* name) { return PyObject_HasAttrString(object, name) != 0; }

// Of numpy arrays:
bool is_writeable(PyObject* array);
bool same_form(PyObject* a, PyObject* b);  // dtype and shape
std::string form_of(PyObject* array);      // "float32[2, 3]"
// Copies values into an array of the same form; false with a Python exception set.
bool copy_values(PyObject* to, PyObject* from);

// A numpy array over the tensor's memory; takes the handle over, also on failure (then null, with an exception set).
// `view`: the tensor's. `owner` (borrowed, may be null): the input whose memory it is; then the array keeps that alive
// instead.
PyObject* to_numpy(untorch_tensor* tensor, const untorch_view& view, PyObject* owner, bool writable);

inline PyObject* to_numpy(untorch_tensor* tensor, PyObject* owner, bool writable) {
  untorch_view view;
  untorch_tensor_view(tensor, &view);
  return to_numpy(tensor, view, owner, writable);
}

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

// The exception class of a status; borrowed from a module that stays loaded.
PyObject* exception_class(untorch_status status);
// Sets the Python exception for a status.
void set_error(untorch_status status, const std::string& text);
// The same, and throws it.
[[noreturn]] void raise(untorch_status status, const std::string& text);
// For an argument of another Python type: ArgumentTypeError, which is also a TypeError.
void set_type_error(const std::string& text);
[[noreturn]] void raise_type(const std::string& text);
// Sets the Python exception for a status, with untorch_last_error() as its text.
void raise_status(untorch_status status);
// str(object) in UTF-8, for messages.
std::string text_of(nanobind::handle object);
// type(object).__name__
std::string class_name(PyObject* object);
// The status that stands for the Python exception that is set; its text goes to untorch_set_error. The exception waits
// for throw_call_error.
void store_python_error();
// After a call that failed: throws the exception of a status. If a Python kernel raised, it is the cause; one that is
// no Exception (KeyboardInterrupt, SystemExit) is raised itself, and so is what ended the call as a signal handler
// raised it.
[[noreturn]] void throw_call_error(untorch_status status);
// The exception that is set, with its traceback, which is then set no longer.
nanobind::object take_exception();
void set_exception(const nanobind::object& exception);
// Makes `cause` the cause of the exception that is set.
void set_cause(const nanobind::object& cause);
// "TypeError: its text"
std::string describe_exception(nanobind::handle exception);
// repr(object), or its type where that fails: for messages.
std::string repr_of(nanobind::handle object);
// Lets Python's signal handlers run; not 0 if one raised. Installed as the library's interrupt check.
int check_signals();

}  // namespace untorch::python
