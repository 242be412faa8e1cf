// A strict reader of JSON text (RFC 8259) for manifests and metadata. Depth-limited, copies what it keeps.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace untorch::json {

class Value;
using Array = std::vector<Value>;
using Object = std::map<std::string, Value, std::less<>>;

class Value {
 public:
  using Data = std::variant<std::nullptr_t, bool, std::int64_t, double, std::string, Array, Object>;
  Value() : data_(nullptr) {}
  explicit Value(Data data) : data_(std::move(data)) {}

  bool is_null() const noexcept { return std::holds_alternative<std::nullptr_t>(data_); }
  bool is_int() const noexcept { return std::holds_alternative<std::int64_t>(data_); }
  bool is_string() const noexcept { return std::holds_alternative<std::string>(data_); }
  bool is_object() const noexcept { return std::holds_alternative<Object>(data_); }

  // Each throws kInvalidFile naming `what` when the value has another type.
  bool as_bool(std::string_view what) const;
  std::int64_t as_int(std::string_view what) const;
  const std::string& as_string(std::string_view what) const;
  const Array& as_array(std::string_view what) const;
  const Object& as_object(std::string_view what) const;

  // Member of an object; null when there is none. `what` names the object in the error when this is no object.
  const Value* find(std::string_view key, std::string_view what) const;
  // The same, but a missing member is an error.
  const Value& at(std::string_view key, std::string_view what) const;

 private:
  Data data_;
};

// Throws kInvalidFile with the byte offset of the first error.
Value parse(std::string_view text, std::string_view name);

}  // namespace untorch::json
