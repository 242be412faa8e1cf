// Searches cubins (ELF files of machine EM_CUDA) for kernel names and the texts of assertions.
#include "model/kernel_assertions.h"

#include <elf.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>
#include <string_view>
#include <utility>

#include "base/fork.h"
#include "cuda/lost_device.h"

namespace untorch {
namespace {

constexpr std::uint16_t kCudaMachine = 190;  // EM_CUDA
constexpr std::string_view kCheck = "out of bounds", kCode = ".text.";
constexpr std::size_t kMostNamed = 8, kLongestText = 200;

// Positions of cubins in `bytes`, then its size.
std::vector<std::size_t> cubin_bounds(std::string_view bytes) {
  std::vector<std::size_t> bounds;
  for (std::size_t at = 0; (at = bytes.find(ELFMAG, at, SELFMAG)) != std::string_view::npos; ++at) {
    if (bytes.size() - at < sizeof(Elf64_Ehdr)) break;
    std::uint16_t machine = 0;
    std::memcpy(&machine, bytes.data() + at + offsetof(Elf64_Ehdr, e_machine), sizeof machine);
    if (machine == kCudaMachine) bounds.push_back(at);
  }
  if (!bounds.empty()) bounds.push_back(bytes.size());
  return bounds;
}

bool is_printable(char c) { return c >= 0x20 && c <= 0x7e; }

// The printable text around `at`.
std::string text_around(std::string_view bytes, std::size_t at) {
  std::size_t first = at, last = at;
  while (first > 0 && at - first < kLongestText && is_printable(bytes[first - 1])) --first;
  while (last < bytes.size() && last - at < kLongestText && is_printable(bytes[last])) ++last;
  return std::string(bytes.substr(first, last - first));
}

struct Entry {
  const NamedKernels* owner;
  std::shared_ptr<const Archive> archive;
  std::string method;
  std::vector<std::string> files;
};
struct Registry {
  fork::Mutex mutex;
  std::deque<Entry> entries;
};
Registry& registry() {
  static auto& made = *new Registry;
  return made;
}

std::string diagnose(bool assertion) {
  if (!assertion) return {};
  std::string text;
  std::size_t named = 0;
  const std::lock_guard lock(registry().mutex);
  for (const Entry& entry : registry().entries) {
    std::vector<KernelAssertion> found;
    for (const std::string& file : entry.files) {
      for (KernelAssertion& assertion_found : find_assertions(entry.archive->read(file))) {
        if (std::ranges::find(found, assertion_found) == found.end()) found.push_back(std::move(assertion_found));
      }
    }
    if (found.empty()) continue;
    text += "; method '" + entry.method + "' checks values in";
    for (const KernelAssertion& one : found) {
      if (++named > kMostNamed) return text + " …";
      text += (&one == &found.front() ? " " : ", ") + one.kernel + " (" + one.text + ")";
    }
  }
  return "; an input holds a value, such as an index, that is out of range" + text;
}

}  // namespace

std::vector<KernelAssertion> find_assertions(std::span<const std::byte> bytes) {
  const std::string_view all(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const std::vector<std::size_t> bounds = cubin_bounds(all);
  std::vector<KernelAssertion> found;
  for (std::size_t i = 0; i + 1 < bounds.size(); ++i) {
    const std::string_view cubin = all.substr(bounds[i], bounds[i + 1] - bounds[i]);
    const std::size_t name = cubin.find(kCode);
    if (name == std::string_view::npos) continue;
    const std::string kernel = text_around(cubin, name + kCode.size());
    for (std::size_t at = 0; (at = cubin.find(kCheck, at)) != std::string_view::npos; at += kCheck.size()) {
      KernelAssertion one{kernel.substr(kernel.find(kCode) + kCode.size()), text_around(cubin, at)};
      if (std::ranges::find(found, one) == found.end()) found.push_back(std::move(one));
    }
  }
  return found;
}

NamedKernels::NamedKernels(std::shared_ptr<const Archive> archive, const MethodSpec& spec) {
  cuda::set_lost_diagnosis(diagnose);
  std::vector<std::string> files = spec.cubins;
  files.push_back(spec.library);
  const std::lock_guard lock(registry().mutex);
  registry().entries.push_back({this, std::move(archive), spec.name, std::move(files)});
}

NamedKernels::~NamedKernels() {
  const std::lock_guard lock(registry().mutex);
  std::erase_if(registry().entries, [this](const Entry& entry) { return entry.owner == this; });
}

}  // namespace untorch
