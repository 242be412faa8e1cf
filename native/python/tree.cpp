// Parses specifications, takes values apart and puts results together.
#include "tree.h"

#include <cstring>

#include "convert.h"
#include "gil.h"
#include "python_api.h"

namespace nb = nanobind;

namespace untorch::python {
namespace {

constexpr int kProtocol = 1, kMaxDepth = 64;

[[noreturn]] void damaged(const std::string& why) {
  raise(UNTORCH_INVALID_FILE, "the package's call specification is damaged: " + why);
}

struct KindRow {
  const char* type;
  Tree::Kind kind;
};
constexpr KindRow kKinds[] = {
    {"builtins.tuple", Tree::Kind::kTuple},
    {"builtins.list", Tree::Kind::kList},
    {"builtins.dict", Tree::Kind::kDict},
    {"collections.OrderedDict", Tree::Kind::kOrderedDict},
    {"collections.defaultdict", Tree::Kind::kDefaultDict},
    {"collections.deque", Tree::Kind::kDeque},
    {"collections.namedtuple", Tree::Kind::kNamedTuple},
    {"torch.Size", Tree::Kind::kTuple},
    {"torch.fx.immutable_collections.immutable_list", Tree::Kind::kList},
    {"torch.fx.immutable_collections.immutable_dict", Tree::Kind::kDict},
};

Tree::Kind kind_of(const std::string& type) {
  for (const KindRow& row : kKinds) {
    if (type == row.type) return row.kind;
  }
  return Tree::Kind::kStruct;
}

// json.loads, with what it raises for bad text as a message.
nb::object load_json(nb::handle text, std::string& error) {
  try {
    return call_python(import_python("json").attr("loads"), nb::make_tuple(text));
  } catch (nb::python_error& e) {
    if (!e.matches(PyExc_ValueError) && !e.matches(PyExc_TypeError) && !e.matches(PyExc_RecursionError)) throw;
    error = text_of(e.value());
    return nb::object();
  }
}

nb::object item(nb::handle dict, const char* key) {
  PyObject* found = PyDict_GetItemString(dict.ptr(), key);  // borrowed
  return found != nullptr ? nb::borrow(found) : nb::none();
}

// A key that is no string is stored as {"__enum__": …} and the like, or plainly.
nb::object key_of(nb::handle key) {
  if (PyUnicode_Check(key.ptr()) || PyLong_Check(key.ptr()) || PyFloat_Check(key.ptr()) || key.is_none())
    return nb::borrow(key);
  return call_python(import_python("json").attr("dumps"), nb::make_tuple(key));
}

// What torch.export.register_dataclass stores: the names of the fields that have values, and of those that are None.
bool is_dataclass(const nb::object& context, std::size_t children) {
  if (nb::len(context) != 2) return false;
  PyObject *const fields = list_item(context.ptr(), 0), *const nones = list_item(context.ptr(), 1);
  return PyList_Check(fields) && PyList_Check(nones) && nb::len(nb::handle(fields)) == children;
}

bool is_deque(PyObject* value) {
  static PyObject* const type = nb::object(import_python("collections").attr("deque")).release().ptr();
  return PyObject_IsInstance(value, type) == 1;
}

}  // namespace

struct Tree::Place {
  const std::string& root;
  const Place* parent = nullptr;  // null: this is the root
  const Tree* node = nullptr;     // the parent's
  std::size_t child = 0;

  std::string text() const { return parent == nullptr ? root : parent->text() + node->label(child); }
};

Tree Tree::parse(const char* text) {
  std::string error;
  const nb::object decoded = nb::steal(PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(std::strlen(text)), nullptr));
  if (!decoded.is_valid()) {
    PyErr_Clear();
    damaged("it is not UTF-8");
  }
  const nb::object document = load_json(decoded, error);
  if (!document.is_valid()) damaged(error);
  if (!PyList_Check(document.ptr()) || nb::len(document) != 2) damaged("expected a list of the protocol and the tree");
  const nb::object protocol = document[0];
  if (!protocol.equal(nb::int_(kProtocol))) {
    raise(UNTORCH_UNSUPPORTED,
          "call specification of protocol " + text_of(protocol) + "; this untorch reads " + std::to_string(kProtocol));
  }
  return parse_node(nb::object(document[1]), 0);
}

Tree Tree::parse_node(nb::handle node, int depth) {
  if (!PyDict_Check(node.ptr()) || depth > kMaxDepth) damaged("a node is malformed");
  const nb::object children = item(node, "children_spec"), type = item(node, "type");
  if (!PyList_Check(children.ptr())) damaged("a node is malformed");
  Tree tree;
  for (nb::handle child : children) tree.children_.push_back(parse_node(child, depth + 1));
  const std::size_t count = tree.children_.size();
  if (!type.is_none() && !PyUnicode_Check(type.ptr())) damaged("a node's type is no text");
  if (type.is_none()) {
    if (count != 0) damaged("a leaf has children");
    return tree;
  }
  tree.num_leaves_ = 0;
  for (const Tree& child : tree.children_) tree.num_leaves_ += child.num_leaves_;

  std::string name = text_of(type), unused;
  const Kind kind = tree.kind_ = kind_of(name);
  nb::object context = item(node, "context");
  if (PyUnicode_Check(context.ptr())) {
    nb::object loaded = load_json(context, unused);
    if (loaded.is_valid()) context = std::move(loaded);
  }
  const bool is_dict = PyDict_Check(context.ptr()), is_list = PyList_Check(context.ptr());
  const auto take_keys = [&](nb::handle list) {
    if (!PyList_Check(list.ptr())) return;
    for (nb::handle key : list) tree.keys_.push_back(key_of(key));
  };
  const bool is_mapping = kind == Kind::kDict || kind == Kind::kOrderedDict || kind == Kind::kDefaultDict;
  if (kind == Kind::kDefaultDict && is_dict) {
    take_keys(item(context, "dict_context"));
  } else if (kind == Kind::kStruct && is_list && is_dataclass(context, count)) {
    take_keys(nb::handle(list_item(context.ptr(), 0)));
    for (nb::handle key : nb::handle(list_item(context.ptr(), 1))) tree.none_keys_.push_back(nb::str(key));
  } else if ((kind == Kind::kStruct || (is_mapping && kind != Kind::kDefaultDict)) && is_list) {
    take_keys(context);
  } else if (kind == Kind::kStruct && is_dict) {
    take_keys(nb::list(context));
  } else if (kind == Kind::kNamedTuple && is_dict) {
    const nb::object fields = item(context, "fields");
    if (PyList_Check(fields.ptr())) {
      for (nb::handle field : fields) tree.keys_.push_back(nb::str(field));
    }
    for (const char* key : {"type", "class_name"}) {
      const nb::object given = item(context, key);
      if (PyObject_IsTrue(given.ptr()) == 1) name = text_of(given);
    }
  }
  if (is_mapping && tree.keys_.size() != count) damaged("a dict has other keys than children");
  if (tree.keys_.size() != count) tree.keys_.clear();

  const auto find_class = [&](const char* module, const char* attribute) {
    tree.class_ = import_python(module).attr(attribute);
  };
  if (kind == Kind::kOrderedDict) find_class("collections", "OrderedDict");
  if (kind == Kind::kDefaultDict) find_class("collections", "defaultdict");
  if (kind == Kind::kDeque) find_class("collections", "deque");
  if (kind == Kind::kStruct && !(tree.keys_.empty() && tree.none_keys_.empty()))
    find_class("untorch.runtime.pytree", "Struct");
  if (kind == Kind::kNamedTuple && !tree.keys_.empty()) {
    find_class("untorch.runtime.pytree", "namedtuple_class");
    nb::list fields;
    for (const nb::object& key : tree.keys_) fields.append(key);
    tree.class_ = call_python(tree.class_, nb::make_tuple(nb::str(name.data(), name.size()), nb::tuple(fields)));
  }
  return tree;
}

bool Tree::has_key(PyObject* key) const {
  for (const nb::object& own : keys_) {
    if (own.ptr() == key) return true;
    const int same = PyObject_RichCompareBool(own.ptr(), key, Py_EQ);
    if (same < 0) throw nb::python_error();
    if (same == 1) return true;
  }
  return false;
}

std::string Tree::label(std::size_t child) const {
  if (keys_.empty() || kind_ == Kind::kNamedTuple) return "[" + std::to_string(child) + "]";
  return "[" + text_of(nb::repr(keys_[child])) + "]";
}

std::string Tree::key_names() const {
  std::string names;
  for (const nb::object& key : keys_) names += (names.empty() ? "" : ", ") + text_of(nb::repr(key));
  return names.empty() ? "no keys" : names;
}

const char* Tree::kind_name() const noexcept {
  switch (kind_) {
    case Kind::kTuple:
      return "tuple";
    case Kind::kList:
      return "list";
    case Kind::kDeque:
      return "deque";
    case Kind::kNamedTuple:
      return "namedtuple";
    default:
      return "struct";
  }
}

void Tree::flatten(PyObject* value, const std::string& root, References& leaves) const {
  flatten_at(value, Place{root}, leaves);
}

void Tree::flatten_children(std::span<PyObject* const> values, const std::string& root, References& leaves) const {
  const Place top{root};
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (children_[i].is_leaf()) {
      leaves.add(values[i]);
    } else {
      children_[i].flatten_at(values[i], Place{root, &top, this, i}, leaves);
    }
  }
}

void Tree::flatten_at(PyObject* value, const Place& place, References& leaves) const {
  if (is_leaf()) {
    leaves.add(value);
    return;
  }
  if (is_mapping() && PyDict_CheckExact(value) && exact_dict_children(value, place, leaves)) return;
  References found;
  if (is_mapping()) {
    mapping_children(value, place, found);
  } else {
    sequence_children(value, place, found);
  }
  for (std::size_t i = 0; i < children_.size(); ++i) {
    children_[i].flatten_at(found[i], Place{place.root, &place, this, i}, leaves);
  }
}

bool Tree::is_mapping() const noexcept {
  return kind_ == Kind::kDict || kind_ == Kind::kOrderedDict || kind_ == Kind::kDefaultDict ||
         (kind_ == Kind::kStruct && class_.is_valid());
}

// The usual case, a dict with the very keys. False where it is not; nothing was added then.
bool Tree::exact_dict_children(PyObject* value, const Place& place, References& leaves) const {
  if (static_cast<std::size_t>(dict_size(value)) != keys_.size()) return false;
  References found;
  for (const nb::object& key : keys_) {
    PyObject* const child = PyDict_GetItemWithError(value, key.ptr());
    if (child == nullptr) {
      if (PyErr_Occurred() != nullptr) throw nb::python_error();
      return false;
    }
    found.add(child);
  }
  for (std::size_t i = 0; i < children_.size(); ++i) {
    children_[i].flatten_at(found[i], Place{place.root, &place, this, i}, leaves);
  }
  return true;
}

void Tree::mapping_children(PyObject* value, const Place& place, References& found) const {
  const nb::handle object(value);
  if (has_attribute(value, "keys")) {
    nb::object got = nb::steal(PySet_New(object.attr("keys")().ptr()));
    for (const nb::object& key : none_keys_) {  // they may be there
      if (got.is_valid() && PySet_Discard(got.ptr(), key.ptr()) < 0) throw nb::python_error();
    }
    const nb::object expected = nb::steal(PySet_New(nullptr));
    if (!got.is_valid() || !expected.is_valid()) throw nb::python_error();
    for (const nb::object& key : keys_) {
      if (PySet_Add(expected.ptr(), key.ptr()) != 0) throw nb::python_error();
    }
    if (!got.equal(expected)) {
      std::string text = place.text() + ": expected a dict with " + key_names(), missing, unknown;
      for (const nb::object& key : keys_) {
        const int has = PySet_Contains(got.ptr(), key.ptr());
        if (has == 0) missing += (missing.empty() ? "" : ", ") + text_of(nb::repr(key));
      }
      const nb::object rest = got - expected;
      nb::list others(rest);
      others.attr("sort")(nb::arg("key") = nb::borrow(reinterpret_cast<PyObject*>(&PyUnicode_Type)));
      for (nb::handle key : others) unknown += (unknown.empty() ? "" : ", ") + repr_of(key);
      if (!missing.empty()) text += "; missing " + missing;
      if (!unknown.empty()) text += "; unknown " + unknown;
      raise(UNTORCH_INVALID_ARGUMENT, text);
    }
    for (const nb::object& key : keys_) {
      PyObject* const child = PyObject_GetItem(value, key.ptr());
      if (child == nullptr) throw nb::python_error();
      found.adopt(child);
    }
    return;
  }
  if (kind_ == Kind::kStruct) {
    bool has_all = true;
    for (const nb::object& key : keys_) has_all = has_all && nb::hasattr(object, nb::str(key));
    if (has_all) {
      for (const nb::object& key : keys_) found.adopt(nb::object(object.attr(nb::str(key))).release().ptr());
      return;
    }
  }
  raise_type(place.text() + ": expected a dict with " + key_names() + ", got " + class_name(value));
}

void Tree::sequence_children(PyObject* value, const Place& place, References& found) const {
  const bool only_tuple = kind_ == Kind::kTuple || kind_ == Kind::kNamedTuple;
  const auto message = [&] {
    return place.text() + ": expected a " + kind_name() + " of " + std::to_string(children_.size()) + ", got " +
           class_name(value);
  };
  if (!PyTuple_Check(value) && (only_tuple || (!PyList_Check(value) && !is_deque(value)))) raise_type(message());
  const nb::object items = nb::steal(PySequence_Tuple(value));
  if (!items.is_valid()) throw nb::python_error();
  const Py_ssize_t count = tuple_size(items.ptr());
  if (static_cast<std::size_t>(count) != children_.size())
    raise(UNTORCH_INVALID_ARGUMENT, message() + " of " + std::to_string(count));
  for (Py_ssize_t i = 0; i < count; ++i) found.add(tuple_item(items.ptr(), i));
}

nb::object Tree::unflatten(PyObject* const*& next) const {
  if (is_leaf()) return nb::borrow(*next++);
  const auto count = static_cast<Py_ssize_t>(children_.size());
  const auto fill_dict = [&](const nb::object& dict) {
    for (std::size_t i = 0; i < children_.size(); ++i) {
      const nb::object key = kind_ == Kind::kStruct ? nb::object(nb::str(keys_[i])) : keys_[i];
      if (PyObject_SetItem(dict.ptr(), key.ptr(), children_[i].unflatten(next).ptr()) != 0) throw nb::python_error();
    }
    return dict;
  };
  const auto sequence = [&](bool is_list) {
    nb::object made = nb::steal(is_list ? PyList_New(count) : PyTuple_New(count));
    if (!made.is_valid()) throw nb::python_error();
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* const child = children_[static_cast<std::size_t>(i)].unflatten(next).release().ptr();
      if (is_list) {
        set_list_item(made.ptr(), i, child);
      } else {
        set_tuple_item(made.ptr(), i, child);
      }
    }
    return made;
  };
  const auto with_none_keys = [&](nb::object dict) {
    for (const nb::object& key : none_keys_) {
      if (PyObject_SetItem(dict.ptr(), key.ptr(), Py_None) != 0) throw nb::python_error();
    }
    return dict;
  };
  switch (kind_) {
    case Kind::kList:
      return sequence(true);
    case Kind::kDeque:
      return class_(sequence(true));
    case Kind::kDict:
      return fill_dict(nb::dict());
    case Kind::kOrderedDict:
      return fill_dict(class_());
    case Kind::kDefaultDict:
      return fill_dict(class_(nb::none()));
    case Kind::kNamedTuple:
      if (!keys_.empty()) return class_(*sequence(false));
      return sequence(false);
    case Kind::kStruct:
      if (!class_.is_valid()) return sequence(false);
      return with_none_keys(fill_dict(class_()));
    default:
      return sequence(false);
  }
}

std::string Tree::path_of(std::size_t leaf, std::string root) const {
  for (std::size_t i = 0; i < children_.size(); ++i) {
    if (leaf < children_[i].num_leaves_) return children_[i].path_of(leaf, root + label(i));
    leaf -= children_[i].num_leaves_;
  }
  return root;
}

}  // namespace untorch::python
