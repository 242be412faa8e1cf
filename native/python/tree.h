// Trees of arguments and results, by the specification that PyTorch stores in a package.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "model/capi.h"

namespace untorch::python {

// Strong references to Python objects.
class References {
 public:
  References() = default;
  ~References() {
    for (PyObject* object : objects_) Py_XDECREF(object);
  }
  References(const References&) = delete;
  References& operator=(const References&) = delete;

  void add(PyObject* object) { objects_.push_back(Py_NewRef(object)); }
  void adopt(PyObject* object) { objects_.push_back(object); }
  std::size_t size() const noexcept { return objects_.size(); }
  PyObject* operator[](std::size_t i) const noexcept { return objects_[i]; }
  void set(std::size_t i, PyObject* object) { Py_DECREF(std::exchange(objects_[i], Py_NewRef(object))); }
  std::span<PyObject* const> span() const noexcept { return objects_; }

 private:
  SmallVector<PyObject*, 8> objects_;
};

// One node with what is below it. A specification is the JSON text that torch.utils._pytree.treespec_dumps makes:
// nested nodes with a "type", a "context" and "children_spec"; a leaf has no type.
class Tree {
 public:
  enum class Kind { kLeaf, kTuple, kList, kDict, kOrderedDict, kDefaultDict, kDeque, kNamedTuple, kStruct };

  // Throws InvalidFileError for text that is no specification, UnsupportedError for a newer protocol.
  static Tree parse(const char* text);

  Kind kind() const noexcept { return kind_; }
  bool is_leaf() const noexcept { return kind_ == Kind::kLeaf; }
  std::size_t num_leaves() const noexcept { return num_leaves_; }
  const std::vector<Tree>& children() const noexcept { return children_; }
  // Of the children; empty for nodes that have none, or that have no keys.
  const std::vector<nanobind::object>& keys() const noexcept { return keys_; }
  bool has_key(PyObject* key) const;

  // The leaves of `value` in the tree's order. Throws InvalidArgumentError where it has another form; the message
  // begins with `root` and the place below it.
  void flatten(PyObject* value, const std::string& root, References& leaves) const;
  // The same for the children of the root, whose number was checked.
  void flatten_children(std::span<PyObject* const> values, const std::string& root, References& leaves) const;
  // Takes num_leaves() objects from `next`. Classes that are not known here become a Struct or a tuple.
  nanobind::object unflatten(PyObject* const*& next) const;
  // The place of a leaf: root['a'][0].
  std::string path_of(std::size_t leaf, std::string root) const;

 private:
  struct Place;  // a node's way from the root, put into words only for an error
  static Tree parse_node(nanobind::handle node, int depth);
  void flatten_at(PyObject* value, const Place& place, References& leaves) const;
  bool is_mapping() const noexcept;  // its children have keys, by which a value gives them
  void mapping_children(PyObject* value, const Place& place, References& found) const;
  void sequence_children(PyObject* value, const Place& place, References& found) const;
  bool exact_dict_children(PyObject* value, const Place& place, References& leaves) const;
  std::string label(std::size_t child) const;
  std::string key_names() const;
  const char* kind_name() const noexcept;

  Kind kind_ = Kind::kLeaf;
  std::size_t num_leaves_ = 1;
  std::vector<nanobind::object> keys_;
  std::vector<nanobind::object> none_keys_;  // fields of a dataclass that are None: no children
  std::vector<Tree> children_;
  nanobind::object class_;  // what unflatten makes, where it is no builtin
};

}  // namespace untorch::python
