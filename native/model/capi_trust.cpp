// capi.h: what trust policies need of an archive.
#include <algorithm>
#include <cstring>
#include <vector>

#include "base/sha256.h"
#include "model/capi.h"
#include "model/capi_handles.h"

using namespace untorch::capi;

namespace {

constexpr std::uint64_t kChunk = 1 << 20;

void write_hex(untorch::Sha256 hash, char* out) {
  const std::string text = untorch::to_hex(hash.finish());
  std::memcpy(out, text.data(), text.size());
}

}  // namespace

extern "C" {

untorch_status untorch_archive_file_digests(const untorch_archive* archive, char* file, char* entries) {
  return guarded([&] {
    const untorch::Archive& read = *archive->archive;
    const auto bytes = read.file()->bytes();
    std::vector<std::pair<std::size_t, const untorch::ArchiveEntry*>> order;
    for (const auto& [name, entry] : read.entries()) order.emplace_back(order.size(), &entry);
    std::ranges::sort(order, {}, [](const auto& item) { return std::pair(item.second->offset, item.second->size); });
    untorch::Sha256 whole;
    std::vector<std::byte> chunk(kChunk);
    const auto add = [&](std::uint64_t start, std::uint64_t end, untorch::Sha256* part) {
      for (std::uint64_t at = start; at < end; at += kChunk) {
        const auto length = static_cast<std::size_t>(std::min(kChunk, end - at));
        std::memcpy(chunk.data(), bytes.data() + at, length);  // both digests are of this copy
        whole.update({chunk.data(), length});
        if (part != nullptr) part->update({chunk.data(), length});
      }
    };
    std::uint64_t at = 0;
    for (const auto& [index, entry] : order) {
      untorch::Sha256 part;
      add(at, entry->offset, nullptr);
      add(entry->offset, at = entry->offset + entry->size, &part);
      write_hex(part, entries + 64 * index);
    }
    add(at, bytes.size(), nullptr);
    write_hex(whole, file);
    read.file()->check_whole();
  });
}

const char* untorch_archive_identity(const untorch_archive* archive) {
  return archive->archive->file()->identity().c_str();
}

}  // extern "C"
