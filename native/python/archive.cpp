// Archives from a path (as bytes: file names need not be UTF-8) or from memory, and memoryviews of their entries.
#include "archive.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <new>
#include <utility>

#include "gil.h"

namespace nb = nanobind;

namespace untorch::python {
namespace {

// The bytes of an entry, or of a tensor; memoryview() of it keeps the file.
struct EntryView {
  std::shared_ptr<void> file;
  const void* data;
  std::size_t size;
};

struct SafetensorsHandle {
  explicit SafetensorsHandle(untorch_safetensors* handle) : file(handle) {}
  ~SafetensorsHandle() { untorch_safetensors_free(file); }
  SafetensorsHandle(const SafetensorsHandle&) = delete;
  SafetensorsHandle& operator=(const SafetensorsHandle&) = delete;
  untorch_safetensors* file;
};

// _core.Safetensors: a .safetensors file as the loader reads it.
struct Safetensors {
  std::shared_ptr<SafetensorsHandle> handle;
};

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  const auto* entry = nb::inst_ptr<EntryView>(self);
  return PyBuffer_FillInfo(view, self, const_cast<void*>(entry->data), static_cast<Py_ssize_t>(entry->size), 1, flags);
}

template <class Body>
void without_interpreter(Body&& body) {
  untorch_status status;
  {
    const GilRelease release;
    status = body();
  }
  check(status);
}

Archive* open_path(const nb::bytes& path, bool copy) {
  untorch_archive* archive = nullptr;
  without_interpreter([&] { return untorch_archive_open(path.c_str(), copy ? 1 : 0, &archive); });
  return new Archive(archive);
}

// In place: `data` is a bytes object, and kept.
Archive* open_memory(const nb::object& data, bool in_place) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(data.ptr(), &buffer, PyBUF_SIMPLE) != 0) throw_python();
  const auto release = [](void* context) {
    if (Py_IsInitialized() == 0) return;
    const PyGILState_STATE state = PyGILState_Ensure();
    PyBuffer_Release(static_cast<Py_buffer*>(context));
    PyGILState_Release(state);
    delete static_cast<Py_buffer*>(context);
  };
  auto* const kept = new Py_buffer(buffer);
  untorch_archive* archive = nullptr;
  without_interpreter([&] {
    return untorch_archive_open_memory(kept->buf, static_cast<std::size_t>(kept->len), in_place ? 0 : 1, release, kept,
                                       &archive);
  });
  return new Archive(archive);
}

nb::list entries(const Archive& self) {
  nb::list out;
  check(untorch_archive_entries(
      self.get(),
      [](void* list, const untorch_archive_entry* entry) {
        static_cast<nb::list*>(list)->append(nb::make_tuple(entry->name, entry->offset, entry->size, entry->crc));
      },
      &out));
  return out;
}

nb::object view(const Archive& self, const std::string& name) {
  const void* data = nullptr;
  std::size_t length = 0;
  check(untorch_archive_view(self.get(), name.c_str(), &data, &length));
  const nb::object entry = nb::cast(EntryView{self.handle(), data, length});
  return nb::steal(PyMemoryView_FromObject(entry.ptr()));
}

// By name: dtype, shape and bytes.
nb::dict tensors(const Safetensors& self) {
  struct Context {
    const Safetensors* file;
    nb::dict out;
  } context{&self, {}};
  check(untorch_safetensors_tensors(
      self.handle->file,
      [](void* given, const untorch_safetensors_tensor* tensor) {
        auto* const to = static_cast<Context*>(given);
        nb::list shape;
        for (std::size_t i = 0; i < tensor->ndim; ++i) shape.append(tensor->shape[i]);
        const nb::object entry = nb::cast(EntryView{to->file->handle, tensor->data, tensor->nbytes});
        to->out[nb::str(tensor->name)] =
            nb::make_tuple(tensor->dtype, nb::tuple(shape), nb::steal(PyMemoryView_FromObject(entry.ptr())));
      },
      &context));
  return context.out;
}

Safetensors* open_safetensors(const nb::bytes& path) {
  untorch_safetensors* file = nullptr;
  without_interpreter([&] { return untorch_safetensors_open(path.c_str(), &file); });
  return new Safetensors{std::make_shared<SafetensorsHandle>(file)};
}

nb::str sample_digest(const nb::object& data) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(data.ptr(), &buffer, PyBUF_SIMPLE) != 0) throw_python();
  const std::unique_ptr<Py_buffer, void (*)(Py_buffer*)> keep(&buffer, PyBuffer_Release);
  std::string hex(64, '\0');
  check(untorch_sample_digest(buffer.buf, static_cast<std::size_t>(buffer.len), hex.data()));
  return nb::str(hex.data(), hex.size());
}

nb::bytes text(const Archive& self, const std::string& name) {
  const char* bytes = nullptr;
  std::size_t length = 0;
  check(untorch_archive_text(self.get(), name.c_str(), &bytes, &length));
  return nb::bytes(bytes, length);
}

nb::str methods(const Archive& self) {
  const char* json = nullptr;
  without_interpreter([&] { return untorch_archive_methods(self.get(), &json); });
  return nb::str(json);
}

nb::dict digests(const Archive& self, std::uint32_t threads) {
  const nb::list all = entries(self);
  std::string hex(64 * nb::len(all), '\0');
  without_interpreter([&] { return untorch_archive_digests(self.get(), threads, hex.data()); });
  nb::dict out;
  std::size_t at = 0;
  for (const nb::handle entry : all) {
    out[entry[0]] = nb::str(hex.data() + at, 64);
    at += 64;
  }
  return out;
}

nb::tuple file_digests(const Archive& self) {
  const nb::list all = entries(self);
  std::string file(64, '\0'), hex(64 * nb::len(all), '\0');
  without_interpreter([&] { return untorch_archive_file_digests(self.get(), file.data(), hex.data()); });
  nb::dict out;
  std::size_t at = 0;
  for (const nb::handle entry : all) {
    out[entry[0]] = nb::str(hex.data() + at, 64);
    at += 64;
  }
  return nb::make_tuple(file, out);
}

nb::str sha256(const nb::object& data, std::uint64_t block_bytes, bool portable) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(data.ptr(), &buffer, PyBUF_SIMPLE) != 0) throw_python();
  const std::unique_ptr<Py_buffer, void (*)(Py_buffer*)> keep(&buffer, PyBuffer_Release);
  const auto length = static_cast<std::size_t>(buffer.len);
  const std::size_t count = block_bytes == 0 ? 1 : (length + block_bytes - 1) / block_bytes;
  std::string hex(64 * count, '\0');
  without_interpreter([&] { return untorch_sha256(buffer.buf, length, block_bytes, portable ? 1 : 0, hex.data()); });
  return nb::str(hex.data(), hex.size());
}

}  // namespace

void bind_archive(nb::module_& m) {
  static PyType_Slot slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&get_buffer)}, {0, nullptr}};
  nb::class_<EntryView>(m, "EntryView", nb::type_slots(slots));
  nb::class_<Archive>(m, "Archive")
      .def_prop_ro("path", [](const Archive& self) { return nb::bytes(untorch_archive_path(self.get())); })
      .def_prop_ro("root", [](const Archive& self) { return std::string(untorch_archive_root(self.get())); })
      .def_prop_ro("nbytes", [](const Archive& self) { return untorch_archive_nbytes(self.get()); })
      .def("entries", &entries)
      .def("view", &view, nb::arg("name"))
      .def("check_whole", [](const Archive& self) { check(untorch_archive_check_whole(self.get())); })
      .def("text", &text, nb::arg("name"))
      .def(
          "check_json",
          [](const Archive& self, const std::string& name) {
            without_interpreter([&] { return untorch_archive_check_json(self.get(), name.c_str()); });
          },
          nb::arg("name"))
      .def("methods", &methods)
      .def(
          "expect",
          [](const Archive& self, const std::string& name, const std::string& sha256_hex) {
            check(untorch_archive_expect(self.get(), name.c_str(), sha256_hex.c_str()));
          },
          nb::arg("name"), nb::arg("sha256"))
      .def(
          "verify",
          [](const Archive& self, std::uint32_t threads) {
            without_interpreter([&] { return untorch_archive_verify(self.get(), threads); });
          },
          nb::arg("threads") = 0)
      .def("trust_external", [](const Archive& self) { untorch_archive_trust_external(self.get()); })
      .def(
          "verify_external",
          [](const Archive& self, const std::optional<nb::bytes>& weights) {
            without_interpreter(
                [&] { return untorch_archive_verify_external(self.get(), weights ? weights->c_str() : nullptr); });
          },
          nb::arg("weights").none())
      .def("digests", &digests, nb::arg("threads") = 0)
      .def("file_digests", &file_digests)
      .def_prop_ro("identity", [](const Archive& self) { return std::string(untorch_archive_identity(self.get())); });
  nb::class_<Safetensors>(m, "Safetensors").def("tensors", &tensors);
  m.def("open_safetensors", &open_safetensors, nb::arg("path"), nb::rv_policy::take_ownership);
  m.def("sample_digest", &sample_digest, nb::arg("data"));
  m.def("open_archive", &open_path, nb::arg("path"), nb::arg("copy") = false, nb::rv_policy::take_ownership);
  m.def("open_memory", &open_memory, nb::arg("data"), nb::arg("in_place") = false, nb::rv_policy::take_ownership);
  m.def(
      "address_of", [](const nb::bytes& data) { return reinterpret_cast<std::uintptr_t>(data.c_str()); },
      nb::arg("data"));
  m.def("sha256", &sha256, nb::arg("data"), nb::arg("block_bytes") = 0, nb::arg("portable") = false);
}

}  // namespace untorch::python
