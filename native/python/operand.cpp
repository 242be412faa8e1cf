// Arrays of other libraries as operands: DLPack, and the CUDA array interface.
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "convert.h"
#include "stream.h"
#include "tensor.h"
#include "types.h"

namespace untorch::python {
namespace {

std::string argument_text(const char* method, std::size_t index, const std::string& text) {
  return "method '" + std::string(method) + "', argument " + std::to_string(index) + ": " + text;
}

}  // namespace

void raise_argument(const char* method, std::size_t index, const std::string& text) {
  set_error(UNTORCH_INVALID_ARGUMENT, argument_text(method, index, text));
}

void raise_argument_type(const char* method, std::size_t index, const std::string& text) {
  set_type_error(argument_text(method, index, text));
}

namespace {

// What the object's own method raised, as the argument's error; that is the cause. KeyboardInterrupt and the like, and
// this package's own errors, stay as they are.
bool refuse_raised(const Taker& taker, std::size_t index, PyObject* object, const char* what) {
  const nanobind::object cause = take_exception();
  const auto is = [&](PyObject* type) { return PyErr_GivenExceptionMatches(cause.ptr(), type) != 0; };
  if (!is(PyExc_Exception) || is(exception_class(UNTORCH_INTERNAL))) {
    set_exception(cause);
    return false;
  }
  const std::string text = std::string(what) + " of " + type_name(object) + " raised " + describe_exception(cause);
  if (is(PyExc_MemoryError)) {
    set_error(UNTORCH_OUT_OF_MEMORY, argument_text(taker.method, index, text));
  } else {
    raise_argument_type(taker.method, index, text);
  }
  set_cause(cause);
  return false;
}

std::string device_text(std::int32_t index) { return "cuda:" + std::to_string(index); }

// An array on a GPU for a method that runs elsewhere: said before its producer is asked for anything.
bool check_device(const Taker& taker, std::size_t index, std::int32_t device) {
  if (taker.device_type == 1 && taker.device_index == device) return true;
  raise_argument(taker.method, index,
                 "the array is on " + device_text(device) + ", the method runs on " +
                     (taker.device_type == 1 ? device_text(taker.device_index) : "the CPU") + ": pass a copy");
  return false;
}

// A producer's work that the call has to come after.
bool wait_for_stream(std::int32_t device, void* producer) {
  void* consumer = nullptr;
  untorch_status status = untorch_call_stream(device, &consumer);
  if (status == UNTORCH_OK) status = untorch_stream_wait(device, consumer, producer);
  if (status != UNTORCH_OK) raise_status(status);
  return status == UNTORCH_OK;
}

// The capsule of an object, as new a version of DLPack as it has. `stream` (borrowed, may be null): the number of the
// stream that it has to order its work before.
PyObject* ask_for_capsule(PyObject* object, PyObject* stream) {
  static PyObject* const name = PyUnicode_InternFromString("__dlpack__");
  static PyObject* const max_version = Py_BuildValue("(s)", "max_version");
  static PyObject* const with_stream = Py_BuildValue("(ss)", "stream", "max_version");
  static PyObject* const stream_only = Py_BuildValue("(s)", "stream");
  static PyObject* const version = Py_BuildValue("(ii)", 1, 0);
  PyObject* plain[] = {object, version};
  PyObject* ordered[] = {object, stream, version};
  PyObject* capsule = stream == nullptr
                          ? PyObject_VectorcallMethod(name, plain, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, max_version)
                          : PyObject_VectorcallMethod(name, ordered, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, with_stream);
  if (capsule != nullptr || PyErr_ExceptionMatches(PyExc_TypeError) == 0) return capsule;
  PyErr_Clear();  // a producer older than DLPack 1.0; one that fails fails again
  if (stream == nullptr) return call_method(object, name);
  return PyObject_VectorcallMethod(name, ordered, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, stream_only);
}

// Where the object says that it is. Objects that do not say are the CPU's, as before DLPack had the question.
bool dlpack_device(PyObject* object, long& type, long& index) {
  static PyObject* const name = PyUnicode_InternFromString("__dlpack_device__");
  type = kDLCPU;
  index = 0;
  if (PyObject_HasAttr(object, name) == 0) return true;
  PyObject* answer = call_method(object, name);
  if (answer == nullptr) return false;
  bool is_pair = PyTuple_Check(answer) && tuple_size(answer) == 2;
  if (is_pair) {
    type = PyLong_AsLong(tuple_item(answer, 0));
    index = PyErr_Occurred() == nullptr ? PyLong_AsLong(tuple_item(answer, 1)) : 0;
    is_pair = PyErr_Occurred() == nullptr;
  }
  if (!is_pair) {
    PyErr_Clear();
    PyErr_Format(PyExc_TypeError, "expected a pair of integers, got %s", type_name(answer).c_str());
  }
  Py_DECREF(answer);
  return is_pair;
}

// The functions of a type that has them of its own; null: it has none. A subclass may see to __dlpack__ alone.
const DLExchange* find_exchange(PyObject* type) {
  const nanobind::object attributes = nanobind::steal(PyObject_GetAttrString(type, "__dict__"));
  const nanobind::object capsule =
      attributes.is_valid() ? nanobind::steal(PyMapping_GetItemString(attributes.ptr(), "__dlpack_c_exchange_api__"))
                            : nanobind::object();
  const DLExchange* found = capsule.is_valid() && PyCapsule_IsValid(capsule.ptr(), kDLExchangeName) != 0
                                ? static_cast<const DLExchange*>(PyCapsule_GetPointer(capsule.ptr(), kDLExchangeName))
                                : nullptr;
  PyErr_Clear();
  while (found != nullptr && found->major != 1) found = found->previous;
  return found;
}

const DLExchange* exchange_of(PyObject* object) {
  constexpr std::size_t kMostTypes = 16;
  // Types that were met; kept alive. Guarded by the interpreter lock.
  static auto& known = *new std::vector<std::pair<PyObject*, const DLExchange*>>;
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  for (const auto& [met, exchange] : known) {
    if (met == type) return exchange;
  }
  const DLExchange* const found = find_exchange(type);
  if (known.size() < kMostTypes) known.emplace_back(Py_NewRef(type), found);
  return found;
}

// Whether only __dlpack__ can tell. It refuses what the structure cannot say: that a gradient is wanted, or that
// complex values are conjugated.
bool needs_question(PyObject* object, const DLTensor& tensor) {
  const std::int32_t device = tensor.device.device_type;
  if (device != kDLCPU && device != kDLCUDA && device != kDLCUDAHost) return true;
  if (tensor.dtype.code == kDLComplex) return true;
  PyObject* const wanted = PyObject_GetAttrString(object, "requires_grad");
  const bool is_true = wanted == Py_True;
  Py_XDECREF(wanted);
  PyErr_Clear();
  return is_true;
}

// A capsule like __dlpack__'s by the type's C functions, a tenth of the time. Null without an exception: ask the
// object.
PyObject* exchange_capsule(PyObject* object, void*& stream) {
  const DLExchange* const exchange = exchange_of(object);
  if (exchange == nullptr) return nullptr;
  DLManagedTensorVersioned* managed = nullptr;
  const bool has_stream = [&] {
    if (exchange->managed_from_object(object, &managed) != 0 || managed == nullptr) return false;
    const DLDevice& device = managed->dl_tensor.device;
    if (needs_question(object, managed->dl_tensor)) return false;
    return device.device_type != kDLCUDA || exchange->current_stream(kDLCUDA, device.device_id, &stream) == 0;
  }();
  PyObject* const capsule = !has_stream ? nullptr : PyCapsule_New(managed, "dltensor_versioned", [](PyObject* self) {
    auto* const kept = static_cast<DLManagedTensorVersioned*>(PyCapsule_GetPointer(self, "dltensor_versioned"));
    if (kept->deleter != nullptr) kept->deleter(kept);
  });
  if (capsule == nullptr) {
    PyErr_Clear();
    if (managed != nullptr && managed->deleter != nullptr) managed->deleter(managed);
  }
  return capsule;
}

// A producer may look at which device is current (PyTorch refuses others).
class CurrentDevice {
 public:
  explicit CurrentDevice(std::int32_t index) : entered_(untorch_device_enter(index, &before_) == UNTORCH_OK) {}
  ~CurrentDevice() {
    if (entered_) untorch_device_leave(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  void* before_ = nullptr;
  bool entered_;
};

}  // namespace

bool Operand::set_tensor(PyObject* object, const Taker& taker, std::size_t index, untorch_view& view) {
  const Tensor& tensor = *nanobind::inst_ptr<Tensor>(object);
  view = tensor.view();
  on_gpu_ = view.device_type != 0;
  if (on_gpu_) {
    if (!check_device(taker, index, view.device_index)) return false;
    void* stream = nullptr;
    untorch_status status = untorch_call_stream(view.device_index, &stream);
    if (status == UNTORCH_OK && tensor.producer().known) {
      status = untorch_stream_wait(view.device_index, stream, tensor.producer().stream);
    }
    if (status != UNTORCH_OK) {
      raise_status(status);
      return false;
    }
    ordered_ = tensor.belongs_to(stream);
  }
  Py_INCREF(object);
  owner_ = object;
  writable_ = !tensor.read_only();
  view.read_only = writable_ ? 0 : 1;
  return true;
}

// Sets owner_ to a capsule; the call stream comes after the producer's work.
bool Operand::take_capsule(PyObject* object, const Taker& taker, std::size_t index) {
  void* producer = nullptr;
  owner_ = exchange_capsule(object, producer);
  if (owner_ != nullptr) {
    const DLDevice& device =
        static_cast<DLManagedTensorVersioned*>(PyCapsule_GetPointer(owner_, "dltensor_versioned"))->dl_tensor.device;
    if (device.device_type != kDLCUDA) return true;
    return check_device(taker, index, device.device_id) &&
           (taker.unordered || wait_for_stream(device.device_id, producer));
  }
  long device_type = 0, device_index = 0;
  if (!dlpack_device(object, device_type, device_index)) {
    return refuse_raised(taker, index, object, "__dlpack_device__");
  }
  if (device_type == kDLCUDA || device_type == kDLCUDAManaged) {
    if (!check_device(taker, index, static_cast<std::int32_t>(device_index))) return false;
    void* stream = nullptr;
    if (const untorch_status status = untorch_call_stream(static_cast<std::int32_t>(device_index), &stream);
        status != UNTORCH_OK) {
      raise_status(status);
      return false;
    }
    PyObject* number = taker.unordered ? PyLong_FromLong(-1) : PyLong_FromUnsignedLongLong(stream_number(stream));
    if (number == nullptr) return false;
    {
      const CurrentDevice current(static_cast<std::int32_t>(device_index));
      owner_ = ask_for_capsule(object, number);
    }
    Py_DECREF(number);
  } else {
    owner_ = ask_for_capsule(object, nullptr);
  }
  return owner_ != nullptr || refuse_raised(taker, index, object, "__dlpack__");
}

bool Operand::set_dlpack(PyObject* object, const Taker& taker, std::size_t index, untorch_view& view) {
  const char* const method = taker.method;
  if (!take_capsule(object, taker, index)) return false;
  const DLTensor* tensor = nullptr;
  std::uint64_t flags = 0;
  if (PyCapsule_IsValid(owner_, "dltensor_versioned") != 0) {
    auto* managed = static_cast<DLManagedTensorVersioned*>(PyCapsule_GetPointer(owner_, "dltensor_versioned"));
    if (managed->major != 1) {
      raise_argument(method, index,
                     "DLPack version " + std::to_string(managed->major) + " is not supported, expected 1");
      return false;
    }
    tensor = &managed->dl_tensor;
    flags = managed->flags;
  } else if (PyCapsule_IsValid(owner_, "dltensor") != 0) {
    tensor = &static_cast<DLManagedTensor*>(PyCapsule_GetPointer(owner_, "dltensor"))->dl_tensor;
  } else {
    raise_argument_type(method, index, "__dlpack__ of " + type_name(object) + " gave no DLPack capsule");
    return false;
  }
  // The capsule is not renamed: it stays the owner, and frees the tensor when it goes.
  std::int32_t code = -1;
  for (const TypeRow& row : kTypes) {
    if (row.dl_code == tensor->dtype.code && row.bits == tensor->dtype.bits && tensor->dtype.lanes == 1)
      code = row.code;
  }
  if (tensor->ndim < 0 || tensor->ndim > kMaxDims) {
    raise_argument(method, index,
                   "DLPack tensors of " + std::to_string(tensor->ndim) + " dimensions are not supported");
    return false;
  }
  if (code < 0) {
    raise_argument(method, index,
                   "DLPack type (code " + std::to_string(tensor->dtype.code) + ", " +
                       std::to_string(tensor->dtype.bits) + " bits) is not supported");
    return false;
  }
  make_room(tensor->ndim);
  std::int64_t running = 1;
  for (auto d = static_cast<std::size_t>(tensor->ndim); d-- > 0;) {
    sizes_[d] = tensor->shape[d];
    strides_[d] = tensor->strides != nullptr ? tensor->strides[d] : running;
    // A shape that overflows here is refused later; it must not be undefined now.
    if (__builtin_mul_overflow(running, tensor->shape[d] > 1 ? tensor->shape[d] : 1, &running)) running = INT64_MAX;
  }
  const bool cpu = tensor->device.device_type == kDLCPU || tensor->device.device_type == kDLCUDAHost;
  const bool cuda = tensor->device.device_type == kDLCUDA || tensor->device.device_type == kDLCUDAManaged;
  const std::int32_t device = cpu ? 0 : cuda ? 1 : 14;
  writable_ = (flags & kDLReadOnly) == 0;
  on_gpu_ = device != 0;
  view = {static_cast<char*>(tensor->data) + tensor->byte_offset,
          code,
          device,
          cpu ? -1 : tensor->device.device_id,
          tensor->ndim,
          sizes_.data(),
          strides_.data(),
          writable_ ? 0 : 1};
  return true;
}

bool Operand::set_cuda_array(PyObject* object, const Taker& taker, std::size_t index, untorch_view& view) {
  const auto refuse = [&](const std::string& text) {
    PyErr_Clear();
    raise_argument(taker.method, index, "__cuda_array_interface__: " + text);
    return false;
  };
  PyObject* info = PyObject_GetAttrString(object, "__cuda_array_interface__");
  if (info == nullptr) return refuse_raised(taker, index, object, "__cuda_array_interface__");
  Py_INCREF(object);
  owner_ = object;
  // The items live as long as the dictionary.
  const std::unique_ptr<PyObject, void (*)(PyObject*)> keep(info, [](PyObject* o) { Py_DECREF(o); });
  if (!PyDict_Check(info)) {
    raise_argument_type(taker.method, index, "__cuda_array_interface__: expected a dictionary, got " + type_name(info));
    return false;
  }
  const auto item = [&](const char* key) {
    PyObject* value = PyDict_GetItemString(info, key);
    return value == Py_None ? nullptr : value;
  };
  if (item("mask") != nullptr) return refuse("masked arrays are not supported");
  const char* const type = item("typestr") != nullptr ? utf8_of(item("typestr")) : nullptr;
  std::int32_t code = -1;
  for (const TypeRow& row : kTypes) {
    if (type != nullptr && row.typestr != nullptr && std::strcmp(row.typestr, type) == 0) code = row.code;
  }
  if (code < 0) return refuse("the type " + std::string(type != nullptr ? type : "(none)") + " is not supported");
  PyObject* const shape = item("shape");
  PyObject* const strides = item("strides");
  PyObject* const data = item("data");
  if (shape == nullptr || !PyTuple_Check(shape) || tuple_size(shape) > kMaxDims ||
      (strides != nullptr && (!PyTuple_Check(strides) || tuple_size(strides) != tuple_size(shape))))
    return refuse("expected tuples of equal length as shape and strides");
  if (data == nullptr || !PyTuple_Check(data) || tuple_size(data) != 2)
    return refuse("expected (address, read-only) as data");
  const int ndim = static_cast<int>(tuple_size(shape));
  const std::int64_t itemsize = item_size(code);
  make_room(ndim);
  std::int64_t running = 1;
  for (auto d = static_cast<std::size_t>(ndim); d-- > 0;) {
    const auto at = static_cast<Py_ssize_t>(d);
    sizes_[d] = PyLong_AsLongLong(tuple_item(shape, at));
    const std::int64_t bytes = strides != nullptr ? PyLong_AsLongLong(tuple_item(strides, at)) : running * itemsize;
    if (PyErr_Occurred() != nullptr || sizes_[d] < 0) return refuse("shape and strides must be integers");
    if (bytes % itemsize != 0 && sizes_[d] > 1)
      return refuse("the strides are no multiples of the item size: pass a copy");
    strides_[d] = bytes / itemsize;
    if (__builtin_mul_overflow(running, sizes_[d] > 1 ? sizes_[d] : 1, &running) || running > INT64_MAX / 16)
      return refuse("the shape has more elements than memory can hold");
  }
  void* const address = PyLong_AsVoidPtr(tuple_item(data, 0));
  const int read_only = PyObject_IsTrue(tuple_item(data, 1));
  if (PyErr_Occurred() != nullptr) return refuse("expected (address, read-only) as data");
  std::int32_t device_type = 1, device_index = taker.device_index;
  if (taker.device_type != 1) return check_device(taker, index, 0);
  if (address != nullptr) {
    if (const untorch_status status = untorch_pointer_device(address, &device_type, &device_index);
        status != UNTORCH_OK) {
      raise_status(status);
      return false;
    }
    if (device_type != 1) return refuse("the address is not a GPU's");
    if (!check_device(taker, index, device_index)) return false;
  }
  // Version 3 tells the stream, or that there is nothing to wait for. Before it, the legacy stream was meant.
  PyObject* const version = item("version");
  const long number = version != nullptr && PyLong_Check(version) ? PyLong_AsLong(version) : 0;
  PyObject* const stream = item("stream");
  if (!taker.unordered && (stream != nullptr || number < 3)) {
    const unsigned long long value = stream != nullptr ? PyLong_AsUnsignedLongLong(stream) : 1;
    if (PyErr_Occurred() != nullptr || value == 0) return refuse("stream: expected None, 1, 2 or an address");
    if (!wait_for_stream(device_index, value == 1 ? nullptr : reinterpret_cast<void*>(value))) return false;
  }
  writable_ = read_only == 0;
  on_gpu_ = true;
  view = {address, code, 1, device_index, ndim, sizes_.data(), strides_.data(), read_only};
  return true;
}

}  // namespace untorch::python
