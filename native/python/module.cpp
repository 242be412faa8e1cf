// untorch._core: Program, Session, Method and Graph over the C interface. Calls are served here altogether.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "archive.h"
#include "method.h"
#include "types.h"

namespace nb = nanobind;
using namespace untorch::python;

namespace {

class Session {
 public:
  Session(const std::shared_ptr<ProgramHandle>& program, untorch_session* session)
      : handle_(std::make_shared<SessionHandle>(program, session)) {}

  nb::list methods() const {
    nb::list out;
    const std::size_t count = untorch_program_num_methods(handle_->program->program);
    for (std::size_t i = 0; i < count; ++i) {
      out.append(
          nb::cast(new Method(handle_, untorch_session_method(handle_->session, i)), nb::rv_policy::take_ownership));
    }
    return out;
  }
  void reset() const {
    untorch_status status;
    {
      const GilRelease release;
      status = untorch_session_reset(nullptr, handle_->session);
    }
    check(status);
  }
  Session* fork() const {
    untorch_session* made = nullptr;
    untorch_status status;
    {
      const GilRelease release;
      status = untorch_session_fork(handle_->program->program, handle_->session, &made);
    }
    check(status);
    return new Session(handle_->program, made);
  }
  std::size_t nbytes() const { return untorch_session_nbytes(handle_->session); }
  // Memory that goes back to a GPU's driver waits for the GPU.
  void close() const {
    const GilRelease release;
    untorch_session_close(handle_->session);
  }

 private:
  std::shared_ptr<SessionHandle> handle_;
};

class Program {
 public:
  Program(const Archive& archive, const nb::object& device, std::size_t num_runners, int num_threads, bool dequantize,
          bool verify, const nb::object& tf32, const nb::object& spin_us, bool copy,
          const std::optional<nb::bytes>& weights, std::size_t cuda_graphs) {
    std::string device_name;
    untorch_load_options options{sizeof(untorch_load_options),
                                 nullptr,
                                 num_runners,
                                 num_threads,
                                 dequantize ? 1 : 0,
                                 verify ? 1 : 0,
                                 copy ? 1 : 0,
                                 tf32.is_none()         ? UNTORCH_TF32_AS_EXPORTED
                                 : nb::cast<bool>(tf32) ? UNTORCH_TF32_ALWAYS
                                                        : UNTORCH_TF32_NEVER,
                                 0,
                                 weights ? weights->c_str() : nullptr,
                                 cuda_graphs};
    // C's 0 is the default, and its -1 is no spinning.
    if (!spin_us.is_none()) options.spin_us = nb::cast<int>(spin_us) == 0 ? -1 : nb::cast<int>(spin_us);
    if (!device.is_none()) {
      device_name = nb::cast<std::string>(device);
      options.device = device_name.c_str();
    }
    untorch_program* program = nullptr;
    untorch_status status;
    {
      const GilRelease release;
      status = untorch_program_open_archive(archive.get(), &options, &program);
    }
    check(status);
    handle_ = std::make_shared<ProgramHandle>(program);
  }

  nb::list methods() const {
    nb::list out;
    const std::size_t count = untorch_program_num_methods(handle_->program);
    for (std::size_t i = 0; i < count; ++i) {
      out.append(
          nb::cast(new Method(handle_, untorch_program_method(handle_->program, i)), nb::rv_policy::take_ownership));
    }
    return out;
  }

  nb::bytes entry(const std::string& name) const {
    const void* data = nullptr;
    std::size_t length = 0;
    check(untorch_program_entry(handle_->program, name.c_str(), &data, &length));
    return nb::bytes(data, length);
  }

  std::string memory() const {
    const char* json = nullptr;
    check(untorch_program_memory(handle_->program, &json));
    return json;
  }

  Session* session() const {
    untorch_session* made = nullptr;
    check(untorch_program_session(handle_->program, &made));
    return new Session(handle_, made);
  }
  void reset() const {
    untorch_status status;
    {
      const GilRelease release;
      status = untorch_session_reset(handle_->program, nullptr);
    }
    check(status);
  }

  bool is_stock() const { return untorch_program_is_stock(handle_->program) != 0; }
  void close() const {
    const GilRelease release;
    untorch_program_close(handle_->program);
  }

 private:
  std::shared_ptr<ProgramHandle> handle_;
};

}  // namespace

NB_MODULE(_core, m) {
  // Daemon threads keep what they use when the interpreter exits: that is no error.
  nb::set_leak_warnings(false);
  bind_tensor(m);
  bind_archive(m);
  untorch_set_interrupt_check(&check_signals);

  static PyType_Slot method_slots[] = {{Py_tp_call, reinterpret_cast<void*>(&call_slot<Method>)}, {0, nullptr}};
  static PyType_Slot graph_slots[] = {{Py_tp_call, reinterpret_cast<void*>(&call_slot<Graph>)}, {0, nullptr}};

  nb::class_<Method>(m, "Method", nb::type_slots(method_slots))
      .def_prop_ro("name", &Method::name)
      .def("open", &Method::open)
      .def("arity", &Method::arity)
      .def("extern_nodes", &Method::extern_nodes)
      .def("source", &Method::source)
      .def("describe", &Method::describe, nb::arg("names"), nb::arg("constants"), nb::arg("numbers"),
           nb::arg("fixed_outputs"), nb::arg("text"))
      .def("set_proxy", &Method::set_proxy)
      .def("open_with", &Method::open_with, nb::arg("opener"))
      .def("ensure_open", &Method::ensure_open)
      .def_prop_ro("is_described", &Method::is_described)
      .def("flatten", &Method::flatten)
      .def("run", &Method::run, nb::arg("inputs"))
      .def_prop_ro("device", &Method::device)
      .def_prop_ro("gpu_architecture", &Method::gpu_architecture)
      .def("graphs", &Method::graphs);

  nb::class_<Graph>(m, "Graph", nb::type_slots(graph_slots))
      .def(nb::init<const nb::object&, const nb::object&, const nb::object&>(), nb::arg("method"), nb::arg("inputs"),
           nb::arg("shares") = nb::none())
      .def("run", &Graph::run, nb::arg("inputs"))
      .def("close", &Graph::close)
      .def_prop_ro("closed", &Graph::closed);

  nb::class_<Session>(m, "Session")
      .def("methods", &Session::methods)
      .def("reset", &Session::reset)
      .def("fork", &Session::fork, nb::rv_policy::take_ownership)
      .def("nbytes", &Session::nbytes)
      .def("close", &Session::close);

  nb::class_<Program>(m, "Program")
      .def(nb::init<const Archive&, const nb::object&, std::size_t, int, bool, bool, const nb::object&,
                    const nb::object&, bool, const std::optional<nb::bytes>&, std::size_t>(),
           nb::arg("archive"), nb::arg("device").none(), nb::arg("num_runners"), nb::arg("num_threads"),
           nb::arg("dequantize_weights"), nb::arg("verify"), nb::arg("tf32").none(), nb::arg("spin_us").none(),
           nb::arg("copy") = false, nb::arg("weights") = nb::none(), nb::arg("cuda_graphs") = 0)
      .def("methods", &Program::methods)
      .def("entry", &Program::entry)
      .def("memory", &Program::memory)
      .def("session", &Program::session, nb::rv_policy::take_ownership)
      .def("reset", &Program::reset)
      .def_prop_ro("is_stock", &Program::is_stock)
      .def("close", &Program::close);

  // For tests: a tree alone.
  nb::class_<Tree>(m, "Tree")
      .def("__init__", [](Tree* self, const std::string& text) { new (self) Tree(Tree::parse(text.c_str())); })
      .def_prop_ro("num_leaves", &Tree::num_leaves)
      .def("flatten",
           [](const Tree& tree, nb::handle value, const std::string& root) {
             References leaves;
             tree.flatten(value.ptr(), root, leaves);
             nb::list out;
             for (std::size_t i = 0; i < leaves.size(); ++i)
               out.append(nb::make_tuple(tree.path_of(i, root), nb::handle(leaves[i])));
             return out;
           })
      .def("unflatten", [](const Tree& tree, const nb::list& leaves) {
        if (leaves.size() != tree.num_leaves()) throw nb::value_error("another number of leaves than the tree has");
        References given;
        for (nb::handle leaf : leaves) given.add(leaf.ptr());
        PyObject* const* next = given.span().data();
        return tree.unflatten(next);
      });

  m.def(
      "read_elf",
      [](const nb::object& data, const nb::object& name, std::size_t max_symbols) {
        Py_buffer buffer;
        if (PyObject_GetBuffer(data.ptr(), &buffer, PyBUF_SIMPLE) != 0) throw_python();
        const std::unique_ptr<Py_buffer, void (*)(Py_buffer*)> keep(&buffer, PyBuffer_Release);
        const untorch_elf* read = nullptr;
        check(untorch_elf_read(buffer.buf, static_cast<std::size_t>(buffer.len), text_of(name).c_str(), &read));
        const std::unique_ptr<const untorch_elf, void (*)(const untorch_elf*)> elf(read, untorch_elf_free);
        if (elf->num_symbols > max_symbols || elf->num_versions > max_symbols || elf->num_needed > max_symbols) {
          raise(UNTORCH_INVALID_FILE, text_of(name) + " is no usable shared library: it has more than " +
                                          std::to_string(max_symbols) + " symbols");
        }
        const auto text = [](const char* bytes) -> nb::object {
          if (bytes == nullptr) return nb::none();
          return steal_or_throw(
              PyUnicode_DecodeUTF8(bytes, static_cast<Py_ssize_t>(std::strlen(bytes)), "backslashreplace"));
        };
        nb::list needed, symbols, versions;
        for (std::size_t i = 0; i < elf->num_needed; ++i) needed.append(text(elf->needed[i]));
        for (std::size_t i = 0; i < elf->num_symbols; ++i) {
          const untorch_elf_symbol& s = elf->symbols[i];
          symbols.append(
              nb::make_tuple(text(s.name), s.is_defined != 0, s.is_weak != 0, text(s.version), text(s.version_file)));
        }
        for (std::size_t i = 0; i < elf->num_versions; ++i)
          versions.append(nb::make_tuple(text(elf->versions[i].file), text(elf->versions[i].name)));
        return nb::make_tuple(text(elf->machine), text(elf->soname), needed, symbols, versions);
      },
      nb::arg("data"), nb::arg("name"), nb::arg("max_symbols") = std::size_t{1} << 24);

  m.def(
      "profile_start",
      [](int device) {
        untorch_status status;
        {
          const GilRelease release;
          status = untorch_profile_start(device);
        }
        check(status);
      },
      nb::arg("device"));
  // Tuples of name, function, kind, captured, thread, begin, end, the device's begin and end; and how many are missing.
  m.def("profile_collect", [] {
    std::vector<untorch_profile_range> ranges;
    std::size_t dropped = 0;
    untorch_status status;
    {
      const GilRelease release;
      status = untorch_profile_collect(
          [](void* to, const untorch_profile_range* range) {
            static_cast<std::vector<untorch_profile_range>*>(to)->push_back(*range);
          },
          &ranges, &dropped);
    }
    check(status);
    nb::list out;
    for (const untorch_profile_range& r : ranges) {
      out.append(nb::make_tuple(r.name, r.function, r.kind, r.captured != 0, r.thread, r.begin_ns, r.end_ns,
                                r.device_begin_ns, r.device_end_ns));
    }
    return nb::make_tuple(out, dropped);
  });
  m.def("profile_stop", &untorch_profile_stop);
  m.def(
      "read_rate",
      [](std::size_t bytes, unsigned threads) {
        double rate = 0;
        untorch_status status;
        {
          const GilRelease release;
          status = untorch_profile_read_rate(bytes, threads, &rate);
        }
        check(status);
        return rate;
      },
      nb::arg("bytes"), nb::arg("threads"));
  m.def("exchange_stream", &exchange_stream, nb::arg("handle").none(), nb::arg("owner").none());
  m.def("call_stream", [](int device) { return stream_number(current_producer(device).stream); }, nb::arg("device"));
  m.def(
      "synchronize",
      [](int device, std::uintptr_t stream) {
        untorch_status status;
        {
          const GilRelease release;
          status = untorch_stream_synchronize(device, stream == 1 ? nullptr : reinterpret_cast<void*>(stream));
        }
        check(status);
        release_done();
      },
      nb::arg("device"), nb::arg("stream"));
  m.def(
      "release_memory",
      [](int device) {
        untorch_status status;
        {
          const GilRelease release;
          status = untorch_cuda_release_memory(device);
        }
        check(status);
      },
      nb::arg("device"));
  m.def(
      "to_device",
      [](nb::handle array, int device) {
        Operand operand;
        untorch_view given;
        if (!operand.set(array.ptr(), {"to_device", 0, -1}, 0, given)) throw_python();
        const Producer producer = current_producer(device);
        untorch_tensor* tensor = nullptr;
        untorch_status status;
        {
          const GilRelease release;
          status = untorch_tensor_to_device(&given, device, &tensor);
        }
        check(status);
        return nb::cast(new Tensor(tensor, producer), nb::rv_policy::take_ownership);
      },
      nb::arg("array"), nb::arg("device"));
  // device: the GPU's index, -1 for the current one; None for the CPU.
  m.def(
      "create",
      [](const std::string& dtype, const std::vector<std::int64_t>& shape, std::optional<int> device, bool zeros) {
        std::int32_t code = -1;
        for (const TypeRow& row : kTypes) {
          if (dtype == row.name) code = row.code;
        }
        if (code < 0) raise(UNTORCH_UNSUPPORTED, "unknown dtype " + dtype);
        untorch_tensor* tensor = nullptr;
        untorch_status status;
        {
          const GilRelease release;
          status =
              untorch_tensor_create(code, static_cast<std::int32_t>(shape.size()), shape.data(),
                                    device ? UNTORCH_CUDA : UNTORCH_CPU, device.value_or(-1), zeros ? 1 : 0, &tensor);
        }
        check(status);
        untorch_view view;
        untorch_tensor_view(tensor, &view);
        return nb::cast(new Tensor(tensor, device ? current_producer(view.device_index) : Producer{}),
                        nb::rv_policy::take_ownership);
      },
      nb::arg("dtype"), nb::arg("shape"), nb::arg("device").none(), nb::arg("zeros"));
  m.def("dtypes", [] {
    nb::list names;
    for (const TypeRow& row : kTypes) names.append(row.name);
    return names;
  });
  m.def("cuda_devices", [] { return std::string(untorch_cuda_devices()); });
  // What a method on a device sees of an array; for tests.
  m.def(
      "view_of",
      [](nb::handle array, int device_type, int device_index) {
        Operand operand;
        untorch_view v;
        if (!operand.set(array.ptr(), {"view_of", device_type, device_index}, 0, v)) throw_python();
        nb::list sizes, strides;
        for (int d = 0; d < v.ndim; ++d) {
          sizes.append(v.sizes[d]);
          strides.append(v.strides[d]);
        }
        return nb::make_tuple(reinterpret_cast<std::uintptr_t>(v.data), dtype_name(v.dtype), v.device_type,
                              v.device_index, nb::tuple(sizes), nb::tuple(strides), v.read_only != 0);
      },
      nb::arg("array"), nb::arg("device_type"), nb::arg("device_index"));
  m.def("version", [] { return std::string(untorch_version()); });
  m.def("live_tensors", &untorch_live_tensors);
  m.def("manual_seed", &untorch_manual_seed, nb::arg("seed"));
  m.def("initial_seed", &untorch_initial_seed);
  m.def("cpu_features", [] { return std::string(untorch_cpu_features()); });
  m.def("cpu_architecture", [] { return std::string(untorch_cpu_architecture()); });
  m.def("cpu_level", [] { return std::string(untorch_cpu_level()); });
  m.def("cpu_extensions", [] { return std::string(untorch_cpu_extensions()); });
  m.def("has_symbol", [](const std::string& name) { return untorch_has_symbol(name.c_str()) != 0; }, nb::arg("name"));
  const auto device_type = [](const std::string& device) { return device == "cuda" ? UNTORCH_CUDA : UNTORCH_CPU; };
  m.def(
      "native_operators",
      [=](const std::string& device) {
        nb::list names;
        std::string_view text = untorch_native_operators(device_type(device));
        for (std::size_t end = text.find('\n'); end != std::string_view::npos; end = text.find('\n')) {
          names.append(nb::str(text.data(), end));
          text.remove_prefix(end + 1);
        }
        names.attr("sort")();
        return names;
      },
      nb::arg("device"));
  m.def(
      "use_native_operator",
      [=](const std::string& name, const std::string& device, bool use) {
        check(untorch_use_native_operator(name.c_str(), device_type(device), use ? 1 : 0));
      },
      nb::arg("name"), nb::arg("device"), nb::arg("use"));
  m.def(
      "is_capturing",
      [](int device) { return untorch_stream_is_capturing(device, current_producer(device).stream) != 0; },
      nb::arg("device"));
}
