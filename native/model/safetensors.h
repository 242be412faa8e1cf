// A .safetensors file, read: a JSON header, then the tensors. The one reader of it; nothing in it is trusted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/mapped_file.h"

namespace untorch {

struct SafetensorsTensor {
  std::string dtype;  // as the format names it: "F32", "BF16", "U8" …
  std::vector<std::int64_t> shape;
  std::uint64_t offset = 0, nbytes = 0;  // of its bytes, in the file
};

class Safetensors {
 public:
  // Reads the whole header. The tensors lie one after the other, from the header's end to the file's: no gap, no
  // overlap. Each is as long as its dtype and shape say. Throws kInvalidFile, naming file and tensor; kUnsupported for
  // a dtype that it does not know.
  explicit Safetensors(std::shared_ptr<const MappedFile> file);

  const std::shared_ptr<const MappedFile>& file() const noexcept { return file_; }
  const std::map<std::string, SafetensorsTensor, std::less<>>& tensors() const noexcept { return tensors_; }
  // Null when there is none.
  const SafetensorsTensor* find(std::string_view name) const noexcept;
  // In place, not compared with anything.
  std::span<const std::byte> bytes(const SafetensorsTensor& tensor) const {
    return file_->bytes().subspan(tensor.offset, tensor.nbytes);
  }

 private:
  std::shared_ptr<const MappedFile> file_;
  std::map<std::string, SafetensorsTensor, std::less<>> tensors_;
};

// The bytes of a tensor. Nothing for an unknown dtype, a negative size, a part of a byte, or where it overflows.
std::optional<std::uint64_t> safetensors_nbytes(std::string_view dtype, std::span<const std::int64_t> shape);
bool is_safetensors_dtype(std::string_view dtype) noexcept;

}  // namespace untorch
