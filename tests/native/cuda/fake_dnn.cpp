// A fake cuDNN for the fake driver: every convolution has one algorithm, a kernel named "convolve".
#include <cstring>
#include <map>
#include <vector>

#include "cuda/dnn_library.h"
#include "fake_library.h"

using namespace untorch::cuda;

namespace untorch::cuda::dnn {
struct DnnContext {
  Stream stream = nullptr;
};
struct DnnDescriptor {
  int kind = 0;
  std::map<std::int64_t, DevicePtr> operands;  // of a variant pack
  std::vector<std::int64_t> ids;
  DevicePtr workspace = 0;
};
}  // namespace untorch::cuda::dnn

extern "C" {

int fake_dnn_executions() { return fake::executions; }

std::size_t cudnnGetVersion() { return 91900; }
const char* cudnnGetErrorString(dnn::Status) { return "of the fake cuDNN"; }
dnn::Status cudnnCreate(dnn::Handle* handle) { return *handle = new dnn::DnnContext, dnn::kOk; }
dnn::Status cudnnSetStream(dnn::Handle handle, Stream stream) { return handle->stream = stream, dnn::kOk; }
dnn::Status cudnnBackendCreateDescriptor(int kind, dnn::RawDescriptor* descriptor) {
  return *descriptor = new dnn::DnnDescriptor{kind, {}, {}, 0}, dnn::kOk;
}
dnn::Status cudnnBackendDestroyDescriptor(dnn::RawDescriptor descriptor) { return delete descriptor, dnn::kOk; }
dnn::Status cudnnBackendFinalize(dnn::RawDescriptor) { return dnn::kOk; }
dnn::Status cudnnBackendSetAttribute(dnn::RawDescriptor descriptor, int name, int, std::int64_t count,
                                     const void* values) {
  namespace attribute = dnn::attribute;
  const auto* const words = static_cast<const std::int64_t*>(values);
  if (name == attribute::kPackIds.name) descriptor->ids.assign(words, words + count);
  if (name == attribute::kPackWorkspace.name) std::memcpy(&descriptor->workspace, values, 8);
  for (std::int64_t i = 0; name == attribute::kPackPointers.name && i < count; ++i) {
    descriptor->operands[descriptor->ids[static_cast<std::size_t>(i)]] = static_cast<DevicePtr>(words[i]);
  }
  return dnn::kOk;
}
dnn::Status cudnnBackendGetAttribute(dnn::RawDescriptor, int name, int, std::int64_t, std::int64_t* count,
                                     void* values) {
  namespace attribute = dnn::attribute;
  *count = name == attribute::kEngineNotes.name || name == attribute::kEngineBehavior.name ? 0 : 1;
  const std::int64_t workspace = 4096;
  if (name == attribute::kPlanWorkspace.name) std::memcpy(values, &workspace, sizeof workspace);
  return dnn::kOk;
}
dnn::Status cudnnBackendExecute(dnn::Handle handle, dnn::RawDescriptor, dnn::RawDescriptor pack) {
  static const Function kernel = fake::kernel("convolve");
  std::vector<DevicePtr> words;
  for (const std::int64_t id : pack->ids) words.push_back(pack->operands.at(id));
  constexpr std::int64_t kInput = 1, kOutput = 3;
  const Result result = fake::execute(kernel, words, pack->operands.at(kInput), pack->operands.at(kOutput),
                                      pack->workspace, handle->stream);
  return result == kSuccess ? dnn::kOk : 5000;
}

}  // extern "C"
