// What differs between Python's whole C API and its stable ABI: macros that look into objects, and names of types.
//
// A module for one Python is built with the whole API. With UNTORCH_STABLE_ABI it is built for 3.12 and all that come
// after it; a call then takes some tens of nanoseconds more.
#pragma once

#include <Python.h>

#include <span>
#include <string>
#include <vector>

namespace untorch::python {

#if defined(Py_LIMITED_API)

inline Py_ssize_t tuple_size(PyObject* tuple) { return PyTuple_Size(tuple); }
inline PyObject* tuple_item(PyObject* tuple, Py_ssize_t i) { return PyTuple_GetItem(tuple, i); }
inline PyObject* list_item(PyObject* list, Py_ssize_t i) { return PyList_GetItem(list, i); }
inline Py_ssize_t dict_size(PyObject* dict) { return PyDict_Size(dict); }
// Of new ones. Both take the reference.
inline void set_tuple_item(PyObject* tuple, Py_ssize_t i, PyObject* item) { PyTuple_SetItem(tuple, i, item); }
inline void set_list_item(PyObject* list, Py_ssize_t i, PyObject* item) { PyList_SetItem(list, i, item); }
inline const char* utf8_of(PyObject* text) { return PyUnicode_AsUTF8AndSize(text, nullptr); }
inline PyObject* call_method(PyObject* object, PyObject* name) {
  return PyObject_VectorcallMethod(name, &object, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
}

// The elements of a tuple, which must live as long.
class TupleItems {
 public:
  explicit TupleItems(PyObject* tuple) : items_(static_cast<std::size_t>(PyTuple_Size(tuple))) {
    for (std::size_t i = 0; i < items_.size(); ++i) items_[i] = PyTuple_GetItem(tuple, static_cast<Py_ssize_t>(i));
  }
  operator std::span<PyObject* const>() const { return items_; }

 private:
  std::vector<PyObject*> items_;
};

// As tp_name has it: "numpy.ndarray", and "Name" of a class that Python code made.
std::string name_of_type(PyTypeObject* type);

#else

inline Py_ssize_t tuple_size(PyObject* tuple) { return PyTuple_GET_SIZE(tuple); }
inline PyObject* tuple_item(PyObject* tuple, Py_ssize_t i) { return PyTuple_GET_ITEM(tuple, i); }
inline PyObject* list_item(PyObject* list, Py_ssize_t i) { return PyList_GET_ITEM(list, i); }
inline Py_ssize_t dict_size(PyObject* dict) { return PyDict_GET_SIZE(dict); }
// Of new ones. Both take the reference.
inline void set_tuple_item(PyObject* tuple, Py_ssize_t i, PyObject* item) { PyTuple_SET_ITEM(tuple, i, item); }
inline void set_list_item(PyObject* list, Py_ssize_t i, PyObject* item) { PyList_SET_ITEM(list, i, item); }
inline const char* utf8_of(PyObject* text) { return PyUnicode_AsUTF8(text); }
inline PyObject* call_method(PyObject* object, PyObject* name) { return PyObject_CallMethodNoArgs(object, name); }

// The elements of a tuple, which must live as long.
class TupleItems {
 public:
  explicit TupleItems(PyObject* tuple)
      : items_(reinterpret_cast<PyTupleObject*>(tuple)->ob_item, static_cast<std::size_t>(PyTuple_GET_SIZE(tuple))) {}
  operator std::span<PyObject* const>() const { return items_; }

 private:
  std::span<PyObject* const> items_;
};

// "numpy.ndarray", and "Name" of a class that Python code made.
inline std::string name_of_type(PyTypeObject* type) { return type->tp_name; }

#endif

inline std::string type_name(PyObject* object) { return name_of_type(Py_TYPE(object)); }

}  // namespace untorch::python
