// Inputs are compared as the manifest's JSON, constants by shape, strides and whether they are changed.
#include "model/interface_table.h"

#include <algorithm>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace untorch {
namespace {

constexpr std::string_view kSymbol = "untorch_interface";

std::vector<std::int64_t> integers(const json::Value& value, const json::Place& place) {
  std::vector<std::int64_t> found;
  for (const json::Value& item : value.as_array(place)) found.push_back(item.as_int(place));
  return found;
}

}  // namespace

std::optional<json::Value> read_interface_table(const ElfImage& elf) {
  const std::optional<Elf64_Sym> symbol = elf.find_defined(kSymbol);
  if (!symbol) return std::nullopt;
  const std::string what = elf.name() + " " + std::string(kSymbol);
  elf.require(symbol->st_size != 0, "its interface table is empty");
  const std::uint64_t offset = elf.offset_of(symbol->st_value, symbol->st_size, "its interface table");
  const std::string_view text(reinterpret_cast<const char*>(elf.bytes().data()) + offset, symbol->st_size - 1);
  return json::parse(text, what);
}

void check_interface(const json::Value& table, const MethodSpec& method, const std::string& what) {
  const json::Place place(what);
  if (table.at("inputs", place) != method.inputs_json) {
    throw_error(ErrorKind::kInvalidFile, what, " was compiled for other inputs than the manifest says");
  }
  std::unordered_map<std::string_view, const ConstantSpec*> constants;
  for (const ConstantSpec& constant : method.constants) constants.emplace(constant.name, &constant);
  for (const json::Value& item : table.at("constants", place).as_array(place)) {
    const std::string& name = item.at("name", place).as_string(place);
    const auto it = constants.find(name);
    if (it == constants.end()) {
      throw_error(ErrorKind::kInvalidFile, what, " needs the weight '", name, "', which the manifest does not have");
    }
    const ConstantSpec& constant = *it->second;
    const std::vector<std::int64_t> shape = integers(item.at("shape", place), place),
                                    strides = integers(item.at("strides", place), place);
    const bool empty = std::ranges::count(shape, 0) != 0;
    if (shape != constant.shape || (!empty && strides != constant.strides)) {
      throw_error(ErrorKind::kInvalidFile, what, " was compiled for the weight '", name, "' with shape ",
                  to_string(shape), " and strides ", to_string(strides), ", the manifest has ",
                  to_string(constant.shape), " and ", to_string(constant.strides));
    }
    if (item.at("mutated", place).as_bool(place) && !constant.mutated) {
      throw_error(ErrorKind::kInvalidFile, what, " changes '", name, "', which the manifest denies");
    }
  }
}

}  // namespace untorch
