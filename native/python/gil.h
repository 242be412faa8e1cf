// The interpreter lock, also for threads that run when the interpreter exits.
#pragma once

#include <cxxabi.h>
#include <nanobind/nanobind.h>

#include <utility>

namespace untorch::python {

// What pthread_exit unwinds with.
#ifdef __GLIBCXX__
using ForcedUnwind = abi::__forced_unwind;
#else
struct ForcedUnwind {};
#endif

// Before 3.14 an interpreter that exits ends daemon threads that want its lock with pthread_exit, which unwinds through
// C++ frames that throw nothing: std::terminate. Instead such a thread sleeps until the process is gone, as in 3.14.
[[noreturn]] void sleep_forever() noexcept;

// Runs code that may take the lock again, such as any Python code. No object that is destroyed without the lock should
// lie between the two.
//
// The runtime library hands a forced unwind over as a null reference, which UBSan would report.
template <class Body>
__attribute__((no_sanitize("null", "alignment"))) decltype(auto) outlive_interpreter(Body&& body) {
  try {
    return std::forward<Body>(body)();
  } catch (ForcedUnwind&) {
    sleep_forever();
  }
}

// callable(*args), and the module of that name: for any Python code that C++ calls while it holds objects. Throw what
// is raised there.
inline nanobind::object call_python(nanobind::handle callable, nanobind::handle args) {
  PyObject* const result = outlive_interpreter([=] { return PyObject_Call(callable.ptr(), args.ptr(), nullptr); });
  if (result == nullptr) throw nanobind::python_error();
  return nanobind::steal(result);
}
inline nanobind::object import_python(const char* name) {
  PyObject* const module = outlive_interpreter([=] { return PyImport_ImportModule(name); });
  if (module == nullptr) throw nanobind::python_error();
  return nanobind::steal(module);
}

// Without the lock in this scope.
class GilRelease {
 public:
  GilRelease() noexcept : state_(PyEval_SaveThread()) {}
  ~GilRelease() {
    outlive_interpreter([this] { PyEval_RestoreThread(state_); });
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* const state_;
};

// With the lock in this scope, on any thread.
class GilAcquire {
 public:
  GilAcquire() noexcept : state_(outlive_interpreter([] { return PyGILState_Ensure(); })) {}
  ~GilAcquire() { PyGILState_Release(state_); }
  GilAcquire(const GilAcquire&) = delete;
  GilAcquire& operator=(const GilAcquire&) = delete;

 private:
  const PyGILState_STATE state_;
};

}  // namespace untorch::python
