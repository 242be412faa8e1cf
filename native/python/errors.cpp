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

// An exception class by its name; borrowed from a module that stays loaded. Null when there is none.
PyObject* exception_class(const char* name) {
  PyObject* module = PyImport_ImportModule("untorch.runtime.errors");
  PyObject* type = module != nullptr ? PyObject_GetAttrString(module, name) : nullptr;
  Py_XDECREF(module);
  if (type == nullptr) PyErr_Clear();
  Py_XDECREF(type);
  return type;
}

void set_error_of(PyObject* type, const std::string& text) {
  // A path need not be UTF-8.
  PyObject* message = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogateescape");
  if (message == nullptr) return;
  PyErr_SetObject(type, message);
  Py_DECREF(message);
}

}  // namespace

PyObject* exception_class(untorch_status status) {
  const char* name = "UntorchError";
  for (const auto& row : kExceptions) {
    if (row.status == status) name = row.name;
  }
  PyObject* const type = exception_class(name);
  return type != nullptr ? type : PyExc_RuntimeError;
}

void set_error(untorch_status status, const std::string& text) { set_error_of(exception_class(status), text); }

void set_type_error(const std::string& text) {
  PyObject* const type = exception_class("ArgumentTypeError");
  set_error_of(type != nullptr ? type : PyExc_TypeError, text);
}

void raise_type(const std::string& text) {
  set_type_error(text);
  throw nanobind::python_error();
}

void raise(untorch_status status, const std::string& text) {
  set_error(status, text);
  throw nanobind::python_error();
}

void raise_status(untorch_status status) {
  set_error(status, std::string(untorch_last_error()));  // importing may run code that fails and clears it
}

std::string text_of(nanobind::handle object) {
  PyObject* text = PyObject_Str(object.ptr());
  PyObject* bytes = text != nullptr ? PyUnicode_AsEncodedString(text, "utf-8", "backslashreplace") : nullptr;
  Py_XDECREF(text);
  if (bytes == nullptr) throw nanobind::python_error();
  const std::string result(PyBytes_AS_STRING(bytes), static_cast<std::size_t>(PyBytes_GET_SIZE(bytes)));
  Py_DECREF(bytes);
  return result;
}

std::string class_name(PyObject* object) {
  return text_of(nanobind::handle(reinterpret_cast<PyObject*>(Py_TYPE(object))).attr("__name__"));
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
