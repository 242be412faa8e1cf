// The header: 8 bytes of length, then {"name": {"dtype", "shape", "data_offsets"}, …, "__metadata__": {…}}.
#include "model/safetensors.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "model/json.h"

namespace untorch {
namespace {

constexpr std::uint64_t kMaxHeader = 100'000'000;  // the format's own limit
constexpr std::size_t kMaxRank = 64, kMaxName = 4096;
constexpr const char* kMetadata = "__metadata__";

struct Type {
  std::string_view name;
  std::uint64_t bits;
};
constexpr Type kTypes[] = {{"BOOL", 8},    {"U8", 8},   {"I8", 8},      {"F8_E4M3", 8}, {"F8_E5M2", 8},
                           {"F8_E8M0", 8}, {"F4", 4},   {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"I16", 16},
                           {"U16", 16},    {"F16", 16}, {"BF16", 16},   {"I32", 32},    {"U32", 32},
                           {"F32", 32},    {"I64", 64}, {"U64", 64},    {"F64", 64},    {"C64", 64}};

std::uint64_t bits_of(std::string_view dtype) noexcept {
  const auto* const it = std::ranges::find(kTypes, dtype, &Type::name);
  return it == std::end(kTypes) ? 0 : it->bits;
}

std::uint64_t natural(const json::Value& value, const json::Place& place) {
  const std::int64_t n = value.as_int(place);
  if (n < 0) place.fail(" is negative: " + std::to_string(n));
  return static_cast<std::uint64_t>(n);
}

SafetensorsTensor read_tensor(const json::Value& value, const json::Place& what, std::uint64_t begin,
                              std::uint64_t length) {
  SafetensorsTensor tensor;
  tensor.dtype = value.at("dtype", what).as_string(what.member("dtype"));
  const json::Place shape = what.member("shape"), offsets = what.member("data_offsets");
  const json::Array& sizes = value.at("shape", what).as_array(shape);
  if (sizes.size() > kMaxRank) shape.fail(" has " + std::to_string(sizes.size()) + " dimensions");
  for (const json::Value& size : sizes) tensor.shape.push_back(static_cast<std::int64_t>(natural(size, shape)));
  const json::Array& ends = value.at("data_offsets", what).as_array(offsets);
  if (ends.size() != 2) offsets.fail(" has " + std::to_string(ends.size()) + " numbers, expected 2");
  const std::uint64_t from = natural(ends[0], offsets), to = natural(ends[1], offsets);
  if (from > to || to > length) {
    offsets.fail(" [" + std::to_string(from) + ", " + std::to_string(to) + "] do not lie in the " +
                 std::to_string(length) + " bytes behind the header");
  }
  if (!is_safetensors_dtype(tensor.dtype)) {
    throw_error(ErrorKind::kUnsupported, what.text(), " has the dtype \"", tensor.dtype.substr(0, 64),
                "\", which this untorch does not know: upgrade untorch");
  }
  const std::optional<std::uint64_t> expected = safetensors_nbytes(tensor.dtype, tensor.shape);
  if (!expected || *expected != to - from) {
    what.fail(" has " + std::to_string(to - from) + " bytes, its dtype and shape say " +
              (expected ? std::to_string(*expected) : "what cannot be"));
  }
  tensor.offset = begin + from;
  tensor.nbytes = to - from;
  return tensor;
}

}  // namespace

bool is_safetensors_dtype(std::string_view dtype) noexcept { return bits_of(dtype) != 0; }

std::optional<std::uint64_t> safetensors_nbytes(std::string_view dtype, std::span<const std::int64_t> shape) {
  std::uint64_t bits = bits_of(dtype);
  if (bits == 0) return std::nullopt;
  for (const std::int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(bits, static_cast<std::uint64_t>(size), &bits)) return std::nullopt;
  }
  if (bits % 8 != 0) return std::nullopt;
  return bits / 8;
}

Safetensors::Safetensors(std::shared_ptr<const MappedFile> file) : file_(std::move(file)) {
  const std::span<const std::byte> bytes = file_->bytes();
  const std::string& path = file_->path();
  std::uint64_t length = 0;
  if (bytes.size() < sizeof length) {
    throw_error(ErrorKind::kInvalidFile, path, " is no .safetensors file: it has ", bytes.size(), " bytes");
  }
  std::memcpy(&length, bytes.data(), sizeof length);
  if (length > kMaxHeader || length > bytes.size() - sizeof length) {
    throw_error(ErrorKind::kInvalidFile, path, " is no .safetensors file: its first 8 bytes say that the header has ",
                length, " bytes; the file has ", bytes.size(), ", and a header at most ", kMaxHeader);
  }
  // A copy, which nobody changes while it is parsed.
  const std::string header(reinterpret_cast<const char*>(bytes.data()) + sizeof length, length);
  file_->check_whole();
  const std::string document = path + ": header";
  const json::Value root = json::parse(header, document);
  const json::Place what(document);
  const std::uint64_t begin = sizeof length + length, data = bytes.size() - begin;
  std::vector<std::pair<std::pair<std::uint64_t, std::uint64_t>, const std::string*>> order;
  for (const auto& [name, value] : root.as_object(what)) {
    if (name == kMetadata) continue;
    if (name.size() > kMaxName) what.fail(" has a tensor with a name of " + std::to_string(name.size()) + " bytes");
    const auto added = tensors_.emplace(name, read_tensor(value, what.named("tensor", name), begin, data)).first;
    order.push_back({{added->second.offset, added->second.nbytes}, &added->first});
  }
  std::ranges::sort(order, {}, [](const auto& item) { return item.first; });
  std::uint64_t at = begin;
  for (const auto& [place, name] : order) {
    if (place.first != at) {
      what.named("tensor", *name)
          .fail(place.first < at ? " overlaps the tensor before it"
                                 : " leaves a gap of " + std::to_string(place.first - at) + " bytes before it");
    }
    at += place.second;
  }
  if (at != bytes.size()) {
    what.fail(" describes " + std::to_string(at - begin) + " bytes of tensors, the file has " + std::to_string(data));
  }
}

const SafetensorsTensor* Safetensors::find(std::string_view name) const noexcept {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

}  // namespace untorch
