// capi.h: .safetensors files, for the exporter and for adapters.
#include <cstring>

#include "model/capi.h"
#include "model/capi_handles.h"
#include "model/external_weights.h"
#include "model/safetensors.h"

using namespace untorch::capi;

struct untorch_safetensors {
  untorch::Safetensors file;
};

extern "C" {

untorch_status untorch_safetensors_open(const char* path, untorch_safetensors** out) {
  return guarded([&] {
    untorch::check(path != nullptr && out != nullptr, "untorch_safetensors_open: path and out must not be null");
    *out = new untorch_safetensors{untorch::Safetensors(untorch::MappedFile::open(path))};
  });
}

void untorch_safetensors_free(untorch_safetensors* file) { delete file; }

untorch_status untorch_safetensors_tensors(const untorch_safetensors* file,
                                           void (*visit)(void* context, const untorch_safetensors_tensor* tensor),
                                           void* context) {
  return guarded([&] {
    for (const auto& [name, tensor] : file->file.tensors()) {
      const auto bytes = file->file.bytes(tensor);
      const untorch_safetensors_tensor given{name.c_str(),        tensor.dtype.c_str(), tensor.shape.data(),
                                             tensor.shape.size(), bytes.data(),         bytes.size()};
      visit(context, &given);
    }
  });
}

untorch_status untorch_sample_digest(const void* data, size_t length, char* out) {
  return guarded([&] {
    const std::string text = untorch::to_hex(untorch::sample_digest({static_cast<const std::byte*>(data), length}));
    std::memcpy(out, text.data(), text.size());
  });
}

}  // extern "C"
