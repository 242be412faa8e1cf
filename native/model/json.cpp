// Recursive descent over JSON text; every character is looked at before it is used.
#include "model/json.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <limits>

#include "base/error.h"
#include "model/bytes.h"

namespace untorch::json {
namespace {

constexpr int kMaxDepth = 64;
constexpr std::size_t kValues = 100'000, kBytesOfValue = 16;

class Parser {
 public:
  Parser(std::string_view text, std::string_view name, Dialect dialect)
      : text_(text), name_(name), dialect_(dialect), values_left_(kValues + text.size() / kBytesOfValue) {}

  Value document() {
    if (!is_utf8(text_)) fail("not UTF-8");
    Value value = parse_value(0);
    skip_space();
    if (at_ != text_.size()) fail("unexpected text after the value");
    return value;
  }

 private:
  [[noreturn]] void fail(const char* why) const {
    throw_error(ErrorKind::kInvalidFile, name_, " is no valid JSON: ", why, " at byte ", at_);
  }

  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\n' || text_[at_] == '\r'))
      ++at_;
  }

  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  void expect(char c, const char* why) {
    if (peek() != c) fail(why);
    ++at_;
  }

  bool literal(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  Value parse_value(int depth) {
    if (depth > kMaxDepth) fail("nested too deeply");
    if (values_left_-- == 0) fail("too many values for its size");
    skip_space();
    switch (peek()) {
      case '{':
        return Value(parse_object(depth));
      case '[':
        return Value(parse_array(depth));
      case '"':
        return Value(parse_string());
      case 't':
        if (literal("true")) return Value(true);
        break;
      case 'f':
        if (literal("false")) return Value(false);
        break;
      case 'n':
        if (literal("null")) return Value();
        break;
      case 'N':
        if (dialect_ == Dialect::kNonFiniteNumbers && literal("NaN"))
          return Value(std::numeric_limits<double>::quiet_NaN());
        break;
      case 'I':
        if (dialect_ == Dialect::kNonFiniteNumbers && literal("Infinity"))
          return Value(std::numeric_limits<double>::infinity());
        break;
      default:
        if (dialect_ == Dialect::kNonFiniteNumbers && literal("-Infinity"))
          return Value(-std::numeric_limits<double>::infinity());
        if (peek() == '-' || (peek() >= '0' && peek() <= '9')) return parse_number();
    }
    fail("expected a value");
  }

  Object parse_object(int depth) {
    Object object;
    ++at_;
    skip_space();
    if (peek() == '}') {
      ++at_;
      return object;
    }
    while (true) {
      skip_space();
      if (peek() != '"') fail("expected a member name");
      std::string key = parse_string();
      skip_space();
      expect(':', "expected ':'");
      object.emplace_back(std::move(key), parse_value(depth + 1));
      skip_space();
      if (peek() == '}') break;
      expect(',', "expected ',' or '}'");
    }
    std::ranges::sort(object, {}, &Object::value_type::first);
    if (std::ranges::adjacent_find(object, {}, &Object::value_type::first) != object.end()) {
      fail("duplicate member name");
    }
    ++at_;
    return object;
  }

  Array parse_array(int depth) {
    Array array;
    ++at_;
    skip_space();
    if (peek() == ']') return ++at_, array;
    while (true) {
      array.push_back(parse_value(depth + 1));
      skip_space();
      if (peek() == ']') return ++at_, array;
      expect(',', "expected ',' or ']'");
    }
  }

  unsigned parse_hex4() {
    unsigned code = 0;
    if (text_.size() - at_ < 4) fail("cut off \\u escape");
    const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + at_ + 4, code, 16);
    if (error != std::errc{} || end != text_.data() + at_ + 4) fail("bad \\u escape");
    at_ += 4;
    return code;
  }

  static void append_utf8(std::string& out, unsigned code) {
    if (code < 0x80) {
      out += static_cast<char>(code);
    } else if (code < 0x800) {
      out += static_cast<char>(0xc0 | (code >> 6));
      out += static_cast<char>(0x80 | (code & 0x3f));
    } else if (code < 0x10000) {
      out += static_cast<char>(0xe0 | (code >> 12));
      out += static_cast<char>(0x80 | ((code >> 6) & 0x3f));
      out += static_cast<char>(0x80 | (code & 0x3f));
    } else {
      out += static_cast<char>(0xf0 | (code >> 18));
      out += static_cast<char>(0x80 | ((code >> 12) & 0x3f));
      out += static_cast<char>(0x80 | ((code >> 6) & 0x3f));
      out += static_cast<char>(0x80 | (code & 0x3f));
    }
  }

  std::string parse_string() {
    std::string out;
    ++at_;
    while (true) {
      if (at_ >= text_.size()) fail("string without an end");
      const char c = text_[at_++];
      if (c == '"') return out;
      if (static_cast<unsigned char>(c) < 0x20) fail("control character in a string");
      if (c != '\\') {
        out += c;
        continue;
      }
      const char escape = peek();
      ++at_;
      switch (escape) {
        case '"':
          out += '"';
          break;
        case '\\':
          out += '\\';
          break;
        case '/':
          out += '/';
          break;
        case 'b':
          out += '\b';
          break;
        case 'f':
          out += '\f';
          break;
        case 'n':
          out += '\n';
          break;
        case 'r':
          out += '\r';
          break;
        case 't':
          out += '\t';
          break;
        case 'u': {
          unsigned code = parse_hex4();
          if (code >= 0xd800 && code < 0xdc00) {
            if (!literal("\\u")) fail("lone surrogate");
            const unsigned low = parse_hex4();
            if (low < 0xdc00 || low > 0xdfff) fail("lone surrogate");
            code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
          } else if (code >= 0xdc00 && code < 0xe000) {
            fail("lone surrogate");
          }
          if (code == 0) fail("zero character in a string");  // names end up in C strings
          append_utf8(out, code);
          break;
        }
        default:
          fail("unknown escape");
      }
    }
  }

  Value parse_number() {
    const std::size_t start = at_;
    if (peek() == '-') ++at_;
    if (peek() < '0' || peek() > '9') fail("bad number");
    const bool leading_zero = peek() == '0';
    const std::size_t digits = at_;
    while (peek() >= '0' && peek() <= '9') ++at_;
    if (leading_zero && at_ - digits > 1) fail("number with a leading zero");
    bool integer = true;
    if (peek() == '.') {
      integer = false;
      ++at_;
      if (peek() < '0' || peek() > '9') fail("bad number");
      while (peek() >= '0' && peek() <= '9') ++at_;
    }
    if (peek() == 'e' || peek() == 'E') {
      integer = false;
      ++at_;
      if (peek() == '+' || peek() == '-') ++at_;
      if (peek() < '0' || peek() > '9') fail("bad number");
      while (peek() >= '0' && peek() <= '9') ++at_;
    }
    const char* first = text_.data() + start;
    const char* last = text_.data() + at_;
    if (integer) {
      std::int64_t value = 0;
      if (std::from_chars(first, last, value).ec != std::errc{}) fail("integer out of range");
      return Value(value);
    }
    double value = 0;
    if (std::from_chars(first, last, value).ec != std::errc{}) fail("number out of range");
    return Value(value);
  }

  std::string_view text_;
  std::string_view name_;
  Dialect dialect_;
  std::size_t values_left_;
  std::size_t at_ = 0;
};

template <class T>
const T& get(const Value::Data& data, const Place& place, const char* type) {
  if (const T* value = std::get_if<T>(&data)) return *value;
  place.fail(std::string(" is not ") + type);
}

}  // namespace

std::string Place::text() const {
  std::string out = up_ != nullptr ? up_->text() : std::string();
  switch (kind_) {
    case kRoot:
      return std::string(text_);
    case kItem:
      return out + "[" + std::to_string(index_) + "]";
    case kMember:
      return out.append(" ").append(text_);
    case kNamed:
      return out.append(" ").append(text_).append(" '").append(name_).append("'");
    case kNumbered:
      return out.append(" ").append(text_).append(" ").append(std::to_string(index_));
  }
  return out;
}

void Place::fail(std::string_view what) const { throw_error(ErrorKind::kInvalidFile, text(), what); }

bool Value::as_bool(const Place& place) const { return get<bool>(data_, place, "true or false"); }
std::int64_t Value::as_int(const Place& place) const { return get<std::int64_t>(data_, place, "an integer"); }
double Value::as_double(const Place& place) const { return get<double>(data_, place, "a number"); }
const std::string& Value::as_string(const Place& place) const { return get<std::string>(data_, place, "a string"); }
const Array& Value::as_array(const Place& place) const { return get<Array>(data_, place, "a list"); }
const Object& Value::as_object(const Place& place) const { return get<Object>(data_, place, "an object"); }

const Value* Value::find(std::string_view key, const Place& place) const {
  const Object& object = as_object(place);
  const auto it =
      std::ranges::lower_bound(object, key, {}, [](const auto& member) -> std::string_view { return member.first; });
  return it == object.end() || it->first != key ? nullptr : &it->second;
}

const Value& Value::at(std::string_view key, const Place& place) const {
  if (const Value* value = find(key, place)) return *value;
  place.fail(" has no \"" + std::string(key) + "\"");
}

const Value* Value::find_set(std::string_view key, const Place& place) const {
  const Value* value = find(key, place);
  return value == nullptr || value->is_null() ? nullptr : value;
}

Value parse(std::string_view text, std::string_view name, Dialect dialect) {
  return Parser(text, name, dialect).document();
}

std::string quote(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      (void)std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c));
      out += escape;
    } else {
      out += c;
    }
  }
  return out + '"';
}

}  // namespace untorch::json
