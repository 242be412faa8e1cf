// numpy's C API and DLPack on one side, untorch_view and untorch_tensor on the other.
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include "convert.h"

#include <numpy/arrayobject.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "dlpack.h"
#include "gil.h"
#include "tensor.h"
#include "types.h"

namespace untorch::python {
namespace {

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
  std::string name = name_of_type(PyArray_DESCR(array)->typeobj);
  name.erase(0, name.rfind('.') + 1);
  for (const TypeRow& row : kTypes) {
    if (row.numpy == NPY_NOTYPE && name == row.name) return row.code;
  }
  return -1;
}

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

bool need_numpy() {
  static bool there = false;  // guarded by the interpreter lock
  if (!there) there = _import_array() >= 0;
  return there;
}

bool is_ndarray(PyObject* object) {
  if (!need_numpy()) throw nanobind::python_error();
  return PyArray_Check(object) != 0;
}

bool has_array_protocol(PyObject* object) {
  return has_attribute(object, "__dlpack__") || has_attribute(object, "__cuda_array_interface__");
}

bool is_writeable(PyObject* array) { return PyArray_ISWRITEABLE(reinterpret_cast<PyArrayObject*>(array)) != 0; }

bool same_form(PyObject* left, PyObject* right) {
  auto *a = reinterpret_cast<PyArrayObject*>(left), *b = reinterpret_cast<PyArrayObject*>(right);
  return PyArray_SAMESHAPE(a, b) && PyArray_EquivTypes(PyArray_DESCR(a), PyArray_DESCR(b)) != 0;
}

std::string form_of(PyObject* object) {
  auto* array = reinterpret_cast<PyArrayObject*>(object);
  std::string text = text_of(reinterpret_cast<PyObject*>(PyArray_DESCR(array))) + "[";
  for (int d = 0; d < PyArray_NDIM(array); ++d) text += (d == 0 ? "" : ", ") + std::to_string(PyArray_DIM(array, d));
  return text + "]";
}

bool copy_values(PyObject* to, PyObject* from) {
  return PyArray_CopyInto(reinterpret_cast<PyArrayObject*>(to), reinterpret_cast<PyArrayObject*>(from)) == 0;
}

bool Operand::set(PyObject* object, const Taker& taker, std::size_t index, untorch_view& view) {
  if (!need_numpy()) return false;
  if (PyArray_Check(object)) {
    owner_ = Py_NewRef(object);
    return set_numpy(object, taker.method, index, view);
  }
  if (nanobind::isinstance<Tensor>(object)) return set_tensor(object, taker, index, view);
  if (PyArray_CheckScalar(object)) {
    owner_ = PyArray_FromAny(object, nullptr, 0, 0, 0, nullptr);
    return owner_ != nullptr && set_numpy(owner_, taker.method, index, view);
  }
  if (has_attribute(object, "__dlpack__")) return set_dlpack(object, taker, index, view);
  if (has_attribute(object, "__cuda_array_interface__")) return set_cuda_array(object, taker, index, view);
  raise_argument_type(taker.method, index,
                      "expected an array (numpy, or anything with __dlpack__), got " + type_name(object));
  return false;
}

bool Operand::set_numpy(PyObject* object, const char* method, std::size_t index, untorch_view& view) {
  auto* array = reinterpret_cast<PyArrayObject*>(object);
  const std::int32_t code = code_of(array);
  if (code < 0 || !PyArray_ISNOTSWAPPED(array)) {
    PyObject* text = PyObject_Str(reinterpret_cast<PyObject*>(PyArray_DESCR(array)));
    const char* utf8 = text != nullptr ? utf8_of(text) : nullptr;
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
  make_room(ndim);
  for (int d = 0; d < ndim; ++d) {
    if (bytes[d] % itemsize != 0 && shape[d] > 1) {
      raise_argument(method, index, "the array's strides are no multiples of its item size: pass a copy");
      return false;
    }
    const auto i = static_cast<std::size_t>(d);
    sizes_[i] = shape[d];
    // numpy leaves any stride on dimensions of size 0 and 1; those must not look negative or odd.
    strides_[i] = shape[d] > 1 ? bytes[d] / itemsize : (bytes[d] > 0 ? bytes[d] / itemsize : 1);
  }
  numpy_ = true;
  writable_ = PyArray_ISWRITEABLE(array) != 0;
  view = {PyArray_DATA(array), code, 0, -1, ndim, sizes_.data(), strides_.data(), writable_ ? 0 : 1};
  return true;
}

PyObject* to_numpy(untorch_tensor* tensor, const untorch_view& view, PyObject* owner, bool writable) {
  const TypeRow* row = row_of(view.dtype);
  PyArray_Descr* descr = row != nullptr && need_numpy() ? descr_of(*row) : nullptr;
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
  {
    const GilRelease release;
    status = untorch_tensor_to_host(tensor, &host);
  }
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
    const GilAcquire acquire;  // a consumer may let go on any thread
    Py_XDECREF(exported->owner);
    Py_XDECREF(exported->stream_owner);
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
  untorch_tensor* handle = nullptr;
  if (const untorch_status status = untorch_tensor_share(tensor, &handle); status != UNTORCH_OK) {
    raise_status(status);
    return nullptr;
  }
  auto* exported = new Exported{handle, Py_XNewRef(owner), Py_XNewRef(options.stream_owner), options, {}};
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
