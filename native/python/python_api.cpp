// Names of types by Python's stable ABI.
#include "python_api.h"

#if defined(Py_LIMITED_API)

namespace untorch::python {
namespace {

// An attribute of a type as text; empty if there is none.
std::string attribute(PyTypeObject* type, const char* name) {
  PyObject* const value = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name);
  const char* const text = value != nullptr && PyUnicode_Check(value) ? utf8_of(value) : nullptr;
  const std::string found = text != nullptr ? text : "";
  Py_XDECREF(value);
  PyErr_Clear();
  return found;
}

}  // namespace

std::string name_of_type(PyTypeObject* type) {
  const std::string name = attribute(type, "__name__");
  if ((PyType_GetFlags(type) & Py_TPFLAGS_HEAPTYPE) != 0) return name;
  const std::string module = attribute(type, "__module__");
  return module.empty() || module == "builtins" ? name : module + "." + name;
}

}  // namespace untorch::python

#endif
