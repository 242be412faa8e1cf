// Zip archives in memory: what a target makes around its input, and checksums that a mutator puts right.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model/archive.h"

namespace untorch::fuzz {

using Bytes = std::vector<std::byte>;

// An archive of stored entries, as ArchiveWriter would write it but without padding.
Bytes zip(std::span<const std::pair<std::string, std::string_view>> entries);

// Puts the CRC-32 of each entry that the zip directory names, and that lies in the file, into both of its headers:
// behind a checksum that is wrong no reader looks any further.
void fix_checksums(std::span<std::byte> archive) noexcept;

// The bytes, which must outlive it, as a file.
std::shared_ptr<const MappedFile> file_of(std::span<const std::byte> bytes);

}  // namespace untorch::fuzz
