// A strict reader of JSON text (RFC 8259) for manifests and metadata. Depth and number of values have limits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace untorch::json {

// Where a value is, for messages: "model.pt2: extra/untorch.json method 'forward' constant 3 shape". A chain of pieces
// on the stack, put together only when something is wrong: names in a file may be long, and values many.
class Place {
 public:
  explicit Place(std::string_view document) : text_(document) {}

  Place member(std::string_view name) const { return {this, kMember, name, 0}; }  // " name"
  Place item(std::size_t index) const { return {this, kItem, {}, index}; }        // "[index]"
  Place named(std::string_view kind, std::string_view name) const {               // " kind 'name'"
    Place place(this, kNamed, kind, 0);
    place.name_ = name;
    return place;
  }
  Place numbered(std::string_view kind, std::size_t index) const {
    return {this, kNumbered, kind, index};
  }  // " kind 3"

  std::string text() const;
  // Throws kInvalidFile: the place, then `what`.
  [[noreturn]] void fail(std::string_view what) const;

 private:
  enum Kind { kRoot, kMember, kItem, kNamed, kNumbered };
  Place(const Place* up, Kind kind, std::string_view text, std::size_t index)
      : up_(up), kind_(kind), text_(text), index_(index) {}

  const Place* up_ = nullptr;
  Kind kind_ = kRoot;
  std::string_view text_, name_;
  std::size_t index_ = 0;
};

class Value;
using Array = std::vector<Value>;
using Object = std::vector<std::pair<std::string, Value>>;  // sorted by name

class Value {
 public:
  using Data = std::variant<std::nullptr_t, bool, std::int64_t, double, std::string, Array, Object>;
  Value() : data_(nullptr) {}
  explicit Value(Data data) : data_(std::move(data)) {}

  bool is_null() const noexcept { return std::holds_alternative<std::nullptr_t>(data_); }
  bool is_int() const noexcept { return std::holds_alternative<std::int64_t>(data_); }
  bool is_string() const noexcept { return std::holds_alternative<std::string>(data_); }
  bool is_array() const noexcept { return std::holds_alternative<Array>(data_); }
  bool is_object() const noexcept { return std::holds_alternative<Object>(data_); }

  // Each throws kInvalidFile with the place when the value has another type.
  bool as_bool(const Place& place) const;
  std::int64_t as_int(const Place& place) const;
  double as_double(const Place& place) const;  // integers are none
  const std::string& as_string(const Place& place) const;
  const Array& as_array(const Place& place) const;
  const Object& as_object(const Place& place) const;

  // Member of an object; null when there is none. `place` is the object's, for when this is none.
  const Value* find(std::string_view key, const Place& place) const;
  // The same, but a missing member is an error.
  const Value& at(std::string_view key, const Place& place) const;
  // Likewise; null when there is none, or when it is null.
  const Value* find_set(std::string_view key, const Place& place) const;

  friend bool operator==(const Value& a, const Value& b) { return a.data_ == b.data_; }

 private:
  Data data_;
};

// Documents that untorch did not write may have NaN, Infinity and -Infinity, as Python's json module writes them.
enum class Dialect { kStrict, kNonFiniteNumbers };

// Throws kInvalidFile with the byte offset of the first error. At most 100,000 values, and one more for each 16 bytes
// of text: what a manifest has is longer, so a small file cannot make a large tree.
Value parse(std::string_view text, std::string_view name, Dialect dialect = Dialect::kStrict);

// The text as a JSON string with its quotes; `text` is UTF-8.
std::string quote(std::string_view text);

}  // namespace untorch::json
