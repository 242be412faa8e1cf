// Arguments to flat inputs, flat outputs to results.
#include "signature.h"

#include <algorithm>

#include "convert.h"
#include "gil.h"

namespace nb = nanobind;

namespace untorch::python {

Signature::Signature(std::string method, const char* in_spec, const char* out_spec, std::size_t num_inputs,
                     std::size_t num_outputs, const nb::list& names, const nb::dict& constants, const nb::list& numbers,
                     const nb::dict& fixed_outputs, std::string text)
    : method_(std::move(method)),
      text_(std::move(text)),
      args_path_("method '" + method_ + "', args"),
      kwargs_path_("method '" + method_ + "', kwargs"),
      num_inputs_(num_inputs),
      num_outputs_(num_outputs),
      in_(Tree::parse(in_spec)),
      out_(Tree::parse(out_spec)) {
  if (in_.children().size() != 2) {
    raise(UNTORCH_INVALID_ARGUMENT, "method '" + method_ + "': the call specification has no (args, kwargs) form");
  }
  const Tree &positional = in_.children()[0], &keyword = in_.children()[1];
  if (keyword.keys().size() != keyword.children().size()) {
    raise(UNTORCH_INVALID_FILE, "the package's call specification is damaged: keyword arguments have no names");
  }
  const bool all_leaves = std::ranges::all_of(positional.children(), &Tree::is_leaf);
  if (all_leaves && names.size() >= positional.children().size()) {
    for (std::size_t i = 0; i < positional.children().size(); ++i) names_.push_back(nb::object(names[i]));
  }
  constants_.resize(in_.num_leaves());
  for (auto [index, value] : constants) {
    const auto i = nb::cast<std::size_t>(index);
    if (i < constants_.size()) constants_[i] = nb::borrow(value);
    ++num_constants_;
  }
  numbers_.resize(in_.num_leaves());
  for (nb::handle index : numbers) {
    const auto i = nb::cast<std::size_t>(index);
    if (i < numbers_.size()) numbers_[i] = true;
  }
  fixed_.resize(out_.num_leaves());
  for (auto [index, value] : fixed_outputs) {
    const auto i = nb::cast<std::size_t>(index);
    if (i >= fixed_.size()) continue;
    fixed_[i] = nb::borrow(value);
    ++num_fixed_;
  }
  flat_inputs_ =
      all_leaves && keyword.children().empty() && positional.children().size() == num_inputs && numbers.size() == 0;
  single_output_ = out_.is_leaf() && num_outputs == 1 && num_fixed_ == 0;
}

void Signature::refuse(const std::string& what) const {
  raise_type("method '" + method_ + "': " + what + (text_.empty() ? "" : "; it takes " + text_));
}

// The names of arguments, in their order; those of positional ones that are no single arrays have none.
std::vector<nb::object> Signature::known_names() const {
  std::vector<nb::object> known = names_;
  const std::vector<nb::object>& keys = in_.children()[1].keys();
  known.insert(known.end(), keys.begin(), keys.end());
  return known;
}

// Which of a refused call's names are unknown, with the nearest known ones; throws if there are any. Only here, so that
// calls that fit do not pay for it.
void Signature::refuse_unknown(PyObject* kwargs) const {
  const std::vector<nb::object> names = known_names();
  nb::list known;
  for (const nb::object& name : names) known.append(name);
  std::string unknown, near;
  std::size_t count = 0;
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t position = 0;
  while (kwargs != nullptr && PyDict_Next(kwargs, &position, &key, &value) != 0) {
    const int is_known = PySequence_Contains(known.ptr(), key);
    if (is_known < 0) throw nb::python_error();
    if (is_known == 1) continue;
    ++count;
    unknown += (unknown.empty() ? "'" : ", '") + text_of(key) + "'";
    const nb::object matches =
        call_python(import_python("difflib").attr("get_close_matches"), nb::make_tuple(nb::borrow(key), known, 1));
    for (nb::handle match : matches) near += (near.empty() ? "'" : ", '") + text_of(match) + "'";
  }
  if (count == 0) return;
  std::string what = "method '" + method_ + "': unknown argument" + (count == 1 ? " " : "s ") + unknown;
  if (!near.empty()) what += "; did you mean " + near + "?";
  std::string arguments = text_;
  if (arguments.empty()) {
    for (const nb::object& name : names) arguments += (arguments.empty() ? "" : ", ") + text_of(name);
  }
  if (!arguments.empty()) what += (near.empty() ? ". " : " ") + ("The arguments are " + arguments);
  raise_type(what);
}

nb::object Signature::take_out(nb::object& kwargs) const {
  static PyObject* const name = PyUnicode_InternFromString("out");
  if (!kwargs.is_valid() || PyDict_Contains(kwargs.ptr(), name) != 1 || in_.children()[1].has_key(name))
    return nb::object();
  const nb::object out = nb::borrow(PyDict_GetItem(kwargs.ptr(), name));
  kwargs = nb::steal(PyDict_Copy(kwargs.ptr()));
  if (!kwargs.is_valid() || PyDict_DelItem(kwargs.ptr(), name) != 0) throw nb::python_error();
  return out.is_none() ? nb::object() : out;
}

// Moves arguments given by name to their positions, as Python does for a function.
void Signature::place_names(PyObject* args, nb::object& kwargs, References& positional) const {
  const auto count = static_cast<std::size_t>(tuple_size(args));
  for (std::size_t i = 0; i < count; ++i) positional.add(tuple_item(args, static_cast<Py_ssize_t>(i)));
  if (!kwargs.is_valid() || dict_size(kwargs.ptr()) == 0) return;
  const Tree& keyword = in_.children()[1];
  bool by_name = false;
  for (std::size_t i = count; i < names_.size() && !by_name; ++i) {
    by_name = PyDict_Contains(kwargs.ptr(), names_[i].ptr()) == 1 && !keyword.has_key(names_[i].ptr());
  }
  if (!by_name) return;
  kwargs = nb::steal(PyDict_Copy(kwargs.ptr()));
  if (!kwargs.is_valid()) throw nb::python_error();
  for (std::size_t i = count; i < names_.size(); ++i) {
    PyObject* const value = PyDict_GetItemWithError(kwargs.ptr(), names_[i].ptr());
    if (value == nullptr) {
      refuse_unknown(kwargs.ptr());
      refuse("missing argument '" + text_of(names_[i]) + "'");
    }
    positional.add(value);
    if (PyDict_DelItem(kwargs.ptr(), names_[i].ptr()) != 0) throw nb::python_error();
  }
}

// Positional arguments beyond `count` are those that were exported by keyword, in their order.
void Signature::name_places(std::size_t count, const References& values, nb::object& kwargs) const {
  const Tree& keyword = in_.children()[1];
  kwargs = nb::steal(kwargs.is_valid() ? PyDict_Copy(kwargs.ptr()) : PyDict_New());
  if (!kwargs.is_valid()) throw nb::python_error();
  for (std::size_t i = count; i < values.size(); ++i) {
    const nb::object& key = keyword.keys()[i - count];
    if (PyDict_Contains(kwargs.ptr(), key.ptr()) == 1) refuse("got two values for argument '" + text_of(key) + "'");
    if (PyDict_SetItem(kwargs.ptr(), key.ptr(), values[i]) != 0) throw nb::python_error();
  }
}

void Signature::check_keywords(PyObject* kwargs) const {
  const Tree& keyword = in_.children()[1];
  std::string missing, twice;
  for (const nb::object& key : keyword.keys()) {
    if (kwargs == nullptr || PyDict_Contains(kwargs, key.ptr()) != 1)
      missing += (missing.empty() ? "" : ", ") + text_of(key);
  }
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t position = 0;
  while (kwargs != nullptr && PyDict_Next(kwargs, &position, &key, &value) != 0) {
    if (!keyword.has_key(key)) twice += (twice.empty() ? "'" : ", '") + text_of(key) + "'";
  }
  if (missing.empty() && twice.empty()) return;
  refuse_unknown(kwargs);
  refuse(missing.empty() ? "got two values for argument " + twice : "missing keyword arguments " + missing);
}

void Signature::flatten(PyObject* args, PyObject* given_kwargs, References& inputs) const {
  const Tree &positional = in_.children()[0], &keyword = in_.children()[1];
  nb::object kwargs = nb::borrow(given_kwargs);
  References values;
  place_names(args, kwargs, values);
  const std::size_t count = positional.children().size();
  if (values.size() > count && values.size() <= count + keyword.children().size())
    name_places(count, values, kwargs);
  else if (values.size() != count) {
    refuse_unknown(kwargs.ptr());
    refuse("expected " + std::to_string(count) + " positional arguments, got " + std::to_string(values.size()));
  }
  const bool has_keywords = kwargs.is_valid() && dict_size(kwargs.ptr()) != 0;
  if (has_keywords || !keyword.children().empty()) check_keywords(kwargs.ptr());

  const bool by_position = num_constants_ + num_inputs_ == in_.num_leaves();
  References leaves;
  // Without constants and numbers the leaves are the inputs.
  const bool plain = num_constants_ == 0 && std::ranges::find(numbers_, true) == numbers_.end();
  References& into = by_position && plain ? inputs : leaves;
  positional.flatten_children(values.span().first(count), args_path_, into);
  if (!keyword.children().empty()) keyword.flatten(kwargs.ptr(), kwargs_path_, into);
  if (&into == &inputs) return;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    PyObject* const leaf = leaves[i];
    if (!by_position) {  // a stock package does not tell which leaves are tensors
      if (is_ndarray(leaf) || has_array_protocol(leaf)) inputs.add(leaf);
      continue;
    }
    const nb::object& expected = constants_[i];
    const bool is_number = PyIndex_Check(leaf) && !PyBool_Check(leaf) && !is_ndarray(leaf) && !has_array_protocol(leaf);
    if (!expected.is_valid() && numbers_[i] && is_number) {
      nb::object number = call_python(import_python("numpy").attr("int64"), nb::make_tuple(nb::borrow(leaf)));
      inputs.add(call_python(import_python("numpy").attr("asarray"), nb::make_tuple(number)).ptr());
      continue;
    }
    if (!expected.is_valid()) {
      inputs.add(leaf);
      continue;
    }
    if (Py_TYPE(leaf) == Py_TYPE(expected.ptr())) {
      const int same = PyObject_RichCompareBool(leaf, expected.ptr(), Py_EQ);
      if (same < 0) throw nb::python_error();
      if (same == 1) continue;
    }
    const std::size_t split = positional.num_leaves();
    const std::string path = i < split ? positional.path_of(i, args_path_) : keyword.path_of(i - split, kwargs_path_);
    raise(UNTORCH_INVALID_ARGUMENT, path + ": the model was exported with the value " + repr_of(expected) + ", got " +
                                        repr_of(leaf) + "; export it again for another value");
  }
}

void Signature::flatten_out(PyObject* out, bool on_cpu, const std::string& device, References& buffers) const {
  const std::string path = "method '" + method_ + "', out";
  out_.flatten(out, path, buffers);
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    PyObject* const buffer = buffers[i];
    if (buffer == Py_None) continue;
    const std::string where = path + "[" + std::to_string(i) + "]: ";
    if (is_ndarray(buffer)) {
      if (!is_writeable(buffer)) raise(UNTORCH_INVALID_ARGUMENT, where + "the array is read-only");
    } else if (on_cpu || !has_array_protocol(buffer)) {
      raise_type(where + "expected a numpy array" + (on_cpu ? "" : " or an array on " + device) + " to write to, got " +
                 class_name(buffer));
    }
  }
}

// None and constants, which were known when the model was compiled, are leaves of the tree; of the library they are
// outputs that it never sets, or none at all.
void Signature::add_fixed(const References& outputs, References& leaves) const {
  const std::size_t missing = out_.num_leaves() - std::min(out_.num_leaves(), outputs.size());
  const bool left_out = missing != 0 && missing == num_fixed_;
  std::size_t next = 0;
  for (std::size_t i = 0; i < out_.num_leaves(); ++i) {
    const bool is_fixed = fixed_[i].is_valid();
    const bool has_slot = !(is_fixed && left_out) && next < outputs.size();
    PyObject* const given = has_slot ? outputs[next++] : Py_None;
    leaves.add(is_fixed ? fixed_[i].ptr() : given);
  }
}

nb::object Signature::result(const References& outputs, const References* buffers) const {
  if (single_output_ && buffers == nullptr) return nb::borrow(outputs[0]);
  References leaves;
  add_fixed(outputs, leaves);
  if (buffers != nullptr) {
    const auto fail = [&](std::size_t i, const std::string& what) {
      raise(UNTORCH_INVALID_ARGUMENT, "method '" + method_ + "', out[" + std::to_string(i) + "]: " + what);
    };
    // All are checked before the first is written.
    std::vector<nb::object> arrays(leaves.size());
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      PyObject* const buffer = (*buffers)[i];
      if (buffer == Py_None) continue;
      if (leaves[i] == Py_None) fail(i, "expected None, as the output is, got an array");
      if (fixed_[i].is_valid()) fail(i, "expected None, as the output is no array, got one");
      if (!is_ndarray(buffer)) continue;
      arrays[i] = is_ndarray(leaves[i]) ? nb::borrow(leaves[i]) : nb::object(nb::handle(leaves[i]).attr("numpy")());
      if (!same_form(buffer, arrays[i].ptr()))
        fail(i, "expected " + form_of(arrays[i].ptr()) + ", got " + form_of(buffer));
    }
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      PyObject* const buffer = (*buffers)[i];
      if (buffer == Py_None) continue;
      if (arrays[i].is_valid()) {
        if (!copy_values(buffer, arrays[i].ptr())) throw nb::python_error();
      } else {
        copy_to_device(leaves[i], buffer, i);
      }
      leaves.set(i, buffer);
    }
  }
  PyObject* const* next = leaves.span().data();
  return out_.unflatten(next);
}

// On failure the message says which of the arrays it was; what was raised is its cause.
void Signature::copy_to_device(PyObject* output, PyObject* buffer, std::size_t index) const {
  try {
    nb::handle(output).attr("copy_to")(nb::handle(buffer));
  } catch (nb::python_error& error) {
    if (!error.matches(exception_class(UNTORCH_INVALID_ARGUMENT))) throw;
    const std::string text = "method '" + method_ + "', out[" + std::to_string(index) + "]: " + text_of(error.value());
    nb::raise_from(error, exception_class(UNTORCH_INVALID_ARGUMENT), "%s", text.c_str());
    throw nb::python_error();
  }
}

}  // namespace untorch::python
