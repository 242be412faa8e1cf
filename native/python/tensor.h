// The Python class Tensor: a handle of the library, with the stream that produced it.
#pragma once

#include <nanobind/nanobind.h>

#include "convert.h"
#include "stream.h"
#include "untorch/untorch.h"

namespace untorch::python {

[[noreturn]] inline void throw_python() { throw nanobind::python_error(); }

// Throws the Python exception of a status that is not UNTORCH_OK.
inline void check(untorch_status status) {
  if (status == UNTORCH_OK) return;
  raise_status(status);
  throw_python();
}

inline nanobind::object steal_or_throw(PyObject* object) {
  if (object == nullptr) throw_python();
  return nanobind::steal(object);
}

// An output, or an operand of a proxy kernel (then borrowed for the kernel's time).
class Tensor {
 public:
  // An operand of a proxy kernel. If it is an input of the call, its arrays keep the caller's array.
  static Tensor* of_kernel(untorch_tensor* handle);
  Tensor(untorch_tensor* handle, Producer producer) : handle_(handle), owned_(true), producer_(std::move(producer)) {}
  // An output that is an input's memory: keeps the input.
  Tensor(untorch_tensor* handle, nanobind::object owner, bool read_only, Producer producer)
      : handle_(handle),
        owned_(true),
        read_only_(read_only),
        owner_(std::move(owner)),
        producer_(std::move(producer)) {}
  ~Tensor() { forget(); }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  void forget();
  untorch_tensor* handle() const;
  bool read_only() const { return read_only_ || untorch_tensor_is_writable(handle()) == 0; }
  untorch_view view() const;
  bool on_cpu() const { return view().device_type == 0; }
  const Producer& producer() const { return producer_; }
  // Whether its memory is the library's own and is used again in the order of this stream.
  bool belongs_to(const void* stream) const {
    return owned_ && !owner_.is_valid() && producer_.known && producer_.stream == stream;
  }
  std::string device() const;
  // "float32[2, 3] on cuda:0".
  std::string description() const;
  std::string dtype() const;

  nanobind::tuple dims(bool strides) const;
  // The same memory; of a CUDA tensor, a copy on the CPU.
  nanobind::object numpy();
  nanobind::object array(const nanobind::object& dtype, const nanobind::object& copy);
  nanobind::object dlpack(const nanobind::object& stream, const nanobind::object& max_version,
                          const nanobind::object& dl_device, const nanobind::object& copy) const;
  nanobind::dict cuda_array_interface() const;
  // Sets the tensor to a copy of an array on that GPU (-1: on the CPU): how a proxy kernel gives its result.
  void assign(nanobind::handle array, int device);
  // Sets it to a copy in another dtype and, unless None, with these strides.
  void convert(const std::string& dtype, const nanobind::object& strides);
  // On a GPU: begins the copy that the next numpy() gives, in the order of the call stream.
  void copy_to_host_async();
  // Copies into an array's memory; on the GPU in the order of the call stream.
  void copy_to(nanobind::handle array) const;
  // Copies one row of the first dimension over another, on a GPU in the order of the call stream.
  void copy_row(std::int64_t source, std::int64_t target) const;

 private:
  Tensor(untorch_tensor* handle, nanobind::object owner, Producer producer)
      : handle_(handle), owned_(false), owner_(std::move(owner)), producer_(std::move(producer)) {}
  nanobind::object dlpack_of_cuda(const nanobind::object& stream, bool versioned, const nanobind::object& dl_device,
                                  const nanobind::object& copy) const;
  // A copy on the CPU; the handle is the caller's to free.
  untorch_tensor* to_host() const;
  void check_not_captured() const;
  // Waits for the copy that copy_to_host_async began. The caller's to free; null if there is none.
  untorch_tensor* finish_copy(untorch_status& status) noexcept;
  // Makes the call stream wait for what produced the tensor.
  void wait_for_producer() const;
  untorch_tensor* second_handle() const;

  untorch_tensor* handle_;
  untorch_tensor* copy_ = nullptr;  // on the CPU, there once copied_ is done
  untorch_event* copied_ = nullptr;
  bool owned_;
  bool read_only_ = false;
  nanobind::object owner_;
  Producer producer_;
};

void bind_tensor(nanobind::module_& m);

}  // namespace untorch::python
