// Tensor: exchange through numpy, DLPack and the CUDA array interface.
#include "tensor.h"

#include <nanobind/stl/string.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "call.h"
#include "dlpack.h"
#include "gil.h"
#include "types.h"

namespace nb = nanobind;

namespace untorch::python {
namespace {

struct FreeTensor {
  void operator()(untorch_tensor* tensor) const { untorch_tensor_free(tensor); }
};
using OwnedTensor = std::unique_ptr<untorch_tensor, FreeTensor>;

[[noreturn]] void raise_buffer_error(const std::string& text) {
  PyErr_SetString(PyExc_BufferError, text.c_str());
  throw_python();
}

bool is_row_major(const untorch_view& v) {
  std::int64_t expected = 1;
  for (int d = v.ndim; d-- > 0;) {
    if (v.sizes[d] == 0) return true;
    if (v.sizes[d] != 1 && v.strides[d] != expected) return false;
    expected *= v.sizes[d];
  }
  return true;
}

}  // namespace

Tensor* Tensor::of_kernel(untorch_tensor* handle) {
  untorch_view view;
  untorch_tensor_view(handle, &view);
  PyObject* const owner = untorch_tensor_use_count(handle) == 0 ? Inputs::owner_on_this_thread(view.data) : nullptr;
  return new Tensor(handle, owner == nullptr ? nb::object() : nb::borrow(owner),
                    view.device_type != 0 ? current_producer(view.device_index) : Producer{});
}

void Tensor::forget() {
  untorch_status status;
  if (untorch_tensor* const copy = finish_copy(status)) untorch_tensor_free(copy);
  if (owned_ && handle_ != nullptr) untorch_tensor_free(handle_);
  handle_ = nullptr;
}

untorch_tensor* Tensor::handle() const {
  if (handle_ == nullptr) raise(UNTORCH_CLOSED, "this tensor belonged to a call of a kernel that has returned");
  return handle_;
}

untorch_view Tensor::view() const {
  untorch_view view;
  untorch_tensor_view(handle(), &view);
  return view;
}

std::string Tensor::device() const {
  const untorch_view v = view();
  return v.device_type == 0 ? "cpu" : "cuda:" + std::to_string(v.device_index);
}

std::string Tensor::dtype() const {
  const char* name = dtype_name(view().dtype);
  return name != nullptr ? name : "unknown";
}

std::string Tensor::description() const {
  const untorch_view v = view();
  std::string sizes;
  for (int d = 0; d < v.ndim; ++d) sizes += (d == 0 ? "" : ", ") + std::to_string(v.sizes[d]);
  return dtype() + "[" + sizes + "] on " + device();
}

nb::tuple Tensor::dims(bool strides) const {
  const untorch_view v = view();
  nb::list out;
  for (int d = 0; d < v.ndim; ++d) out.append(strides ? v.strides[d] : v.sizes[d]);
  return nb::tuple(out);
}

untorch_tensor* Tensor::second_handle() const {
  untorch_tensor* out = nullptr;
  check(untorch_tensor_share(handle(), &out));
  return out;
}

void Tensor::wait_for_producer() const {
  if (!producer_.known) return;
  const int device = view().device_index;
  void* consumer = nullptr;
  check(untorch_call_stream(device, &consumer));
  check(untorch_stream_wait(device, consumer, producer_.stream));
}

void Tensor::check_not_captured() const {
  if (producer_.known && untorch_stream_is_capturing(view().device_index, producer_.stream) != 0) {
    raise(UNTORCH_UNSUPPORTED,
          "a copy on the CPU waits for the GPU, which a call that is being captured into a CUDA graph does not allow: "
          "work on the GPU, or call the method without a graph");
  }
}

void Tensor::copy_to_host_async() {
  if (on_cpu() || copy_ != nullptr) return;
  check_not_captured();
  wait_for_producer();
  check(untorch_tensor_to_host_async(handle(), &copy_, &copied_));
}

untorch_tensor* Tensor::finish_copy(untorch_status& status) noexcept {
  untorch_tensor* const copy = std::exchange(copy_, nullptr);
  untorch_event* const copied = std::exchange(copied_, nullptr);
  status = UNTORCH_OK;
  if (copied == nullptr) return copy;
  const GilRelease release;
  status = untorch_event_synchronize(copied);
  untorch_event_free(copied);
  return copy;
}

untorch_tensor* Tensor::to_host() const {
  check_not_captured();
  wait_for_producer();
  untorch_tensor* copy = nullptr;
  untorch_tensor* const from = handle();
  untorch_status status;
  {
    const GilRelease release;
    status = untorch_tensor_to_host(from, &copy);
  }
  check(status);
  return copy;
}

nb::object Tensor::numpy() {
  const untorch_view v = view();
  if (copy_ != nullptr) {
    untorch_status status;
    OwnedTensor copy(finish_copy(status));
    check(status);
    return steal_or_throw(to_numpy(copy.release(), nullptr, true));
  }
  if (v.device_type != 0) return steal_or_throw(to_numpy(to_host(), nullptr, true));
  if (v.data == nullptr && v.ndim == 0 && dtype_name(v.dtype) == nullptr) return nb::none();
  if (!owned_ && !owner_.is_valid() && v.data != nullptr && untorch_tensor_use_count(handle()) == 0) {
    // Memory of the model library: it goes when the program is closed, although arrays may be left.
    OwnedTensor copy(untorch_tensor_new());
    if (copy == nullptr) throw std::bad_alloc();
    check(untorch_tensor_copy_of(handle(), copy.get()));
    return steal_or_throw(to_numpy(copy.release(), nullptr, false));
  }
  // The array keeps a second handle on the storage, or the owner of memory that the storage only borrows: it may
  // outlive this object.
  return steal_or_throw(to_numpy(second_handle(), owner_.ptr(), !read_only()));
}

nb::object Tensor::array(const nb::object& dtype, const nb::object& copy) {
  if (!on_cpu()) {
    PyErr_Format(PyExc_TypeError, "the tensor is on %s: numpy() makes a copy on the CPU, DLPack makes none",
                 device().c_str());
    throw_python();
  }
  nb::object out = numpy();
  if (!dtype.is_none() && !nb::cast<bool>(out.attr("dtype").attr("__eq__")(dtype))) {
    if (!copy.is_none() && !nb::cast<bool>(copy)) {
      PyErr_SetString(PyExc_ValueError, "another dtype needs a copy, which copy=False forbids");
      throw_python();
    }
    return out.attr("astype")(dtype);
  }
  return !copy.is_none() && nb::cast<bool>(copy) ? out.attr("copy")() : out;
}

nb::object Tensor::dlpack(const nb::object& stream, const nb::object& max_version, const nb::object& dl_device,
                          const nb::object& copy) const {
  release_done();
  const bool versioned = !max_version.is_none() && nb::cast<int>(nb::object(max_version[0])) >= 1;
  if (!on_cpu()) return dlpack_of_cuda(stream, versioned, dl_device, copy);
  if (!stream.is_none()) raise_buffer_error("a CPU tensor has no stream: pass stream=None");
  if (!copy.is_none() && nb::cast<bool>(copy)) raise_buffer_error("copy=True is not supported: copy what you get");
  if (!dl_device.is_none() && nb::cast<int>(nb::object(dl_device[0])) != kDLCPU)
    raise_buffer_error("the tensor is on the CPU: dl_device must be (1, 0)");
  return steal_or_throw(to_dlpack(handle(), owner_.ptr(), {versioned, read_only()}));
}

nb::object Tensor::dlpack_of_cuda(const nb::object& stream, bool versioned, const nb::object& dl_device,
                                  const nb::object& copy) const {
  const untorch_view v = view();
  const bool may_copy = copy.is_none() || nb::cast<bool>(copy);
  if (!dl_device.is_none()) {
    const int type = nb::cast<int>(nb::object(dl_device[0])), index = nb::cast<int>(nb::object(dl_device[1]));
    if (type == kDLCPU) {
      if (!may_copy)
        raise_buffer_error("the tensor is on " + device() + ": the CPU needs a copy, which copy=False forbids");
      const OwnedTensor host(to_host());
      return steal_or_throw(to_dlpack(host.get(), nullptr, {versioned, false, true}));
    }
    if (type != kDLCUDA || index != v.device_index) {
      raise_buffer_error("the tensor is on " + device() + ": dl_device must be (2, " + std::to_string(v.device_index) +
                         ") or (1, 0)");
    }
  }
  if (!copy.is_none() && nb::cast<bool>(copy)) raise_buffer_error("copy=True is not supported: copy what you get");
  DlpackOptions options{versioned, read_only()};
  options.device_index = v.device_index;
  void* consumer = nullptr;
  if (consumer_stream(stream, consumer) && producer_.known) {
    check(untorch_stream_wait(v.device_index, consumer, producer_.stream));
    options.ordered = consumer != producer_.stream;
    options.consumer = consumer;
    options.producer = producer_.stream;
  }
  options.stream_owner = producer_.owner.is_none() ? nullptr : producer_.owner.ptr();
  return steal_or_throw(to_dlpack(handle(), owner_.ptr(), options));
}

nb::dict Tensor::cuda_array_interface() const {
  const untorch_view v = view();
  if (v.device_type == 0) throw nb::attribute_error("the tensor is on the CPU: it has no __cuda_array_interface__");
  const char* code = typestr(v.dtype);
  if (code == nullptr) {
    throw nb::attribute_error((dtype() + " has no type string in __cuda_array_interface__: use DLPack").c_str());
  }
  nb::dict out;
  out["version"] = 3;
  out["shape"] = dims(false);
  out["typestr"] = code;
  out["data"] = nb::make_tuple(reinterpret_cast<std::uintptr_t>(v.data), read_only());
  nb::object strides = nb::none();
  if (!is_row_major(v)) {
    nb::list bytes;
    for (int d = 0; d < v.ndim; ++d) bytes.append(v.strides[d] * item_size(v.dtype));
    strides = nb::tuple(bytes);
  }
  out["strides"] = strides;
  out["stream"] = producer_.known ? nb::object(nb::int_(stream_number(producer_.stream))) : nb::none();
  return out;
}

void Tensor::assign(nb::handle array, int device) {
  Operand operand;
  untorch_view given;
  const bool captured = device >= 0 && untorch_stream_is_capturing(device, current_producer(device).stream) != 0;
  const Taker taker{"proxy", device < 0 ? 0 : 1, device, captured};
  if (!operand.set(array.ptr(), taker, 0, given)) throw_python();
  if (device >= 0 && given.device_type == 0) {
    raise(UNTORCH_MODEL, "the array is on the CPU, the call on cuda:" + std::to_string(device) + ": return one there");
  }
  check(untorch_tensor_assign(handle(), &given));
  if (device >= 0 && operand.must_stay()) {
    keep_for_call(device, current_producer(device).stream, nb::steal(operand.take_owner()));
  }
}

void Tensor::convert(const std::string& dtype, const nb::object& strides) {
  std::int32_t code = -1;
  for (const TypeRow& row : kTypes) {
    if (dtype == dtype_name(row.code)) code = row.code;
  }
  if (code < 0) raise(UNTORCH_UNSUPPORTED, "unknown dtype " + dtype);
  std::vector<std::int64_t> wanted;
  if (!strides.is_none()) {
    for (nb::handle stride : strides) wanted.push_back(nb::cast<std::int64_t>(stride));
    if (static_cast<std::int32_t>(wanted.size()) != view().ndim) raise(UNTORCH_INTERNAL, "one stride a dimension");
  }
  check(untorch_tensor_convert(handle(), code, strides.is_none() ? nullptr : wanted.data(), handle()));
}

void Tensor::copy_to(nb::handle array) const {
  const untorch_view v = view();
  Operand operand;
  untorch_view given;
  if (!operand.set(array.ptr(), {"copy_to", v.device_type, v.device_index}, 0, given)) throw_python();
  if (v.device_type != 0) wait_for_producer();
  untorch_tensor* const from = handle();
  untorch_status status;
  {
    const GilRelease release;
    status = untorch_tensor_copy(&given, from);
  }
  check(status);
  if (v.device_type != 0 && given.device_type != 0 && !caller_has_stream()) {
    void* stream = nullptr;
    check(untorch_call_stream(v.device_index, &stream));
    keep_until_done(v.device_index, stream, {operand.take_owner()});
  }
}

void Tensor::copy_row(std::int64_t source, std::int64_t target) const {
  if (read_only()) raise(UNTORCH_INVALID_ARGUMENT, "copy_row: the tensor is read-only");
  if (!on_cpu()) wait_for_producer();
  check(untorch_tensor_copy_row(handle(), source, target));
}

void bind_tensor(nb::module_& m) {
  nb::class_<Tensor>(m, "Tensor",
                     "An output array in the library's memory; exchange it through DLPack or numpy().\n\nOn a GPU its "
                     "values may still be being computed. DLPack makes the consumer's stream wait for them, numpy() "
                     "waits itself.")
      .def("__repr__", [](const Tensor& t) { return "<untorch.Tensor " + t.description() + ">"; })
      .def("_repr_html_", [](const Tensor& t) { return "<code>untorch.Tensor</code> " + t.description(); })
      .def_prop_ro("shape", [](const Tensor& t) { return t.dims(false); })
      .def_prop_ro(
          "strides", [](const Tensor& t) { return t.dims(true); }, "In elements.")
      .def_prop_ro("dtype", &Tensor::dtype)
      .def_prop_ro("device", &Tensor::device, "\"cpu\", or \"cuda:0\".")
      .def_prop_ro("defined", [](const Tensor& t) { return t.view().data != nullptr; })
      .def("numpy", &Tensor::numpy, "The same memory as a numpy array; of a CUDA tensor, a copy, for which it waits.")
      .def("copy_to_host_async", &Tensor::copy_to_host_async,
           "On a GPU: begins the copy that the next numpy() gives. Work that is enqueued later does not delay it.")
      .def("assign", &Tensor::assign, nb::arg("array"), nb::arg("device") = -1)
      .def("convert", &Tensor::convert, nb::arg("dtype"), nb::arg("strides").none() = nb::none())
      .def("copy_row", &Tensor::copy_row, nb::arg("source"), nb::arg("target"))
      .def("copy_to", &Tensor::copy_to, nb::arg("array"),
           "Copies the values into an array of the same dtype and shape, on the CPU or the same GPU.")
      .def("__array__", &Tensor::array, nb::arg("dtype").none() = nb::none(), nb::kw_only(),
           nb::arg("copy").none() = nb::none())
      .def("__dlpack__", &Tensor::dlpack, nb::kw_only(), nb::arg("stream").none() = nb::none(),
           nb::arg("max_version").none() = nb::none(), nb::arg("dl_device").none() = nb::none(),
           nb::arg("copy").none() = nb::none())
      .def("__dlpack_device__",
           [](const Tensor& t) {
             const untorch_view v = t.view();
             return v.device_type == 0 ? nb::make_tuple(int{kDLCPU}, 0) : nb::make_tuple(int{kDLCUDA}, v.device_index);
           })
      .def_prop_ro("__cuda_array_interface__", &Tensor::cuda_array_interface);
}

}  // namespace untorch::python
