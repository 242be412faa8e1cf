// Statuses of the C interface as Python exceptions, and back.
#include <Python.h>

#include <string>
#include <utility>

#include "convert.h"
#include "gil.h"
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
    {UNTORCH_DEVICE_LOST, "DeviceLostError"},
    {UNTORCH_SYSTEM, "SystemResourceError"},
    {UNTORCH_UNTRUSTED, "UntrustedError"},
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

// Puts what name(exception, number, None) gives in the place of the exception that is set: it has the system's errno.
void set_errno(const char* name, int number) {
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyObject* const make = exception_class(name);
  PyObject* const made = make != nullptr ? PyObject_CallFunction(make, "OiO", value, number, Py_None) : nullptr;
  if (made == nullptr) {
    PyErr_Clear();
    PyErr_Restore(type, value, traceback);
    return;
  }
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made)), made);
  Py_DECREF(made);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(traceback);
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
  const std::string text = untorch_last_error();  // importing may run code that fails and clears it
  const int number = untorch_last_system_error();
  set_error(status, text);
  if (number == 0) return;
  if (status == UNTORCH_INVALID_FILE) set_errno("file_error", number);
  if (status == UNTORCH_SYSTEM) set_errno("SystemResourceError", number);
}

std::string text_of(nanobind::handle object) {
  PyObject* text = PyObject_Str(object.ptr());
  PyObject* bytes = text != nullptr ? PyUnicode_AsEncodedString(text, "utf-8", "backslashreplace") : nullptr;
  Py_XDECREF(text);
  if (bytes == nullptr) throw nanobind::python_error();
  const std::string result(PyBytes_AsString(bytes), static_cast<std::size_t>(PyBytes_Size(bytes)));
  Py_DECREF(bytes);
  return result;
}

std::string class_name(PyObject* object) {
  return text_of(nanobind::handle(reinterpret_cast<PyObject*>(Py_TYPE(object))).attr("__name__"));
}

nanobind::object take_exception() {
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (value != nullptr && traceback != nullptr) PyException_SetTraceback(value, traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  return nanobind::steal(value);
}

void set_exception(const nanobind::object& exception) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
}

void set_cause(const nanobind::object& cause) {
  const nanobind::object exception = take_exception();
  PyException_SetCause(exception.ptr(), Py_NewRef(cause.ptr()));
  set_exception(exception);
}

std::string describe_exception(nanobind::handle exception) {
  const std::string type = type_name(exception.ptr());
  const nanobind::object text = nanobind::steal(PyObject_Str(exception.ptr()));
  PyErr_Clear();
  const char* const utf8 = text.is_valid() ? utf8_of(text.ptr()) : nullptr;
  PyErr_Clear();
  return utf8 != nullptr && *utf8 != 0 ? type + ": " + utf8 : type;
}

std::string repr_of(nanobind::handle object) {
  const nanobind::object text = nanobind::steal(PyObject_Repr(object.ptr()));
  if (text.is_valid()) return text_of(text);
  if (PyErr_ExceptionMatches(PyExc_Exception) == 0) throw nanobind::python_error();
  PyErr_Clear();
  return "an object of the type " + class_name(object.ptr());
}

namespace {

// What a kernel or a signal handler raised in the call that runs on this thread. Set and taken with the interpreter
// lock.
struct Raised {
  PyObject* value = nullptr;
  bool is_interrupt = false;
};
thread_local constinit Raised raised{};

void keep_raised(nanobind::object value, bool is_interrupt) {
  Py_XDECREF(std::exchange(raised.value, value.release().ptr()));
  raised.is_interrupt = is_interrupt;
}

}  // namespace

void store_python_error() {
  nanobind::object value = take_exception();
  const auto is = [&](PyObject* type) { return PyErr_GivenExceptionMatches(value.ptr(), type) != 0; };
  untorch_status status = is(PyExc_MemoryError) ? UNTORCH_OUT_OF_MEMORY : UNTORCH_MODEL;
  for (const auto& row : kExceptions) {
    if (row.status != UNTORCH_INTERNAL && is(exception_class(row.status))) status = row.status;
  }
  const std::string message = is(exception_class(UNTORCH_INTERNAL)) ? text_of(value) : describe_exception(value);
  keep_raised(std::move(value), false);
  untorch_set_error(status, message.c_str());
}

int check_signals() {
  const GilAcquire acquire;
  if (outlive_interpreter([] { return PyErr_CheckSignals(); }) == 0) return 0;
  keep_raised(take_exception(), true);
  return 1;
}

void throw_call_error(untorch_status status) {
  const auto [value, is_interrupt] = std::exchange(raised, {});
  const nanobind::object cause = nanobind::steal(value);
  if (cause.is_valid() && (is_interrupt || PyErr_GivenExceptionMatches(cause.ptr(), PyExc_Exception) == 0)) {
    set_exception(cause);
    throw nanobind::python_error();
  }
  raise_status(status);
  if (cause.is_valid()) set_cause(cause);
  throw nanobind::python_error();
}

}  // namespace untorch::python
