// Generated C++ is text of a fixed form: every fact stands in a line of its own.
#include "model/stock_inputs.h"

#include <algorithm>
#include <charconv>
#include <map>

#include "model/dim_expression.h"

namespace untorch {
namespace {

constexpr std::size_t kMostInputs = 4096, kMostDims = 64, kMostTokens = 256, kMostSymbols = 4096;
constexpr std::size_t kMostStatement = 4096;  // characters: a file of another form must not take long

bool is_word(char c) noexcept {
  return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

std::string_view trimmed(std::string_view text) noexcept {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\n')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\n')) text.remove_suffix(1);
  return text;
}

std::optional<std::int64_t> number(std::string_view text) noexcept {
  text = trimmed(text);
  if (text.ends_with('L')) text.remove_suffix(1);
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return {};
  return value;
}

std::optional<DType> dtype_named(std::string_view name) {
  for (int code = 0; code < 64; ++code) {
    const auto dtype = static_cast<DType>(code);
    if (is_known(dtype) && dtype_name(dtype) == name) return dtype;
  }
  return {};
}

// The text between the first `before` and the `after` behind it; empty when one is missing.
std::string_view between(std::string_view text, std::string_view before, std::string_view after) noexcept {
  const std::size_t begin = text.find(before);
  if (begin == std::string_view::npos) return {};
  const std::size_t end = text.find(after, begin + before.size());
  if (end == std::string_view::npos) return {};
  return text.substr(begin + before.size(), end - begin - before.size());
}

// One line of a check: "if (3 != arg0_1_size[1]) {" or "if (arg0_1_size[0] < 2) {".
struct Condition {
  enum { kOther, kSize, kStride } what = kOther;
  std::size_t dim = 0;
  std::optional<std::int64_t> value;  // where it must be equal
};

Condition read_condition(std::string_view text, std::string_view name) {
  Condition found;
  const std::string size = std::string(name) + "_size[", stride = std::string(name) + "_stride[";
  std::size_t at = text.find(size);
  if (at != std::string_view::npos) {
    found.what = Condition::kSize;
    at += size.size();
  } else if (at = text.find(stride); at != std::string_view::npos) {
    found.what = Condition::kStride;
    at += stride.size();
  } else {
    return found;
  }
  const std::size_t end = text.find(']', at);
  const auto dim = end == std::string_view::npos ? std::nullopt : number(text.substr(at, end - at));
  if (!dim || *dim < 0 || *dim >= static_cast<std::int64_t>(kMostDims)) return {};
  found.dim = static_cast<std::size_t>(*dim);
  if (const std::size_t unequal = text.find("!="); unequal != std::string_view::npos) {
    found.value = number(text.substr(0, unequal));
    if (!found.value) return {};
  }
  return found;
}

struct Input {
  std::string_view name;
  TensorSpec spec;
  std::vector<std::optional<std::int64_t>> strides;
};

// The function check_input_<i>; nothing when a line that it must have is missing.
std::optional<Input> read_check(std::string_view body, std::size_t i) {
  Input input;
  const std::string handle = "= ConstantHandle(input_handles[" + std::to_string(i) + "]);";
  input.name = trimmed(between(body, "ConstantHandle ", handle));
  const auto dtype = dtype_named(between(body, "_expected_dtype = aoti_torch_dtype_", "()"));
  if (input.name.empty() || !std::all_of(input.name.begin(), input.name.end(), is_word) || !dtype) return {};
  input.spec.name = std::to_string(i);
  input.spec.dtype = *dtype;
  input.spec.on_cpu = trimmed(between(body, "_expected_device_type = ", ";")) == "0";
  constexpr std::string_view kIf = "if (";
  for (std::size_t at = body.find(kIf); at != std::string_view::npos; at = body.find(kIf, at + 1)) {
    const std::string_view statement = body.substr(at + kIf.size(), kMostStatement);
    const std::size_t end = statement.find(") {");
    if (end == std::string_view::npos) return {};
    const Condition condition = read_condition(statement.substr(0, end), input.name);
    at += end;
    if (condition.what == Condition::kOther) continue;
    const std::size_t rank = std::max(input.spec.shape.size(), condition.dim + 1);
    input.spec.shape.resize(rank);
    input.strides.resize(rank);
    if (!condition.value) continue;  // of a range, which is not what the library needs
    if (condition.what == Condition::kStride) {
      input.strides[condition.dim] = condition.value;
    } else {
      input.spec.shape[condition.dim].kind = DimSpec::kFixed;
      input.spec.shape[condition.dim].value = *condition.value;
    }
  }
  return input;
}

// Sizes and strides as sums and products of numbers and symbols.
class Expression {
 public:
  Expression(std::string_view text, const std::map<std::string, std::size_t, std::less<>>& symbols)
      : text_(text), symbols_(symbols) {}

  // Nothing for an expression of another kind.
  std::optional<std::vector<DimSpec::Token>> read() {
    if (!sum() || at_ != text_.size() || tokens_.size() > kMostTokens) return {};
    return tokens_;
  }

 private:
  using Token = DimSpec::Token;
  char peek() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool take(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }
  bool sum() {
    if (!product()) return false;
    while (true) {
      const bool minus = peek() == '-';
      if (!minus && peek() != '+') return true;
      ++at_;
      if (!product()) return false;
      tokens_.push_back({minus ? Token::kSub : Token::kAdd, 0});
    }
  }
  bool product() {
    if (!factor()) return false;
    while (take('*')) {
      if (!factor()) return false;
      tokens_.push_back({Token::kMul, 0});
    }
    return true;
  }
  bool factor() {
    if (++depth_ > 32 || tokens_.size() > kMostTokens) return false;
    const bool done = atom();
    --depth_;
    return done;
  }
  bool atom() {
    if (take('(')) return sum() && take(')');
    if (take('-')) {
      tokens_.push_back({Token::kNumber, 0});
      if (!factor()) return false;
      tokens_.push_back({Token::kSub, 0});
      return true;
    }
    (void)peek();
    const std::size_t begin = at_;
    while (at_ < text_.size() && is_word(text_[at_])) ++at_;
    const std::string_view word = text_.substr(begin, at_ - begin);
    if (const auto value = number(word)) {
      tokens_.push_back({Token::kNumber, *value});
      return true;
    }
    const auto symbol = symbols_.find(word);
    if (symbol == symbols_.end()) return false;
    tokens_.push_back({Token::kSymbolValue, static_cast<std::int64_t>(symbol->second)});
    return true;
  }

  std::string_view text_;
  const std::map<std::string, std::size_t, std::less<>>& symbols_;
  std::size_t at_ = 0;
  int depth_ = 0;
  std::vector<Token> tokens_;
};

std::vector<std::string_view> elements(std::string_view list) {
  std::vector<std::string_view> found;
  while (!trimmed(list).empty() && found.size() <= kMostDims) {
    const std::size_t comma = std::min(list.find(','), list.size());
    found.push_back(trimmed(list.substr(0, comma)));
    list.remove_prefix(std::min(comma + 1, list.size()));
  }
  return found;
}

class Reader {
 public:
  explicit Reader(std::string_view source) : source_(source) {}

  std::optional<StockInputs> read() {
    if (!read_checks()) return {};
    read_symbols();
    read_asserts();
    StockInputs result;
    result.symbols = std::move(names_);
    for (Input& input : inputs_) {
      finish_strides(input);
      result.inputs.push_back(std::move(input.spec));
    }
    return result;
  }

 private:
  bool read_checks() {
    std::size_t from = 0;
    while (inputs_.size() < kMostInputs) {
      const std::size_t i = inputs_.size();
      const std::size_t begin = source_.find("void check_input_" + std::to_string(i) + "(", from);
      if (begin == std::string_view::npos) break;
      const std::size_t end = source_.find("\n}", begin);
      if (end == std::string_view::npos) return false;
      auto input = read_check(source_.substr(begin, end - begin), i);
      if (!input) return false;
      by_name_.emplace(input->name, i);
      inputs_.push_back(std::move(*input));
      from = end;
    }
    return !inputs_.empty() && by_name_.size() == inputs_.size();
  }

  // "int64_t s58 = arg3_1_size[0];", and "int64_t s77 = s58;" for a size that is the same.
  void read_symbols() {
    const std::string_view begin = between(source_, "::run_impl(", "inputs.clear();");
    constexpr std::string_view kType = "int64_t ";
    for (std::size_t at = begin.find(kType); at != std::string_view::npos; at = begin.find(kType, at + 1)) {
      if (symbols_.size() >= kMostSymbols) return;
      std::string_view line = begin.substr(at + kType.size(), kMostStatement);
      line = line.substr(0, line.find(';'));
      const std::size_t equals = line.find(" = ");
      at += line.size();
      if (equals == std::string_view::npos) continue;
      const std::string name(line.substr(0, equals));
      const std::string_view value = trimmed(line.substr(equals + 3));
      if (const auto known = symbols_.find(value); known != symbols_.end()) {
        symbols_.emplace(name, known->second);
        continue;
      }
      const std::size_t size = value.rfind("_size[");
      if (size == std::string_view::npos || !value.ends_with(']')) continue;
      const auto input = by_name_.find(value.substr(0, size));
      const auto dim = number(value.substr(size + 6, value.size() - size - 7));
      if (input == by_name_.end() || !dim) continue;
      std::vector<DimSpec>& shape = inputs_[input->second].spec.shape;
      if (*dim < 0 || static_cast<std::size_t>(*dim) >= shape.size()) continue;
      set_symbol(shape[static_cast<std::size_t>(*dim)], name);
    }
  }

  void set_symbol(DimSpec& dim, const std::string& name) {
    if (dim.kind != DimSpec::kAny) return;
    dim.kind = DimSpec::kSymbol;
    dim.symbol = symbols_.emplace(name, names_.size()).first->second;
    if (dim.symbol == names_.size()) names_.push_back(name);
    dim.text = name;
  }

  // assert_size_stride(arg3_1, {s58, 3L}, {3L, 1L}, "input")
  void read_asserts() {
    constexpr std::string_view kCall = "assert_size_stride(", kEnd = ", \"input\")";
    for (std::size_t i = 0; i < names_.size(); ++i) {
      const auto offset = 2 * static_cast<std::int64_t>(i * i + i);
      examples_[0].push_back(101 + offset);
      examples_[1].push_back(1009 + offset);
    }
    for (std::size_t at = source_.find(kCall); at != std::string_view::npos; at = source_.find(kCall, at + 1)) {
      std::string_view call = source_.substr(at + kCall.size(), kMostStatement);
      call = call.substr(0, call.find(';'));
      at += call.size();
      const std::size_t end = call.find(kEnd);
      if (end == std::string_view::npos) continue;
      call = call.substr(0, end);
      const auto input = by_name_.find(call.substr(0, call.find(',')));
      if (input == by_name_.end()) continue;
      const std::string_view lists = call.substr(input->first.size());
      const auto sizes = elements(between(lists, "{", "}"));
      const auto strides = elements(between(lists.substr(std::min(lists.find('}'), lists.size())), "{", "}"));
      apply(inputs_[input->second], sizes, strides);
      by_name_.erase(input);  // once
    }
  }

  void apply(Input& input, const std::vector<std::string_view>& sizes, const std::vector<std::string_view>& strides) {
    std::vector<DimSpec>& shape = input.spec.shape;
    if (sizes.size() < shape.size() || sizes.size() != strides.size() || sizes.size() > kMostDims) return;
    shape.resize(sizes.size());
    input.strides.resize(sizes.size());
    std::vector<std::vector<DimSpec::Token>> size_tokens, stride_tokens;
    for (std::size_t d = 0; d < sizes.size(); ++d) {
      const auto size = Expression(sizes[d], symbols_).read(), stride = Expression(strides[d], symbols_).read();
      if (!size || !stride) return;
      if (shape[d].kind == DimSpec::kAny) set_expression(shape[d], sizes[d], *size);
      size_tokens.push_back(*size);
      stride_tokens.push_back(*stride);
    }
    input.spec.contiguous = are_contiguous(size_tokens, stride_tokens);
  }

  static void set_expression(DimSpec& dim, std::string_view text, const std::vector<DimSpec::Token>& tokens) {
    dim.text = text;
    if (tokens.size() == 1 && tokens[0].op == DimSpec::Token::kSymbolValue) {
      dim.kind = DimSpec::kSymbol;
      dim.symbol = static_cast<std::size_t>(tokens[0].number);
      return;
    }
    dim.kind = DimSpec::kExpression;
    dim.tokens = tokens;
  }

  // Whether the strides are row-major for any sizes, as far as two examples tell.
  bool are_contiguous(const std::vector<std::vector<DimSpec::Token>>& sizes,
                      const std::vector<std::vector<DimSpec::Token>>& strides) const {
    for (const std::vector<std::int64_t>& symbols : examples_) {
      std::int64_t running = 1;
      for (std::size_t d = sizes.size(); d-- > 0;) {
        std::int64_t size = 0, stride = 0;
        if (!evaluate(sizes[d], symbols, size) || !evaluate(strides[d], symbols, stride)) return false;
        if (size != 1 && stride != running) return false;
        if (__builtin_mul_overflow(running, size, &running)) return false;
      }
    }
    return true;
  }

  static void finish_strides(Input& input) {
    if (input.spec.contiguous) return;
    auto& strides = input.spec.strides.emplace();
    for (const auto& stride : input.strides) strides.push_back(stride.value_or(TensorSpec::kAnyStride));
  }

  std::string_view source_;
  std::vector<Input> inputs_;
  std::map<std::string_view, std::size_t> by_name_;
  std::map<std::string, std::size_t, std::less<>> symbols_;
  std::vector<std::string> names_;         // of the symbols
  std::vector<std::int64_t> examples_[2];  // values of the symbols
};

}  // namespace

std::optional<StockInputs> read_stock_inputs(std::string_view source) { return Reader(source).read(); }

}  // namespace untorch
