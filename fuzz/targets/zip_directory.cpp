// The zip directory, and all that is read of a package before a library is opened: a whole file.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "archive_bytes.h"
#include "base/error.h"
#include "input_limits.h"
#include "model/manifest.h"

namespace {

using namespace untorch;

// Every entry lies in the file, and no byte belongs to two.
void check_entries(const Archive& archive) {
  const std::span<const std::byte> file = archive.file()->bytes();
  std::vector<std::pair<const std::byte*, const std::byte*>> extents;
  for (const auto& [name, entry] : archive.entries()) {
    const std::span<const std::byte> bytes = archive.read(name);
    if (bytes.data() < file.data() || bytes.data() + bytes.size() > file.data() + file.size()) {
      fuzz::finding("an entry lies outside of the file");
    }
    if (!bytes.empty()) extents.emplace_back(bytes.data(), bytes.data() + bytes.size());
  }
  std::sort(extents.begin(), extents.end());
  for (std::size_t i = 1; i < extents.size(); ++i) {
    if (extents[i].first < extents[i - 1].second) fuzz::finding("two entries overlap");
  }
}

}  // namespace

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

// Three of four mutants get right checksums.
extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t max_size,
                                               unsigned int seed) {
  const std::size_t made = LLVMFuzzerMutate(data, size, max_size);
  if (seed % 4 != 0) fuzz::fix_checksums({reinterpret_cast<std::byte*>(data), made});
  return made;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const fuzz::Limits limits;
  try {
    Archive archive(fuzz::file_of({reinterpret_cast<const std::byte*>(data), size}));
    check_entries(archive);
    for (const auto& [name, entry] : archive.entries()) {
      try {
        (void)archive.text(name);
      } catch (const Error&) {
      }
    }
    (void)read_manifest(archive);
  } catch (const Error&) {
  }
  return 0;
}
