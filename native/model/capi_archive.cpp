// capi.h, the part that reads archives, and SHA-256.
#include <algorithm>
#include <cstring>

#include "base/parallel.h"
#include "base/sha256.h"
#include "model/capi.h"
#include "model/capi_handles.h"
#include "model/external_weights.h"
#include "model/json.h"

using untorch::check;
using namespace untorch::capi;

namespace {

std::string list_of(const std::vector<std::string>& texts) {
  std::string out = "[";
  for (const std::string& text : texts) out.append(out.size() == 1 ? "" : ",").append(untorch::json::quote(text));
  return out.append("]");
}

std::string describe(const untorch::MethodSpec& method) {
  using untorch::json::quote;
  std::vector<std::string> gpus;
  if (!method.gpu_architecture.empty()) gpus.push_back(method.gpu_architecture);
  std::string variants = "[";
  for (const untorch::MethodVariant& variant : method.variants) {
    if (!variant.gpu_architecture.empty()) gpus.push_back(variant.gpu_architecture);
    variants.append(variants.size() == 1 ? "" : ",")
        .append("{\"library\":" + quote(variant.library) +
                ",\"extern_nodes\":" + (variant.extern_nodes ? quote(*variant.extern_nodes) : "null") +
                ",\"cpu_target\":" + quote(variant.cpu_target) + ",\"features\":" + list_of(variant.cpu_features) +
                "}");
  }
  variants.append("]");
  const auto flag = [](bool value) { return std::string(value ? "true" : "false"); };
  const std::string tf32 = gpus.empty() ? "null"
                                        : "{\"convolution\":" + flag(method.tf32.convolution) +
                                              ",\"matmul\":" + flag(method.tf32.matmul) + "}";
  return "{\"name\":" + quote(method.name) + ",\"library\":" + quote(method.library) +
         ",\"extern_nodes\":" + (method.extern_nodes ? quote(*method.extern_nodes) : "null") +
         ",\"device\":" + quote(method.device) + ",\"cpu_target\":" + quote(method.cpu_target) +
         ",\"architecture\":" + quote(method.architecture) + ",\"features\":" + list_of(method.cpu_features) +
         ",\"gpu_architectures\":" + list_of(gpus) + ",\"tf32\":" + tf32 + ",\"variants\":" + variants + "}";
}

void write_hex(const untorch::Sha256Digest& digest, char* out) {
  const std::string text = untorch::to_hex(digest);
  std::memcpy(out, text.data(), text.size());
}

}  // namespace

extern "C" {

untorch_status untorch_archive_open(const char* path, int32_t copy, untorch_archive** out) {
  return guarded([&] {
    check(path != nullptr && out != nullptr, "untorch_archive_open: path and out must not be null");
    auto archive = std::make_shared<untorch::Archive>(untorch::MappedFile::open(path, copy != 0));
    *out = new untorch_archive{std::move(archive), std::nullopt, {}, false};
  });
}

untorch_status untorch_archive_open_memory(const void* data, size_t length, int32_t copy,
                                           void (*release)(void* context), void* context, untorch_archive** out) {
  return guarded([&] {
    check(data != nullptr && release != nullptr && out != nullptr,
          "untorch_archive_open_memory: data, release and out must not be null");
    auto archive = std::make_shared<untorch::Archive>(untorch::MappedFile::of_memory(
        {static_cast<const std::byte*>(data), length}, copy != 0, [release, context] { release(context); }));
    *out = new untorch_archive{std::move(archive), std::nullopt, {}, false};
  });
}

void untorch_archive_free(untorch_archive* archive) { delete archive; }

const char* untorch_archive_path(const untorch_archive* archive) { return archive->archive->file()->path().c_str(); }
const char* untorch_archive_root(const untorch_archive* archive) { return archive->archive->root().c_str(); }
uint64_t untorch_archive_nbytes(const untorch_archive* archive) { return archive->archive->file()->bytes().size(); }

untorch_status untorch_archive_entries(const untorch_archive* archive,
                                       void (*visit)(void* context, const untorch_archive_entry* entry),
                                       void* context) {
  return guarded([&] {
    for (const auto& [name, entry] : archive->archive->entries()) {
      const untorch_archive_entry given{name.c_str(), entry.offset, entry.size, entry.crc};
      visit(context, &given);
    }
  });
}

untorch_status untorch_archive_view(const untorch_archive* archive, const char* name, const void** data,
                                    size_t* length) {
  return guarded([&] {
    const auto bytes = archive->archive->read(name);
    *data = bytes.data();
    *length = bytes.size();
  });
}

untorch_status untorch_archive_check_whole(const untorch_archive* archive) {
  return guarded([&] { archive->archive->file()->check_whole(); });
}

untorch_status untorch_archive_text(const untorch_archive* archive, const char* name, const char** text,
                                    size_t* length) {
  return guarded([&] {
    const std::string_view found = archive->archive->text(name);
    *text = found.data();
    *length = found.size();
  });
}

untorch_status untorch_archive_check_json(const untorch_archive* archive, const char* name) {
  return guarded([&] {
    const untorch::Archive& file = *archive->archive;
    (void)untorch::json::parse(file.text(name), file.file()->path() + ": " + name,
                               untorch::json::Dialect::kNonFiniteNumbers);
  });
}

untorch_status untorch_archive_methods(untorch_archive* archive, const char** json) {
  return guarded([&] {
    std::string text = "[";
    for (const untorch::MethodSpec& method : archive->read_manifest().methods) {
      text.append(text.size() == 1 ? "" : ",").append(describe(method));
    }
    archive->methods = text.append("]");
    *json = archive->methods.c_str();
  });
}

untorch_status untorch_archive_expect(untorch_archive* archive, const char* name, const char* hex) {
  return guarded([&] {
    untorch::EntryDigest digest{0, {{}}, "the trust policy", true};
    check(untorch::from_hex(hex, digest.digests.front()), "expected 64 lower-case hexadecimal digits, got ", hex);
    archive->archive->expect(name, std::move(digest));
  });
}

untorch_status untorch_archive_verify(untorch_archive* archive, uint32_t threads) {
  return guarded([&] {
    if (archive->archive->contains(untorch::kManifestEntry)) (void)archive->read_manifest();
    archive->archive->verify(threads);
  });
}

void untorch_archive_trust_external(untorch_archive* archive) { archive->verify_external = true; }

untorch_status untorch_archive_verify_external(untorch_archive* archive, const char* weights) {
  return guarded([&] {
    untorch::Manifest manifest = archive->read_manifest();
    untorch::open_external_weights(*archive->archive, manifest, weights != nullptr ? weights : "", false);
    untorch::verify_external_weights(*archive->archive, manifest, archive->verify_external);
  });
}

untorch_status untorch_archive_digests(const untorch_archive* archive, uint32_t threads, char* out) {
  return guarded([&] {
    for (const untorch::Sha256Digest& digest : archive->archive->digests(threads)) {
      write_hex(digest, out);
      out += 64;
    }
  });
}

untorch_status untorch_sha256(const void* data, size_t length, uint64_t block_bytes, int32_t portable, char* out) {
  return guarded([&] {
    const auto path = portable != 0 || !untorch::has_sha256_instructions() ? untorch::Sha256Path::kPortable
                                                                           : untorch::Sha256Path::kInstructions;
    const std::span<const std::byte> bytes(static_cast<const std::byte*>(data), length);
    const std::uint64_t step = block_bytes == 0 ? std::max<std::uint64_t>(length, 1) : block_bytes;
    const std::size_t count = block_bytes == 0 ? 1 : (length + step - 1) / step;
    untorch::for_each_parallel(count, 0, [&](std::size_t i) {
      untorch::Sha256 hash(path);
      hash.update(bytes.subspan(i * step, std::min<std::uint64_t>(step, length - i * step)));
      write_hex(hash.finish(), out + 64 * i);
    });
  });
}

}  // extern "C"
