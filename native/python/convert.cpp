// numpy's C API and DLPack on one side, untorch_view and untorch_tensor on the other.
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include "convert.h"

#include <numpy/arrayobject.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "dlpack.h"
#include "stream.h"

extern "C" int32_t aoti_torch_new_tensor_handle(void* original, void** handle);

namespace untorch::python {
namespace {

// PyTorch's ScalarType codes and what numpy and DLPack call the same types.
struct TypeRow {
  std::int32_t code;
  const char* name;
  int numpy;  // NPY_NOTYPE: numpy has none; ml_dtypes may
  std::uint8_t dl_code, bits;
  const char* typestr;  // null: there is none
};
constexpr TypeRow kTypes[] = {
    {0, "uint8", NPY_UINT8, kDLUInt, 8, "|u1"},
    {1, "int8", NPY_INT8, kDLInt, 8, "|i1"},
    {2, "int16", NPY_INT16, kDLInt, 16, "<i2"},
    {3, "int32", NPY_INT32, kDLInt, 32, "<i4"},
    {4, "int64", NPY_INT64, kDLInt, 64, "<i8"},
    {5, "float16", NPY_FLOAT16, kDLFloat, 16, "<f2"},
    {6, "float32", NPY_FLOAT32, kDLFloat, 32, "<f4"},
    {7, "float64", NPY_FLOAT64, kDLFloat, 64, "<f8"},
    {9, "complex64", NPY_COMPLEX64, kDLComplex, 64, "<c8"},
    {10, "complex128", NPY_COMPLEX128, kDLComplex, 128, "<c16"},
    {11, "bool", NPY_BOOL, kDLBool, 8, "|b1"},
    {15, "bfloat16", NPY_NOTYPE, kDLBfloat, 16, nullptr},
    {23, "float8_e5m2", NPY_NOTYPE, 12, 8, nullptr},
    {24, "float8_e4m3fn", NPY_NOTYPE, 10, 8, nullptr},
    {25, "float8_e5m2fnuz", NPY_NOTYPE, 13, 8, nullptr},
    {26, "float8_e4m3fnuz", NPY_NOTYPE, 11, 8, nullptr},
    {27, "uint16", NPY_UINT16, kDLUInt, 16, "<u2"},
    {28, "uint32", NPY_UINT32, kDLUInt, 32, "<u4"},
    {29, "uint64", NPY_UINT64, kDLUInt, 64, "<u8"},
    {44, "float8_e8m0fnu", NPY_NOTYPE, 14, 8, nullptr},
};

const TypeRow* row_of(std::int32_t code) {
  for (const TypeRow& row : kTypes) {
    if (row.code == code) return &row;
  }
  return nullptr;
}

// Code of a numpy array's dtype, -1 when there is none.
std::int32_t code_of(PyArrayObject* array) {
  const int type = PyArray_TYPE(array);
  switch (type) {
    case NPY_FLOAT32:
      return 6;
    case NPY_INT64:
      return 4;
    case NPY_LONGLONG:
      return 4;  // another name for 64 bits here
    case NPY_ULONGLONG:
      return 29;
    default:
      break;
  }
  for (const TypeRow& row : kTypes) {
    if (row.numpy == type) return row.code;
  }
  // Types of other packages (ml_dtypes): by the name of their scalar type.
  const char* name = PyArray_DESCR(array)->typeobj->tp_name;
  if (const char* dot = std::strrchr(name, '.')) name = dot + 1;
  for (const TypeRow& row : kTypes) {
    if (row.numpy == NPY_NOTYPE && std::strcmp(row.name, name) == 0) return row.code;
  }
  return -1;
}

void raise_argument(const char* method, std::size_t index, const std::string& text) {
  const std::string message = "method '" + std::string(method) + "', argument " + std::to_string(index) + ": " + text;
  untorch_set_error(UNTORCH_INVALID_ARGUMENT, message.c_str());
  raise_status(UNTORCH_INVALID_ARGUMENT);
}

std::string type_name(PyObject* object) { return Py_TYPE(object)->tp_name; }

// numpy's dtype object for a code: new reference, or null with an exception.
PyArray_Descr* descr_of(const TypeRow& row) {
  if (row.numpy != NPY_NOTYPE) return PyArray_DescrFromType(row.numpy);
  PyObject* module = PyImport_ImportModule("ml_dtypes");
  if (module == nullptr) {
    PyErr_Clear();
    const std::string message =
        std::string("the output is ") + row.name +
        ", for which numpy has no dtype: install ml_dtypes, or pass DLPack arrays to get DLPack back";
    untorch_set_error(UNTORCH_UNSUPPORTED, message.c_str());
    raise_status(UNTORCH_UNSUPPORTED);
    return nullptr;
  }
  PyObject* scalar = PyObject_GetAttrString(module, row.name);
  Py_DECREF(module);
  if (scalar == nullptr) return nullptr;
  PyArray_Descr* descr = nullptr;
  const int ok = PyArray_DescrConverter(scalar, &descr);
  Py_DECREF(scalar);
  return ok == NPY_SUCCEED ? descr : nullptr;
}

bool has_attribute(PyObject* object, const char* name) { return PyObject_HasAttrString(object, name) != 0; }

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

void free_handle_capsule(PyObject* capsule) {
  untorch_tensor_free(static_cast<untorch_tensor*>(PyCapsule_GetPointer(capsule, "untorch_tensor")));
}

}  // namespace

const char* dtype_name(std::int32_t dtype) {
  const TypeRow* row = row_of(dtype);
  return row != nullptr ? row->name : nullptr;
}

const char* typestr(std::int32_t dtype) {
  const TypeRow* row = row_of(dtype);
  return row != nullptr ? row->typestr : nullptr;
}

std::int64_t item_size(std::int32_t dtype) {
  const TypeRow* row = row_of(dtype);
  return row != nullptr ? row->bits / 8 : 0;
}

bool initialize_numpy() { return _import_array() >= 0; }

bool is_numpy(PyObject* object) { return PyArray_Check(object) || PyArray_CheckScalar(object); }

bool is_array(PyObject* object) {
  return is_numpy(object) || has_attribute(object, "__dlpack__") || has_attribute(object, "__cuda_array_interface__");
}

Operand::~Operand() { Py_XDECREF(owner_); }

bool Operand::set(PyObject* object, const Taker& taker, std::size_t index) {
  if (PyArray_Check(object)) {
    Py_INCREF(object);
    owner_ = object;
    return set_numpy(object, taker.method, index);
  }
  if (PyArray_CheckScalar(object)) {
    owner_ = PyArray_FromAny(object, nullptr, 0, 0, 0, nullptr);
    return owner_ != nullptr && set_numpy(owner_, taker.method, index);
  }
  if (has_attribute(object, "__dlpack__")) return set_dlpack(object, taker, index);
  if (has_attribute(object, "__cuda_array_interface__")) return set_cuda_array(object, taker, index);
  raise_argument(taker.method, index,
                 "expected an array (numpy, or anything with __dlpack__), got " + type_name(object));
  return false;
}

bool Operand::set_numpy(PyObject* object, const char* method, std::size_t index) {
  auto* array = reinterpret_cast<PyArrayObject*>(object);
  const std::int32_t code = code_of(array);
  if (code < 0 || !PyArray_ISNOTSWAPPED(array)) {
    PyObject* text = PyObject_Str(reinterpret_cast<PyObject*>(PyArray_DESCR(array)));
    const char* utf8 = text != nullptr ? PyUnicode_AsUTF8(text) : nullptr;
    const std::string name = utf8 != nullptr ? utf8 : "?";
    Py_XDECREF(text);
    PyErr_Clear();
    raise_argument(method, index,
                   code < 0 ? "numpy dtype " + name + " has no counterpart in PyTorch"
                            : "the array's bytes are swapped (dtype " + name + "): pass a copy in native byte order");
    return false;
  }
  if (!PyArray_ISALIGNED(array)) {
    raise_argument(method, index, "the array's memory is not aligned to its dtype: pass a copy");
    return false;
  }
  const int ndim = PyArray_NDIM(array);
  const npy_intp itemsize = PyArray_ITEMSIZE(array);
  const npy_intp* shape = PyArray_DIMS(array);
  const npy_intp* bytes = PyArray_STRIDES(array);
  for (int d = 0; d < ndim; ++d) {
    if (bytes[d] % itemsize != 0 && shape[d] > 1) {
      raise_argument(method, index, "the array's strides are no multiples of its item size: pass a copy");
      return false;
    }
    sizes_[d] = shape[d];
    // numpy leaves any stride on dimensions of size 0 and 1; those must not look negative or odd.
    strides_[d] = shape[d] > 1 ? bytes[d] / itemsize : (bytes[d] > 0 ? bytes[d] / itemsize : 1);
  }
  numpy_ = true;
  writable_ = PyArray_ISWRITEABLE(array) != 0;
  view_ = {PyArray_DATA(array), code, 0, -1, ndim, sizes_, strides_, writable_ ? 0 : 1};
  return true;
}

namespace {

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
  PyErr_Clear();  // a producer older than DLPack 1.0
  if (stream == nullptr) return PyObject_CallMethodNoArgs(object, name);
  return PyObject_VectorcallMethod(name, ordered, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, stream_only);
}

// Where the object says that it is. Objects that do not say are the CPU's, as before DLPack had the question.
bool dlpack_device(PyObject* object, long& type, long& index) {
  static PyObject* const name = PyUnicode_InternFromString("__dlpack_device__");
  type = kDLCPU;
  index = 0;
  if (PyObject_HasAttr(object, name) == 0) return true;
  PyObject* answer = PyObject_CallMethodNoArgs(object, name);
  if (answer == nullptr) return false;
  const bool is_pair = PyTuple_Check(answer) && PyTuple_GET_SIZE(answer) == 2;
  if (is_pair) {
    type = PyLong_AsLong(PyTuple_GET_ITEM(answer, 0));
    index = PyLong_AsLong(PyTuple_GET_ITEM(answer, 1));
  } else {
    PyErr_Format(PyExc_TypeError, "__dlpack_device__ of %s gave no pair", Py_TYPE(object)->tp_name);
  }
  Py_DECREF(answer);
  return PyErr_Occurred() == nullptr;
}

}  // namespace

bool Operand::set_dlpack(PyObject* object, const Taker& taker, std::size_t index) {
  const char* const method = taker.method;
  long device_type = 0, device_index = 0;
  if (!dlpack_device(object, device_type, device_index)) return false;
  if (device_type == kDLCUDA || device_type == kDLCUDAManaged) {
    if (!check_device(taker, index, static_cast<std::int32_t>(device_index))) return false;
    void* stream = nullptr;
    if (const untorch_status status = untorch_call_stream(static_cast<std::int32_t>(device_index), &stream);
        status != UNTORCH_OK) {
      raise_status(status);
      return false;
    }
    PyObject* number = PyLong_FromUnsignedLongLong(stream_number(stream));
    if (number == nullptr) return false;
    owner_ = ask_for_capsule(object, number);
    Py_DECREF(number);
  } else {
    owner_ = ask_for_capsule(object, nullptr);
  }
  if (owner_ == nullptr) return false;
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
    raise_argument(method, index, "__dlpack__ of " + type_name(object) + " gave no DLPack capsule");
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
  std::int64_t running = 1;
  for (int d = tensor->ndim; d-- > 0;) {
    sizes_[d] = tensor->shape[d];
    strides_[d] = tensor->strides != nullptr ? tensor->strides[d] : running;
    // A shape that overflows here is refused later; it must not be undefined now.
    if (__builtin_mul_overflow(running, tensor->shape[d] > 1 ? tensor->shape[d] : 1, &running)) running = INT64_MAX;
  }
  const bool cpu = tensor->device.device_type == kDLCPU || tensor->device.device_type == kDLCUDAHost;
  const bool cuda = tensor->device.device_type == kDLCUDA || tensor->device.device_type == kDLCUDAManaged;
  const std::int32_t device = cpu ? 0 : cuda ? 1 : 14;
  writable_ = (flags & kDLReadOnly) == 0;
  view_ = {static_cast<char*>(tensor->data) + tensor->byte_offset,
           code,
           device,
           cpu ? -1 : tensor->device.device_id,
           tensor->ndim,
           sizes_,
           strides_,
           writable_ ? 0 : 1};
  return true;
}

bool Operand::set_cuda_array(PyObject* object, const Taker& taker, std::size_t index) {
  const auto refuse = [&](const std::string& text) {
    PyErr_Clear();
    raise_argument(taker.method, index, "__cuda_array_interface__: " + text);
    return false;
  };
  PyObject* info = PyObject_GetAttrString(object, "__cuda_array_interface__");
  if (info == nullptr) return false;
  Py_INCREF(object);
  owner_ = object;
  // The items live as long as the dictionary.
  const std::unique_ptr<PyObject, void (*)(PyObject*)> keep(info, [](PyObject* o) { Py_DECREF(o); });
  if (!PyDict_Check(info)) return refuse("expected a dictionary, got " + type_name(info));
  const auto item = [&](const char* key) {
    PyObject* value = PyDict_GetItemString(info, key);
    return value == Py_None ? nullptr : value;
  };
  if (item("mask") != nullptr) return refuse("masked arrays are not supported");
  const char* const type = item("typestr") != nullptr ? PyUnicode_AsUTF8(item("typestr")) : nullptr;
  std::int32_t code = -1;
  for (const TypeRow& row : kTypes) {
    if (type != nullptr && row.typestr != nullptr && std::strcmp(row.typestr, type) == 0) code = row.code;
  }
  if (code < 0) return refuse("the type " + std::string(type != nullptr ? type : "(none)") + " is not supported");
  PyObject* const shape = item("shape");
  PyObject* const strides = item("strides");
  PyObject* const data = item("data");
  if (shape == nullptr || !PyTuple_Check(shape) || PyTuple_GET_SIZE(shape) > kMaxDims ||
      (strides != nullptr && (!PyTuple_Check(strides) || PyTuple_GET_SIZE(strides) != PyTuple_GET_SIZE(shape))))
    return refuse("expected tuples of equal length as shape and strides");
  if (data == nullptr || !PyTuple_Check(data) || PyTuple_GET_SIZE(data) != 2)
    return refuse("expected (address, read-only) as data");
  const int ndim = static_cast<int>(PyTuple_GET_SIZE(shape));
  const std::int64_t itemsize = item_size(code);
  std::int64_t running = 1;
  for (int d = ndim; d-- > 0;) {
    sizes_[d] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, d));
    const std::int64_t bytes =
        strides != nullptr ? PyLong_AsLongLong(PyTuple_GET_ITEM(strides, d)) : running * itemsize;
    if (PyErr_Occurred() != nullptr || sizes_[d] < 0) return refuse("shape and strides must be integers");
    if (bytes % itemsize != 0 && sizes_[d] > 1)
      return refuse("the strides are no multiples of the item size: pass a copy");
    strides_[d] = bytes / itemsize;
    if (__builtin_mul_overflow(running, sizes_[d] > 1 ? sizes_[d] : 1, &running) || running > INT64_MAX / 16)
      return refuse("the shape has more elements than memory can hold");
  }
  void* const address = PyLong_AsVoidPtr(PyTuple_GET_ITEM(data, 0));
  const int read_only = PyObject_IsTrue(PyTuple_GET_ITEM(data, 1));
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
  if (stream != nullptr || number < 3) {
    const unsigned long long value = stream != nullptr ? PyLong_AsUnsignedLongLong(stream) : 1;
    if (PyErr_Occurred() != nullptr || value == 0) return refuse("stream: expected None, 1, 2 or an address");
    if (!wait_for_stream(device_index, value == 1 ? nullptr : reinterpret_cast<void*>(value))) return false;
  }
  writable_ = read_only == 0;
  view_ = {address, code, 1, device_index, ndim, sizes_, strides_, read_only};
  return true;
}

PyObject* to_numpy(untorch_tensor* tensor, PyObject* owner, bool writable) {
  untorch_view view;
  untorch_tensor_view(tensor, &view);
  const TypeRow* row = row_of(view.dtype);
  PyArray_Descr* descr = row != nullptr ? descr_of(*row) : nullptr;
  if (descr != nullptr && view.ndim > kMaxDims) {
    PyErr_Format(PyExc_TypeError, "an output has %d dimensions, which numpy cannot hold", view.ndim);
    Py_DECREF(descr);
    descr = nullptr;
  }
  if (descr == nullptr) {
    if (row == nullptr)
      PyErr_Format(PyExc_TypeError, "an output has dtype code %d, which numpy cannot hold", view.dtype);
    untorch_tensor_free(tensor);
    return nullptr;
  }
  npy_intp shape[kMaxDims], strides[kMaxDims];
  const npy_intp itemsize = row->bits / 8;
  for (int d = 0; d < view.ndim; ++d) {
    shape[d] = view.sizes[d];
    strides[d] = view.strides[d] * itemsize;
  }
  const int flags = writable ? NPY_ARRAY_WRITEABLE : 0;
  PyObject* array = PyArray_NewFromDescr(&PyArray_Type, descr, view.ndim, shape, strides, view.data, flags, nullptr);
  PyObject* base = nullptr;
  if (array != nullptr && owner != nullptr) {
    Py_INCREF(owner);
    base = owner;
    untorch_tensor_free(tensor);
  } else if (array != nullptr) {
    base = PyCapsule_New(tensor, "untorch_tensor", free_handle_capsule);
  }
  if (base == nullptr) {
    Py_XDECREF(array);
    untorch_tensor_free(tensor);
    return nullptr;
  }
  if (PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(array), base) < 0) {
    Py_DECREF(array);
    return nullptr;
  }
  return array;
}

PyObject* copy_to_numpy(untorch_tensor* tensor) {
  untorch_tensor* host = nullptr;
  untorch_status status;
  Py_BEGIN_ALLOW_THREADS;
  status = untorch_tensor_to_host(tensor, &host);
  Py_END_ALLOW_THREADS;
  untorch_tensor_free(tensor);
  if (status != UNTORCH_OK) {
    raise_status(status);
    return nullptr;
  }
  return to_numpy(host, nullptr, true);
}

namespace {

// What a DLPack export keeps: a handle on the storage, the owner of borrowed memory, and the shape that the structure
// points to.
struct Exported {
  untorch_tensor* tensor;
  PyObject* owner;
  PyObject* stream_owner;
  DlpackOptions options;
  std::int64_t dims[2 * kMaxDims];
};

template <class Managed>
void delete_managed(Managed* managed) {
  auto* exported = static_cast<Exported*>(managed->manager_ctx);
  const DlpackOptions& options = exported->options;
  if (options.ordered) {
    // Memory goes back in the order of the producer's stream. A consumer that has destroyed its own is done with it.
    (void)untorch_stream_wait(options.device_index, options.producer, options.consumer);
  }
  untorch_tensor_free(exported->tensor);
  if ((exported->owner != nullptr || exported->stream_owner != nullptr) && Py_IsInitialized() != 0) {
    const PyGILState_STATE state = PyGILState_Ensure();  // a consumer may let go on any thread
    Py_XDECREF(exported->owner);
    Py_XDECREF(exported->stream_owner);
    PyGILState_Release(state);
  }
  delete exported;
  delete managed;
}

template <class Managed>
PyObject* make_capsule(untorch_tensor* tensor, PyObject* owner, const DlpackOptions& options, const char* name,
                       PyCapsule_Destructor destructor, Managed*& managed) {
  untorch_view view;
  untorch_tensor_view(tensor, &view);
  const TypeRow* row = row_of(view.dtype);
  if (row == nullptr || view.ndim > kMaxDims) {
    PyErr_SetString(PyExc_BufferError, "the tensor has a dtype that DLPack cannot describe");
    return nullptr;
  }
  void* handle = nullptr;
  if (aoti_torch_new_tensor_handle(tensor, &handle) != 0) {
    raise_status(UNTORCH_INTERNAL);
    return nullptr;
  }
  auto* exported = new Exported{
      static_cast<untorch_tensor*>(handle), Py_XNewRef(owner), Py_XNewRef(options.stream_owner), options, {}};
  for (int d = 0; d < view.ndim; ++d) {
    exported->dims[d] = view.sizes[d];
    exported->dims[kMaxDims + d] = view.strides[d];
  }
  managed = new Managed{};
  managed->manager_ctx = exported;
  managed->deleter = delete_managed<Managed>;
  managed->dl_tensor = {view.data,
                        {view.device_type == 0 ? kDLCPU : kDLCUDA, view.device_index < 0 ? 0 : view.device_index},
                        view.ndim,
                        {row->dl_code, row->bits, 1},
                        exported->dims,
                        exported->dims + kMaxDims,
                        0};
  PyObject* capsule = PyCapsule_New(managed, name, destructor);
  if (capsule == nullptr) delete_managed(managed);
  return capsule;
}

template <class Managed>
void destroy_unused(PyObject* capsule, const char* name) {
  // A consumer renames the capsule and then owns the tensor.
  if (PyCapsule_IsValid(capsule, name) == 0) return;
  auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, name));
  managed->deleter(managed);
}

}  // namespace

PyObject* to_dlpack(untorch_tensor* tensor, PyObject* owner, const DlpackOptions& options) {
  if (options.versioned) {
    DLManagedTensorVersioned* managed = nullptr;
    PyObject* capsule = make_capsule(
        tensor, owner, options, "dltensor_versioned",
        [](PyObject* self) { destroy_unused<DLManagedTensorVersioned>(self, "dltensor_versioned"); }, managed);
    if (capsule != nullptr) {
      managed->major = 1;
      managed->flags = (options.read_only ? kDLReadOnly : 0) | (options.copied ? kDLIsCopied : 0);
    }
    return capsule;
  }
  if (options.read_only) {
    PyErr_SetString(PyExc_BufferError,
                    "the tensor is read-only, which only DLPack 1.0 can say: pass max_version=(1, 0)");
    return nullptr;
  }
  DLManagedTensor* managed = nullptr;
  return make_capsule(
      tensor, owner, options, "dltensor", [](PyObject* self) { destroy_unused<DLManagedTensor>(self, "dltensor"); },
      managed);
}

}  // namespace untorch::python
