// Weights that lie in .safetensors files beside the package: found, mapped, and compared with the manifest.
#pragma once

#include <string>

#include "model/archive.h"
#include "model/manifest.h"

namespace untorch {

// Maps the files that the manifest names and finds its weights in them by name, wherever they lie there. `where` is a
// file, or the folder of several; empty: the package's folder, then UNTORCH_WEIGHTS. With `copy` the files are read
// into memory. dtype, shape and the first and last bytes of each tensor have to be those of export. Throws
// kInvalidFile, with the errno where a file cannot be opened.
void open_external_weights(const Archive& archive, Manifest& manifest, const std::string& where, bool copy);
// Compares all bytes of all of them with their SHA-256, on several threads. `trusted`: a trust policy accepted the
// manifest, and other bytes are kUntrusted; else kInvalidFile.
void verify_external_weights(const Archive& archive, const Manifest& manifest, bool trusted);

// SHA-256 of the first and the last 4 KiB; of all of it if that is less. Cheap, and training changes both.
Sha256Digest sample_digest(std::span<const std::byte> bytes) noexcept;

// A weight's bytes in place, and the file that they lie in; the file's check_whole() says afterwards whether they were
// there.
struct WeightBytes {
  std::shared_ptr<const MappedFile> file;
  std::span<const std::byte> bytes;
  std::size_t offset() const noexcept { return static_cast<std::size_t>(bytes.data() - file->bytes().data()); }
};
WeightBytes weight_bytes(const Archive& archive, const WeightSpec& weight);

}  // namespace untorch
