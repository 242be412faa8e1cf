// Statuses of the C interface as Python exceptions, and back.
#include <Python.h>

#include <string>

#include "convert.h"
#include "types.h"

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

// An exception class by its name; borrowed from a module that stays loaded.
PyObject* exception_class(const char* name) {
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

PyObject* exception_class(untorch_status status) {
  for (const auto& row : kExceptions) {
    if (row.status == status) return exception_class(row.name);
  }
  return exception_class("UntorchError");
}

// Raises an exception; the class is looked up last, as importing it may run code that clears the thread's last error.
template <class Which>
void raise_as(Which which, const std::string& text) {
  // A path need not be UTF-8.
  PyObject* message = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogateescape");
  if (message == nullptr) return;
  PyErr_SetObject(exception_class(which), message);
  Py_DECREF(message);
}

std::string argument_text(const char* method, std::size_t index, const std::string& text) {
  return "method '" + std::string(method) + "', argument " + std::to_string(index) + ": " + text;
}

}  // namespace

void raise_status(untorch_status status) { raise_as(status, untorch_last_error()); }

void raise_argument(const char* method, std::size_t index, const std::string& text) {
  raise_as(UNTORCH_INVALID_ARGUMENT, argument_text(method, index, text));
}

void raise_argument_type(const char* method, std::size_t index, const std::string& text) {
  raise_as("ArgumentTypeError", argument_text(method, index, text));
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
