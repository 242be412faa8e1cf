// A file of that name with other tensors is the common mistake: errors say what is expected, what is there, what to do.
#include "model/external_weights.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/error.h"
#include "base/parallel.h"
#include "model/safetensors.h"

namespace untorch {
namespace {

constexpr const char* kEnvironment = "UNTORCH_WEIGHTS";
constexpr std::size_t kSample = 4096;
constexpr const char* kRemedy =
    ": is it another checkpoint? Take the one that the package was exported with, or export again";

std::string shape_text(const std::string& dtype, std::span<const std::int64_t> shape) {
  std::string text = dtype + " [";
  for (const std::int64_t size : shape) text.append(text.back() == '[' ? "" : ", ").append(std::to_string(size));
  return text + "]";
}

bool is_folder(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

std::string folder_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
}

std::string in_folder(const std::string& folder, const std::string& name) {
  return folder + (folder.ends_with('/') ? "" : "/") + name;
}

// Opens the files of one package.
class Opener {
 public:
  Opener(const Archive& archive, const Manifest& manifest, const std::string& where, bool copy)
      : path_(archive.file()->path()), manifest_(manifest), copy_(copy) {
    const char* const environment = std::getenv(kEnvironment);
    if (!where.empty()) {
      places_.push_back({where, is_folder(where)});
      return;
    }
    if (path_ != "<memory>") places_.push_back({folder_of(path_), true});
    if (environment != nullptr && *environment != '\0') places_.push_back({environment, is_folder(environment)});
  }

  std::shared_ptr<const MappedFile> open(std::size_t index) const {
    const std::string& name = manifest_.external_files[index].name;
    std::string tried;
    for (const auto& [place, folder] : places_) {
      if (!folder && manifest_.external_files.size() > 1) {
        throw_error(ErrorKind::kInvalidArgument, path_, " takes weights from ", manifest_.external_files.size(),
                    " files, '", manifest_.external_files[0].name,
                    "' and others: expected the folder that has them, got ", place);
      }
      const std::string file = folder ? in_folder(place, name) : place;
      struct stat info {};
      if (::stat(file.c_str(), &info) != 0 && (errno == ENOENT || errno == ENOTDIR)) {
        tried += (tried.empty() ? "" : ", ") + file;
        continue;
      }
      return MappedFile::open(file, copy_);
    }
    std::size_t tensors = 0, nbytes = 0;
    for (const WeightSpec& weight : manifest_.weights) {
      if (!weight.external || weight.external->file != index) continue;
      ++tensors;
      nbytes += weight.nbytes;
    }
    throw Error(ErrorKind::kInvalidFile,
                detail::concat(path_, " takes ", tensors, " weights (", nbytes, " bytes) from the file '", name,
                               "', which is not there: looked for ", tried.empty() ? "nothing" : tried,
                               ". Put it beside the package, or give its path or folder: "
                               "load(…, weights=…), or UNTORCH_WEIGHTS in the environment"),
                ENOENT);
  }

 private:
  struct Searched {
    std::string path;
    bool folder;
  };
  const std::string& path_;
  const Manifest& manifest_;
  const bool copy_;
  std::vector<Searched> places_;
};

void resolve(const std::string& package, const Safetensors& file, WeightSpec& weight) {
  const ExternalTensor& wanted = *weight.external;
  const std::string& path = file.file()->path();
  const SafetensorsTensor* const found = file.find(wanted.tensor);
  const std::string expected = shape_text(wanted.dtype, wanted.shape);
  if (found == nullptr) {
    const auto& all = file.tensors();
    throw_error(ErrorKind::kInvalidFile, path, " has no tensor '", wanted.tensor, "', expected ", expected, " for ",
                package, "; it has ", all.size(), " tensors",
                all.empty() ? std::string() : ", the first is '" + all.begin()->first + "'", kRemedy);
  }
  if (found->dtype != wanted.dtype || found->shape != wanted.shape) {
    throw_error(ErrorKind::kInvalidFile, path, ": tensor '", wanted.tensor, "' is ",
                shape_text(found->dtype, found->shape), ", ", package, " expects ", expected, kRemedy);
  }
  const Sha256Digest sample = sample_digest(file.bytes(*found));
  file.file()->check_whole();
  if (sample != wanted.sample) {
    throw_error(ErrorKind::kInvalidFile, path, ": tensor '", wanted.tensor, "' has other values than ", package,
                " was exported with: the SHA-256 of its first and last 4 KiB is ", to_hex(sample), ", expected ",
                to_hex(wanted.sample), kRemedy);
  }
  weight.source = file.file();
  weight.offset = found->offset;
}

}  // namespace

Sha256Digest sample_digest(std::span<const std::byte> bytes) noexcept {
  Sha256 hash;
  if (bytes.size() <= 2 * kSample) {
    hash.update(bytes);
  } else {
    hash.update(bytes.first(kSample));
    hash.update(bytes.last(kSample));
  }
  return hash.finish();
}

void open_external_weights(const Archive& archive, Manifest& manifest, const std::string& where, bool copy) {
  if (manifest.external_files.empty()) {
    check(where.empty(), "weights: expected a file that takes weights from .safetensors files, ",
          archive.file()->path(), " has all of its own: leave weights out");
    return;
  }
  const Opener opener(archive, manifest, where, copy);
  std::vector<Safetensors> files;
  for (std::size_t i = 0; i < manifest.external_files.size(); ++i) {
    files.emplace_back(opener.open(i));
    manifest.external_files[i].file = files.back().file();
  }
  for (WeightSpec& weight : manifest.weights) {
    if (weight.external) resolve(archive.file()->path(), files[weight.external->file], weight);
  }
}

void verify_external_weights(const Archive& archive, const Manifest& manifest, bool trusted) {
  struct Piece {
    const WeightSpec* weight;
    std::size_t index;
  };
  std::vector<Piece> pieces;
  for (const WeightSpec& weight : manifest.weights) {
    if (!weight.external) continue;
    for (std::size_t i = 0; i < weight.external->digests.size(); ++i) pieces.push_back({&weight, i});
  }
  for_each_parallel(pieces.size(), 0, [&](std::size_t i) {
    const WeightSpec& weight = *pieces[i].weight;
    const ExternalTensor& wanted = *weight.external;
    const std::span<const std::byte> bytes = weight_bytes(archive, weight).bytes;
    const std::uint64_t start = pieces[i].index * wanted.block_bytes;
    const Sha256Digest found =
        sha256(bytes.subspan(start, std::min<std::uint64_t>(wanted.block_bytes, bytes.size() - start)));
    const Sha256Digest& expected = wanted.digests[pieces[i].index];
    if (found == expected) return;
    weight.source->check_whole();  // says more
    throw_error(trusted ? ErrorKind::kUntrusted : ErrorKind::kInvalidFile, weight.source->path(), ": tensor '",
                wanted.tensor, "' has other values than ", archive.file()->path(), " was exported with: block ",
                pieces[i].index, " has the SHA-256 ", to_hex(found), ", expected ", to_hex(expected), kRemedy);
  });
  for (const ExternalFile& external : manifest.external_files) external.file->check_whole();
}

WeightBytes weight_bytes(const Archive& archive, const WeightSpec& weight) {
  if (!weight.external) return {archive.file(), archive.read(weight.file).first(weight.nbytes)};
  check(weight.source != nullptr, "internal: the file of weight '", weight.external->tensor, "' was not opened");
  return {weight.source, weight.source->bytes().subspan(weight.offset, weight.nbytes)};
}

}  // namespace untorch
