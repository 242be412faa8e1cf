// A .safetensors file: every tensor that is found lies in the file, behind the header, and no byte belongs to two.
#include "model/safetensors.h"

#include <cstddef>
#include <cstdint>
#include <span>

#include "archive_bytes.h"
#include "base/error.h"
#include "input_limits.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace untorch;
  const fuzz::Limits limits;
  try {
    const Safetensors file(fuzz::file_of({reinterpret_cast<const std::byte*>(data), size}));
    std::size_t total = 0;
    for (const auto& [name, tensor] : file.tensors()) {
      if (tensor.offset < 8 || tensor.offset > size || tensor.nbytes > size - tensor.offset) {
        fuzz::finding("a tensor lies outside of the file");
      }
      if (safetensors_nbytes(tensor.dtype, tensor.shape) != tensor.nbytes) fuzz::finding("a tensor has another length");
      (void)file.bytes(tensor);
      total += tensor.nbytes;
    }
    if (total > size) fuzz::finding("two tensors overlap");
  } catch (const Error&) {
  }
  return 0;
}
