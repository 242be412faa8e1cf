// The manifest: the text of extra/untorch.json, in an archive that has the files that the corpus names.
#include "model/manifest.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "archive_bytes.h"
#include "base/error.h"
#include "input_limits.h"

namespace {

using namespace untorch;

constexpr std::size_t kWeights = 8, kWeightBytes = 128;  // make_corpus.py has the same

void check_constants(const Manifest& manifest, const std::vector<ConstantSpec>& constants) {
  for (const ConstantSpec& constant : constants) {
    if (constant.weight >= manifest.weights.size()) fuzz::finding("a constant of a weight that is not there");
    if (constant.mutated && constant.state >= manifest.states.size()) fuzz::finding("a state that is not there");
    if (constant.shape.size() != constant.strides.size()) fuzz::finding("a constant with other strides than sizes");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::string weight(kWeightBytes, 'w');
  static std::vector<std::pair<std::string, std::string_view>> entries = [] {
    std::vector<std::pair<std::string, std::string_view>> made{{"m/archive_format", "pt2"},
                                                               {"m/data/aotinductor/m/model.so", "library"},
                                                               {"m/data/aotinductor/m/model.json", "{\"nodes\": []}"}};
    for (std::size_t i = 0; i < kWeights; ++i) made.emplace_back("m/data/weights/weight_" + std::to_string(i), weight);
    made.emplace_back("m/extra/untorch.json", "");
    return made;
  }();
  const fuzz::Limits limits;
  entries.back().second = {reinterpret_cast<const char*>(data), size};
  const fuzz::Bytes bytes = fuzz::zip(entries);
  try {
    Archive archive(fuzz::file_of(bytes));
    const Manifest manifest = read_manifest(archive);
    if (manifest.methods.empty()) fuzz::finding("a manifest without methods");
    for (const MethodSpec& method : manifest.methods) {
      check_constants(manifest, method.constants);
      for (const MethodVariant& variant : method.variants) check_constants(manifest, variant.constants);
    }
  } catch (const Error&) {
  }
  return 0;
}
