// Statuses of the C interface as Python exceptions, and back.
#include <Python.h>

#include <string>

#include "convert.h"

namespace untorch::python {
namespace {

constexpr struct {
  untorch_status status;
  const char* name;
} kExceptions[] = {
    {UNTORCH_INTERNAL, "UntorchError"},
    {UNTORCH_INVALID_ARGUMENT, "InvalidArgumentError"},
    {UNTORCH_INVALID_FILE, "InvalidFileError"},
    {UNTORCH_UNSUPPORTED, "UnsupportedError"},
    {UNTORCH_CLOSED, "ClosedError"},
    {UNTORCH_OUT_OF_MEMORY, "OutOfMemoryError"},
    {UNTORCH_MODEL, "ModelError"},
};

// The exception class of a status; borrowed from a module that stays loaded.
PyObject* exception_class(untorch_status status) {
  const char* name = "UntorchError";
  for (const auto& row : kExceptions) {
    if (row.status == status) name = row.name;
  }
  PyObject* module = PyImport_ImportModule("untorch.runtime.errors");
  PyObject* type = module != nullptr ? PyObject_GetAttrString(module, name) : nullptr;
  Py_XDECREF(module);
  if (type == nullptr) {
    PyErr_Clear();
    return PyExc_RuntimeError;
  }
  Py_DECREF(type);
  return type;
}

}  // namespace

void raise_status(untorch_status status) {
  const std::string text = untorch_last_error();  // importing may run code that fails and clears it
  // A path need not be UTF-8.
  PyObject* message = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogateescape");
  if (message == nullptr) return;
  PyErr_SetObject(exception_class(status), message);
  Py_DECREF(message);
}

void store_python_error() {
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  untorch_status status = UNTORCH_MODEL;
  for (const auto& row : kExceptions) {
    if (row.status != UNTORCH_INTERNAL && value != nullptr &&
        PyObject_IsInstance(value, exception_class(row.status)) == 1) {
      status = row.status;
    }
  }
  PyObject* text = value != nullptr ? PyObject_Str(value) : nullptr;
  const char* utf8 = text != nullptr ? PyUnicode_AsUTF8(text) : nullptr;
  std::string message = utf8 != nullptr ? utf8 : "unknown Python error";
  if (status == UNTORCH_MODEL && type != nullptr) {
    message = std::string(reinterpret_cast<PyTypeObject*>(type)->tp_name) + ": " + message;
  }
  PyErr_Clear();
  Py_XDECREF(text);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(traceback);
  untorch_set_error(status, message.c_str());
}

}  // namespace untorch::python
