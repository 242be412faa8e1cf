// Whether this machine runs a method's code.
#include "model/machine.h"

#include <charconv>
#include <utility>

#include "cuda/device.h"
#include "cuda/kernel_registry.h"
#include "model/cpu_features.h"

namespace untorch {
namespace {

std::string join(const std::vector<std::string>& parts) {
  std::string out;
  for (const std::string& part : parts) out += (out.empty() ? "" : ", ") + part;
  return out;
}

// 90 for "sm_90"; 0 for what is no architecture.
int architecture_number(const std::string& name) {
  int number = 0;
  const std::string digits = name.rfind("sm_", 0) == 0 ? name.substr(3) : "";
  (void)std::from_chars(digits.data(), digits.data() + digits.size(), number);
  return number;
}

void take(MethodSpec& spec, MethodVariant& variant) {
  spec.library = std::move(variant.library);
  spec.extern_nodes = std::move(variant.extern_nodes);
  spec.gpu_architecture = std::move(variant.gpu_architecture);
  spec.constants = std::move(variant.constants);
}

// Puts the code for this CPU in the place of the method's own: of several that run here the one that asks for the most
// features.
void take_cpu_variant(const std::string& path, MethodSpec& spec) {
  const std::vector<std::string> missing = missing_cpu_features(spec.cpu_features);
  MethodVariant* chosen = nullptr;
  for (MethodVariant& variant : spec.variants) {
    if (spec.device != "cpu" || !missing_cpu_features(variant.cpu_features).empty()) continue;
    const std::size_t best = chosen != nullptr ? chosen->cpu_features.size() : spec.cpu_features.size();
    if ((chosen == nullptr && !missing.empty()) || variant.cpu_features.size() > best) chosen = &variant;
  }
  if (chosen != nullptr) {
    spec.cpu_target = chosen->cpu_target;
    spec.cpu_features = chosen->cpu_features;
    return take(spec, *chosen);
  }
  if (!missing.empty()) {
    throw_error(ErrorKind::kUnsupported, path, ": method '", spec.name, "' was compiled for a CPU with ", join(missing),
                ", which this one lacks", spec.cpu_target.empty() ? "" : " (target \"" + spec.cpu_target + "\")",
                ": export it with cpu=\"x86-64-v3\" or for this machine");
  }
}

// Puts the code for the GPU in the place of the method's own: of several that run there the newest. A cubin runs within
// its major version, from its minor version on.
void take_variant(const std::string& path, MethodSpec& spec, int index) {
  if (spec.gpu_architecture.empty()) return;  // a stock package that does not say
  const cuda::DeviceProperties& properties = cuda::device_properties(index);
  const auto fits = [&](const std::string& architecture) {
    const int number = architecture_number(architecture);
    return number / 10 == properties.major && number % 10 <= properties.minor ? number : -1;
  };
  int best = fits(spec.gpu_architecture);
  MethodVariant* chosen = nullptr;
  for (MethodVariant& variant : spec.variants) {
    if (const int number = fits(variant.gpu_architecture); number > best) best = number, chosen = &variant;
  }
  if (best < 0) {
    std::vector<std::string> all{spec.gpu_architecture};
    for (const MethodVariant& variant : spec.variants) all.push_back(variant.gpu_architecture);
    throw_error(ErrorKind::kUnsupported, path, ": method '", spec.name, "' was compiled for ", join(all),
                ", cuda:", index, " (", properties.name, ") is ", properties.architecture(),
                ": export it for that architecture");
  }
  if (chosen != nullptr) take(spec, *chosen);
}

// The GPU that a method runs on: what the caller asked for, or the current one. Of the method's code it takes what is
// for that GPU.
Device resolve_cuda(const std::string& path, MethodSpec& spec, const std::string& device) {
  const std::string& text = device.empty() ? spec.device : device;
  int index = -1;
  if (const std::size_t colon = text.find(':'); colon != std::string::npos) {
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + colon + 1, end, index);
    if (error != std::errc() || stop != end || index < 0) {
      throw_error(ErrorKind::kInvalidArgument, "unknown device '", text, "', expected \"cpu\" or \"cuda[:index]\"");
    }
    // A file made on a build machine's second GPU is not bound to a second GPU here.
    if (device.empty()) index = -1;
  }
  // First of all: without kernels a driver does not help.
  if (!cuda::has_kernels()) {
    throw_error(ErrorKind::kUnsupported, path, ": method '", spec.name, "' was compiled for ", spec.device, ", and ",
                cuda::kBuiltWithoutCuda);
  }
  if (std::string reason; cuda::try_driver(&reason) == nullptr) {
    throw_error(ErrorKind::kUnsupported, path, ": method '", spec.name, "' was compiled for ", spec.device, ", and ",
                reason);
  }
  if (index < 0) index = cuda::current_device();
  take_variant(path, spec, index);
  // The device is started here, not at the first call: importing numpy may take as long beside it.
  (void)cuda::primary_context(index);
  return {DeviceType::kCUDA, index};
}

}  // namespace

std::string device_kind(const std::string& device) { return device.substr(0, device.find(':')); }

Device fit_to_machine(const std::string& path, MethodSpec& spec, const std::string& device, bool beside_cuda) {
  const std::string base = device_kind(spec.device);
  const std::string wanted = device_kind(device);
  if (!wanted.empty() && wanted != "cpu" && wanted != "cuda") {
    throw_error(ErrorKind::kInvalidArgument, "unknown device '", device, "', expected \"cpu\" or \"cuda[:index]\"");
  }
  if (!wanted.empty() && wanted != base && !(beside_cuda && wanted == "cuda")) {
    throw_error(ErrorKind::kInvalidArgument, path, ": method '", spec.name, "' was compiled for ", base,
                " and cannot run on ", device, ": export it for that device");
  }
  if (base != "cpu" && base != "cuda") {
    throw_error(ErrorKind::kUnsupported, path, ": method '", spec.name, "' was compiled for ", spec.device,
                "; untorch serves cpu and cuda");
  }
  if (!spec.architecture.empty() && spec.architecture != cpu_architecture()) {
    throw_error(ErrorKind::kUnsupported, path, ": method '", spec.name, "' was compiled for ", spec.architecture,
                ", this machine is ", cpu_architecture());
  }
  take_cpu_variant(path, spec);
  return base == "cuda" ? resolve_cuda(path, spec, device) : Device{};
}

}  // namespace untorch
