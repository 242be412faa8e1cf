// The caller's stream, and the objects that wait for it.
#include "stream.h"

#include <algorithm>
#include <string>

#include "convert.h"
#include "python_api.h"
#include "untorch/caller_stream.h"

namespace nb = nanobind;

namespace untorch::python {
namespace {

constexpr std::uintptr_t kLegacy = 1;

// The object that owns the stream which this thread's caller has set; a reference. Null: none.
thread_local PyObject* caller_owner = nullptr;

struct Waiting {
  untorch_event* event;
  std::vector<PyObject*> objects;
};
// Guarded by the interpreter lock. Never destroyed: what is left at exit goes with the process.
std::vector<Waiting>& waiting() {
  static auto& list = *new std::vector<Waiting>;
  return list;
}

// Of the capture that runs on this thread.
thread_local constinit CaptureKeeper* keeper = nullptr;

void drop(const std::vector<PyObject*>& objects) {
  for (PyObject* object : objects) Py_DECREF(object);
}

}  // namespace

std::uint64_t stream_number(const void* stream) noexcept {
  const auto address = reinterpret_cast<std::uintptr_t>(stream);
  return address == 0 ? kLegacy : address;
}

bool consumer_stream(nb::handle number, void*& stream) {
  if (number.is_none()) {
    stream = nullptr;
    return true;
  }
  if (!PyLong_Check(number.ptr()) || PyBool_Check(number.ptr())) {
    PyErr_Format(PyExc_TypeError, "__dlpack__: stream: expected None or an integer, got %s",
                 type_name(number.ptr()).c_str());
    throw nb::python_error();
  }
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow == 0 && value == -1) return false;
  if (overflow == 0 && value == 0) {
    PyErr_SetString(PyExc_BufferError,
                    "__dlpack__: stream 0 is ambiguous: pass 1 for the legacy default stream, 2 for the thread's");
    throw nb::python_error();
  }
  if (overflow != 0 || value < 0) {
    PyErr_Format(PyExc_BufferError, "__dlpack__: stream: expected -1, 1, 2 or an address, got %S", number.ptr());
    throw nb::python_error();
  }
  stream = static_cast<std::uintptr_t>(value) == kLegacy ? nullptr : reinterpret_cast<void*>(value);
  return true;
}

Producer current_producer(int device_index) {
  Producer producer;
  const untorch_status status = untorch_call_stream(device_index, &producer.stream);
  if (status != UNTORCH_OK) {
    raise_status(status);
    throw nb::python_error();
  }
  producer.known = true;
  if (caller_owner != nullptr && caller_has_stream()) producer.owner = nb::borrow(caller_owner);
  return producer;
}

bool caller_has_stream() noexcept { return untorch_caller_stream_peek().is_set != 0; }

nb::tuple exchange_stream(const nb::object& handle, const nb::object& owner) {
  untorch_caller_stream setting{nullptr, 0};
  if (!handle.is_none()) {
    const unsigned long long address = PyLong_AsUnsignedLongLong(handle.ptr());
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    setting = {reinterpret_cast<CUstream_st*>(address), 1};
  }
  const untorch_caller_stream before = untorch_caller_stream_exchange(setting);
  nb::object owner_before = caller_owner != nullptr ? nb::steal(caller_owner) : nb::none();
  caller_owner = owner.is_none() ? nullptr : Py_NewRef(owner.ptr());
  const nb::object handle_before =
      before.is_set != 0 ? nb::object(nb::int_(reinterpret_cast<std::uintptr_t>(before.stream))) : nb::none();
  return nb::make_tuple(handle_before, owner_before);
}

void keep_until_done(int device_index, void* stream, std::vector<PyObject*> objects) {
  if (objects.empty()) return;
  untorch_event* event = nullptr;
  if (untorch_event_record(device_index, stream, &event) != UNTORCH_OK) {
    // A device that takes no events runs nothing either.
    (void)untorch_stream_synchronize(device_index, stream);
    drop(objects);
    return;
  }
  waiting().push_back({event, std::move(objects)});
}

CaptureKeeper::CaptureKeeper() : before_(std::exchange(keeper, this)) {}
CaptureKeeper::~CaptureKeeper() { keeper = before_; }

void keep_for_call(int device_index, void* stream, nb::object object) {
  if (keeper != nullptr && untorch_stream_is_capturing(device_index, stream) != 0) {
    keeper->kept_.push_back(std::move(object));
  } else {
    keep_until_done(device_index, stream, {object.release().ptr()});
  }
}

void release_done() {
  std::vector<Waiting>& list = waiting();
  if (list.empty()) return;
  const auto done = std::stable_partition(list.begin(), list.end(),
                                          [](const Waiting& entry) { return untorch_event_done(entry.event) == 0; });
  // Letting go may run Python code that comes here again.
  std::vector<Waiting> ready(std::make_move_iterator(done), std::make_move_iterator(list.end()));
  list.erase(done, list.end());
  for (const Waiting& entry : ready) {
    untorch_event_free(entry.event);
    drop(entry.objects);
  }
}

}  // namespace untorch::python
