// A stack machine for expressions over symbols.
#include "model/dim_expression.h"

#include <algorithm>
#include <vector>

namespace untorch {
namespace {

std::int64_t floor_div(std::int64_t a, std::int64_t b) {
  if (b == -1) return a == INT64_MIN ? INT64_MAX : -a;  // the one quotient that does not fit
  const std::int64_t q = a / b;
  return (a % b != 0 && (a < 0) != (b < 0)) ? q - 1 : q;
}

}  // namespace

bool evaluate(std::span<const DimSpec::Token> tokens, std::span<const std::int64_t> symbols, std::int64_t& result) {
  std::vector<std::int64_t> stack;
  for (const auto& token : tokens) {
    using Token = DimSpec::Token;
    if (token.op == Token::kNumber) {
      stack.push_back(token.number);
      continue;
    }
    if (token.op == Token::kSymbolValue) {
      const std::int64_t value = symbols[static_cast<std::size_t>(token.number)];
      if (value < 0) return false;  // a symbol that no input binds
      stack.push_back(value);
      continue;
    }
    const std::int64_t b = stack.back();
    stack.pop_back();
    std::int64_t& a = stack.back();
    switch (token.op) {
      case Token::kAdd:
        if (__builtin_add_overflow(a, b, &a)) return false;
        break;
      case Token::kSub:
        if (__builtin_sub_overflow(a, b, &a)) return false;
        break;
      case Token::kMul:
        if (__builtin_mul_overflow(a, b, &a)) return false;
        break;
      case Token::kFloorDiv:
        if (b == 0) return false;
        a = floor_div(a, b);
        break;
      case Token::kMod:
        if (b == 0) return false;
        a = b == -1 ? 0 : a % b;
        if (a != 0 && (a < 0) != (b < 0)) a += b;
        break;
      case Token::kMin:
        a = std::min(a, b);
        break;
      case Token::kMax:
        a = std::max(a, b);
        break;
      default:
        return false;
    }
  }
  result = stack.back();
  return true;
}

}  // namespace untorch
