// The directory of a zip archive (APPNOTE 6.3.10), read strictly: no two readers may see different files in it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "model/mapped_file.h"

namespace untorch {

struct ZipEntry {
  std::string_view name;               // in the mapped file
  std::uint64_t offset = 0, size = 0;  // of the stored bytes
  std::uint32_t crc = 0;
};

// All entries in the file's order. Throws kInvalidFile unless
// - the end record is the last 22 bytes of the file (no comment), the zip64 locator and record, if any, are right
// before
//   it, and the directory ends where they begin and says the same as they do;
// - the entries lie one after the other, in the directory's order, from the first byte of the file to the directory;
// - each local header says what the directory says, in every field, and extra fields are padding or zip64's;
// - every entry is stored: neither compressed nor encrypted.
// PyTorch's packages have zero sizes in local headers, and data descriptors behind the bytes: those must agree, too.
std::vector<ZipEntry> read_zip_directory(const MappedFile& file);

}  // namespace untorch
