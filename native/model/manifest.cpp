// untorch.json and stock packages into MethodSpecs; nothing in either is believed before it is compared with the file.
#include "model/manifest.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <unordered_map>

#include "base/text.h"
#include "model/json.h"
#include "model/safetensors.h"
#include "model/stock_inputs.h"

namespace untorch {
namespace {

// The second has weights in .safetensors files beside the archive.
constexpr std::int64_t kFormatVersion = 2, kExternalVersion = 3;
constexpr const char* kSignatures = "extra/signatures/";  // made after the manifest, so it cannot name them
constexpr const char* kMethods = "data/aotinductor/";
// More than any model has, and few enough that a small file makes little work.
constexpr std::size_t kMaxMethods = 1024, kMaxVariants = 64, kMaxRank = 64, kMaxTokens = 1024, kMaxName = 1024,
                      kMaxTensors = 32768,  // inputs and outputs of all methods
    kMaxFiles = 4096, kMaxFileName = 255;
constexpr std::uint64_t kMinBlock = 4096, kMaxBlock = 1u << 30;

bool ends_with(const std::string& text, const char* suffix) {
  const std::string tail = suffix;
  return text.size() >= tail.size() && text.compare(text.size() - tail.size(), tail.size(), tail) == 0;
}

using json::Place;

DType dtype_from_name(const std::string& name, const Place& place) {
  static const std::map<std::string, DType> names = [] {
    std::map<std::string, DType> all;
    for (int code = 0; code < 64; ++code) {
      const auto dtype = static_cast<DType>(code);
      if (is_known(dtype)) all.emplace(dtype_name(dtype), dtype);
    }
    return all;
  }();
  const auto it = names.find(name);
  if (it == names.end()) place.fail(" has an unknown dtype \"" + name.substr(0, 64) + "\"");
  return it->second;
}

class Reader {
 public:
  explicit Reader(Archive& archive) : archive_(archive), path_(archive.file()->path()) {}

  Manifest read() {
    const std::string document = path_ + ": " + kManifestEntry;
    const json::Value root = json::parse(archive_.text(kManifestEntry), document);
    const Place what(document);
    if (root.at("format", what).as_string(what.member("format")) != "untorch") {
      what.fail(" is not of the format \"untorch\"");
    }
    const std::int64_t version = root.at("format_version", what).as_int(what.member("format_version"));
    if (version < 1) what.fail(" has the impossible format version " + std::to_string(version));
    if (version != kFormatVersion && version != kExternalVersion) {
      throw_error(ErrorKind::kUnsupported, path_, " has format version ", version, "; this untorch reads ",
                  kFormatVersion, " and ", kExternalVersion,
                  version > kExternalVersion ? ": upgrade untorch on this machine" : ": export it again");
    }
    for (const char* name : {"untorch_version", "torch_version"}) {
      if (const json::Value* text = root.find_set(name, what)) (void)text->as_string(what.member(name));
    }
    read_digests(root.at("digests", what), what.member("digests"));
    Manifest manifest;
    if (version == kExternalVersion) {
      const Place list = what.member("external_files");
      read_external_files(manifest, root.at("external_files", what), list);
    }
    for (const json::Value& weight : root.at("weights", what).as_array(what.member("weights"))) {
      const Place list = what.member("weights");
      manifest.weights.push_back(read_weight(weight, manifest, list.item(manifest.weights.size())));
    }
    if (const json::Value* states = root.find("states", what)) {
      const Place list = what.member("states");
      for (const json::Value& state : states->as_array(list)) {
        manifest.states.push_back(read_state(state, manifest.weights, list.item(manifest.states.size())));
      }
    }
    std::vector<bool> placed(manifest.states.size(), false);
    const json::Object& methods = root.at("methods", what).as_object(what.member("methods"));
    check_methods(path_, methods.size());
    for (const auto& [name, method] : methods) {
      const Place place = what.named("method", name);
      if (name.size() > kMaxName) what.fail(" has a method with a name of " + std::to_string(name.size()) + " bytes");
      manifest.methods.push_back(read_method(name, method, manifest, place));
      MethodSpec& added = manifest.methods.back();
      place_states(manifest, added.device, added.constants, placed, place);
      for (MethodVariant& variant : added.variants) {
        place_states(manifest, added.device, variant.constants, placed, place.named("for", variant.gpu_architecture));
      }
    }
    if (manifest.methods.empty()) what.fail(" has no methods");
    return manifest;
  }

  static void check_methods(const std::string& path, std::size_t count) {
    if (count <= kMaxMethods) return;
    throw_error(ErrorKind::kInvalidFile, path, " has ", count, " methods, expected at most ", kMaxMethods);
  }

 private:
  // Every entry but the manifest, once: one digest, or one for each block.
  void read_digests(const json::Value& value, const Place& what) {
    if (value.at("algorithm", what).as_string(what.member("algorithm")) != "sha256") {
      what.fail(" are not of the algorithm \"sha256\"");
    }
    const std::uint64_t block = natural(value.at("block_bytes", what), what.member("block_bytes"));
    block_bytes_ = block;
    if (block < kMinBlock || block > kMaxBlock) what.fail(" have blocks of " + std::to_string(block) + " bytes");
    for (const char* kind : {"entries", "blocks"}) {
      const Place list = what.member(kind);
      const bool whole = kind == std::string_view("entries");
      for (const auto& [name, hex] : value.at(kind, what).as_object(list)) {
        const Place place = list.named("entry", name);
        if (!archive_.contains(name)) place.fail(" is not in the archive");
        if (name == kManifestEntry || !digested_.insert(name).second) place.fail(" is there twice");
        archive_.expect(name, {whole ? 0 : block, read_hashes(hex, place), "the manifest"});
      }
    }
    for (const auto& [name, entry] : archive_.entries()) {
      if (digested_.contains(name) || name == kManifestEntry || name.starts_with(kSignatures)) continue;
      what.fail(" lack entry '" + name + "', which is in the archive");
    }
  }

  static std::vector<Sha256Digest> read_hashes(const json::Value& value, const Place& place) {
    const std::string_view text = value.as_string(place);
    std::vector<Sha256Digest> digests;
    for (std::size_t at = 0; at < text.size(); at += 64) {
      if (!from_hex(text.substr(at, 64), digests.emplace_back())) {
        place.fail(" is no SHA-256 in lower-case hexadecimal digits");
      }
    }
    return digests;
  }

  // Plain names: where the files are is the loader's caller's to say, never the manifest's.
  static void read_external_files(Manifest& manifest, const json::Value& value, const Place& list) {
    const json::Array& names = value.as_array(list);
    if (names.empty() || names.size() > kMaxFiles) {
      list.fail(" has " + std::to_string(names.size()) + " names, expected from 1 to " + std::to_string(kMaxFiles));
    }
    std::set<std::string_view> seen;
    for (const json::Value& item : names) {
      const Place place = list.item(manifest.external_files.size());
      const std::string& name = item.as_string(place);
      if (name.size() > kMaxFileName || name.starts_with('.') || name.find_first_of("/\\") != std::string::npos ||
          !ends_with(name, ".safetensors") || escape_controls(name, false) != name) {
        place.fail(" is \"" + name.substr(0, kMaxFileName) +
                   "\", expected the plain name of a .safetensors file, without a folder");
      }
      if (!seen.insert(name).second) place.fail(" is there twice");
      manifest.external_files.push_back({name, nullptr});
    }
  }

  ExternalTensor read_external(const json::Value& value, const Manifest& manifest, std::uint64_t nbytes,
                               const Place& what) const {
    ExternalTensor tensor;
    tensor.file = natural(value.at("external", what), what.member("external"));
    if (tensor.file >= manifest.external_files.size()) {
      what.fail(" names external file " + std::to_string(tensor.file) + " of " +
                std::to_string(manifest.external_files.size()));
    }
    tensor.tensor = short_text(value.at("tensor", what), what.member("tensor"));
    tensor.dtype = short_text(value.at("dtype", what), what.member("dtype"));
    tensor.shape = read_ints(value.at("shape", what), what.member("shape"));
    const std::optional<std::uint64_t> expected = safetensors_nbytes(tensor.dtype, tensor.shape);
    if (!expected || *expected != nbytes) {
      what.fail(" has " + std::to_string(nbytes) + " bytes, its dtype and shape say " +
                (expected ? std::to_string(*expected) : "what cannot be"));
    }
    if (!from_hex(value.at("sample", what).as_string(what.member("sample")), tensor.sample)) {
      what.member("sample").fail(" is no SHA-256 in lower-case hexadecimal digits");
    }
    tensor.block_bytes = block_bytes_;
    tensor.digests = read_hashes(value.at("sha256", what), what.member("sha256"));
    const std::uint64_t blocks = nbytes / block_bytes_ + (nbytes % block_bytes_ != 0 ? 1 : 0);
    if (tensor.digests.size() != blocks) {
      what.member("sha256").fail(" has " + std::to_string(tensor.digests.size()) + " digests for " +
                                 std::to_string(blocks) + " blocks");
    }
    return tensor;
  }

  std::string entry(const json::Value& value, const Place& place) const {
    const std::string& name = value.as_string(place);
    if (!archive_.contains(name)) place.fail(" names '" + name.substr(0, kMaxName) + "', which is not in the archive");
    return name;
  }

  static std::uint64_t natural(const json::Value& value, const Place& place) {
    const std::int64_t n = value.as_int(place);
    if (n < 0) place.fail(" is negative: " + std::to_string(n));
    return static_cast<std::uint64_t>(n);
  }

  // A name that is shown to people.
  static const std::string& short_text(const json::Value& value, const Place& place) {
    const std::string& text = value.as_string(place);
    if (text.size() > kMaxName) place.fail(" is a text of " + std::to_string(text.size()) + " bytes");
    return text;
  }

  WeightSpec read_weight(const json::Value& value, const Manifest& manifest, const Place& what) const {
    WeightSpec weight;
    weight.nbytes = natural(value.at("nbytes", what), what.member("nbytes"));
    if (value.find("external", what) != nullptr) {
      weight.external = read_external(value, manifest, weight.nbytes, what);
      return weight;
    }
    weight.file = entry(value.at("file", what), what.member("file"));
    const std::uint64_t actual = archive_.entry(weight.file).size;
    if (actual != weight.nbytes) {
      what.fail(": '" + weight.file + "' holds " + std::to_string(actual) + " bytes, the manifest says " +
                std::to_string(weight.nbytes));
    }
    return weight;
  }

  static std::vector<std::int64_t> read_ints(const json::Value& value, const Place& place) {
    const json::Array& items = value.as_array(place);
    if (items.size() > kMaxRank) place.fail(" has " + std::to_string(items.size()) + " dimensions");
    std::vector<std::int64_t> ints;
    for (const json::Value& item : items) ints.push_back(static_cast<std::int64_t>(natural(item, place)));
    return ints;
  }

  std::size_t symbol_index(MethodSpec& method, const std::string& name) {
    const auto [it, added] = symbols_.emplace(name, method.symbols.size());
    if (added) method.symbols.push_back(name);
    return it->second;
  }

  DimSpec read_dim(MethodSpec& method, const json::Value& value, const Place& place) {
    DimSpec dim;
    if (value.is_int()) {
      dim.kind = DimSpec::kFixed;
      dim.value = static_cast<std::int64_t>(natural(value, place));
      return dim;
    }
    if (const json::Value* symbol = value.find("symbol", place)) {
      dim.kind = DimSpec::kSymbol;
      dim.text = short_text(*symbol, place.member("symbol"));
      dim.symbol = symbol_index(method, dim.text);
      if (const json::Value* min = value.find_set("min", place)) dim.min = min->as_int(place.member("min"));
      if (const json::Value* max = value.find_set("max", place)) dim.max = max->as_int(place.member("max"));
      return dim;
    }
    if (const json::Value* expression = value.find("expr", place)) {
      dim.text = expression->as_string(place.member("expr"));
    }
    const json::Value* rpn = value.find_set("rpn", place);
    if (rpn == nullptr) return dim;  // an expression that has no postfix form is not checked here
    dim.kind = DimSpec::kExpression;
    read_tokens(method, dim, *rpn, place.member("rpn"));
    return dim;
  }

  void read_tokens(MethodSpec& method, DimSpec& dim, const json::Value& rpn, const Place& place) {
    static const std::map<std::string, DimSpec::Token::Op> kOperators = {
        {"+", DimSpec::Token::kAdd},       {"-", DimSpec::Token::kSub}, {"*", DimSpec::Token::kMul},
        {"//", DimSpec::Token::kFloorDiv}, {"%", DimSpec::Token::kMod}, {"min", DimSpec::Token::kMin},
        {"max", DimSpec::Token::kMax}};
    const json::Array& items = rpn.as_array(place);
    if (items.size() > kMaxTokens) place.fail(" has " + std::to_string(items.size()) + " tokens");
    int depth = 0;
    for (const json::Value& item : items) {
      if (item.is_int()) {
        dim.tokens.push_back({DimSpec::Token::kNumber, item.as_int(place)});
        ++depth;
        continue;
      }
      const std::string& word = short_text(item, place);
      if (const auto op = kOperators.find(word); op != kOperators.end()) {
        dim.tokens.push_back({op->second, 0});
        if (--depth < 1) place.fail(" is malformed");
      } else {
        dim.tokens.push_back({DimSpec::Token::kSymbolValue, static_cast<std::int64_t>(symbol_index(method, word))});
        ++depth;
      }
    }
    if (depth != 1) place.fail(" is malformed");
  }

  // A leaf that is no tensor, and that the library does not have.
  static bool is_constant(const json::Value& value, const Place& what) {
    if (value.find("constant", what) == nullptr) return false;
    (void)short_text(value.at("name", what), what.member("name"));
    return true;
  }

  // Name, dtype and shape: of inputs and outputs.
  TensorSpec read_tensor(MethodSpec& method, const json::Value& value, const Place& what) {
    TensorSpec spec;
    spec.name = short_text(value.at("name", what), what.member("name"));
    spec.dtype = dtype_from_name(value.at("dtype", what).as_string(what.member("dtype")), what);
    if (++tensors_ > kMaxTensors) what.fail(" is one more than " + std::to_string(kMaxTensors) + " inputs and outputs");
    const Place place = what.member("shape");
    const json::Array& dims = value.at("shape", what).as_array(place);
    if (dims.size() > kMaxRank) place.fail(" has " + std::to_string(dims.size()) + " dimensions");
    for (const json::Value& dim : dims) spec.shape.push_back(read_dim(method, dim, place));
    spec.on_cpu = is_on_cpu(value, what);
    return spec;
  }

  TensorSpec read_input(MethodSpec& method, const json::Value& value, const Place& what) {
    TensorSpec spec = read_tensor(method, value, what);
    if (const json::Value* contiguous = value.find("contiguous", what)) {
      spec.contiguous = contiguous->as_bool(what.member("contiguous"));
    }
    if (const json::Value* mutated = value.find("mutated", what)) {
      spec.mutated = mutated->as_bool(what.member("mutated"));
    }
    if (const json::Value* number = value.find_set("value", what)) {
      const Place place = what.member("value");
      if (spec.dtype != DType::kInt64 || !spec.shape.empty()) place.fail(" is for an int64 without dimensions");
      spec.value = read_dim(method, *number, place);
      if (spec.value->kind == DimSpec::kSymbol && number->find_set("min", place) == nullptr) {
        spec.value->min = INT64_MIN;
      }
    }
    const json::Value* strides = value.find_set("strides", what);
    if (strides == nullptr) return spec;
    const Place place = what.member("strides");
    const json::Array& items = strides->as_array(place);
    if (items.size() != spec.shape.size()) {
      what.fail(" has " + std::to_string(spec.shape.size()) + " sizes and " + std::to_string(items.size()) +
                " strides");
    }
    for (const json::Value& item : items) {  // null: it depends on a size
      if (!item.is_null()) (void)natural(item, place);
    }
    const bool all = std::ranges::all_of(items, [](const json::Value& v) { return v.is_int(); });
    if (all && !spec.contiguous) spec.strides = read_ints(*strides, place);
    return spec;
  }

  static bool is_on_cpu(const json::Value& value, const Place& place) {
    const json::Value* device = value.find_set("device", place);
    return device != nullptr && device->as_string(place.member("device")) == "cpu";
  }

  static constexpr std::size_t kNoState = static_cast<std::size_t>(-1);

  ConstantSpec read_constant(const json::Value& value, const Manifest& manifest, const Place& what) const {
    const std::vector<WeightSpec>& weights = manifest.weights;
    ConstantSpec constant;
    constant.name = short_text(value.at("name", what), what.member("name"));
    constant.fqn = short_text(value.at("fqn", what), what.member("fqn"));
    constant.dtype = dtype_from_name(value.at("dtype", what).as_string(what.member("dtype")), what);
    constant.shape = read_ints(value.at("shape", what), what.member("shape"));
    constant.strides = read_ints(value.at("strides", what), what.member("strides"));
    constant.storage_offset =
        static_cast<std::int64_t>(natural(value.at("storage_offset", what), what.member("storage_offset")));
    constant.weight = natural(value.at("weight", what), what.member("weight"));
    constant.on_cpu = is_on_cpu(value, what);
    if (const json::Value* mutated = value.find("mutated", what)) {
      constant.mutated = mutated->as_bool(what.member("mutated"));
    }
    constant.state = kNoState;
    if (const json::Value* state = value.find("state", what); state != nullptr && constant.mutated) {
      constant.state = natural(*state, what.member("state"));
      if (constant.state >= manifest.states.size()) {
        what.fail(" names state " + std::to_string(constant.state) + " of " + std::to_string(manifest.states.size()));
      }
    }
    if (constant.weight >= weights.size()) {
      what.fail(" names weight " + std::to_string(constant.weight) + " of " + std::to_string(weights.size()));
    }
    std::int64_t extent = 0, elements = 0, bytes = 0;
    try {
      extent = storage_extent(constant.shape, constant.strides);
    } catch (const Error& e) {
      what.fail(std::string(": ") + e.what());
    }
    const auto itemsize = static_cast<std::int64_t>(element_size(constant.dtype));
    if ((__builtin_add_overflow(extent, constant.storage_offset, &elements) ||
         __builtin_mul_overflow(elements, itemsize, &bytes) ||
         static_cast<std::uint64_t>(bytes) > weights[constant.weight].nbytes)) {
      what.fail(detail::concat(" (", to_string(constant.shape), " ", dtype_name(constant.dtype),
                               ") does not fit into its weight of ", weights[constant.weight].nbytes, " bytes"));
    }
    return constant;
  }

  static StateSpec read_state(const json::Value& value, const std::vector<WeightSpec>& weights, const Place& what) {
    StateSpec state;
    state.fqn = short_text(value.at("fqn", what), what.member("fqn"));
    state.weight = natural(value.at("weight", what), what.member("weight"));
    if (state.weight >= weights.size()) {
      what.fail(" names weight " + std::to_string(state.weight) + " of " + std::to_string(weights.size()));
    }
    return state;
  }

  // A state lies where the methods that share it run.
  static void place_states(Manifest& manifest, const std::string& device, std::vector<ConstantSpec>& constants,
                           std::vector<bool>& placed, const Place& what) {
    const bool on_cpu = device.rfind("cuda", 0) != 0;
    for (ConstantSpec& constant : constants) {
      if (!constant.mutated) continue;
      const bool here = on_cpu || constant.on_cpu;
      if (constant.state == kNoState) {
        constant.state = manifest.states.size();
        manifest.states.push_back({constant.fqn, constant.weight, here});
        placed.push_back(true);
        continue;
      }
      StateSpec& state = manifest.states[constant.state];
      if (state.weight != constant.weight || (placed[constant.state] && state.on_cpu != here)) {
        what.fail(": the constant '" + constant.fqn + "' does not fit state " + std::to_string(constant.state) + ", '" +
                  state.fqn + "'");
      }
      state.on_cpu = here;
      placed[constant.state] = true;
    }
  }

  // What the code asks of the CPU; gives the architecture.
  template <class Code>
  static std::string read_cpu(Code& code, const json::Value& value, const Place& what) {
    code.cpu_target = short_text(value.at("target", what), what.member("target"));
    for (const json::Value& feature : value.at("features", what).as_array(what.member("features"))) {
      code.cpu_features.push_back(short_text(feature, what.member("features")));
    }
    return short_text(value.at("architecture", what), what.member("architecture"));
  }

  MethodSpec read_method(const std::string& name, const json::Value& value, const Manifest& manifest,
                         const Place& what) {
    MethodSpec method;
    method.name = name;
    method.has_specs = true;
    symbols_.clear();
    read_code(method, value, manifest, what);
    method.device = short_text(value.at("device", what), what.member("device"));
    if (const json::Value* cpu = value.find_set("cpu", what)) {
      method.architecture = read_cpu(method, *cpu, what.member("cpu"));
    }
    if (const json::Value* tf32 = value.find_set("tf32", what)) {
      const Place place = what.member("tf32");
      method.tf32.convolution = tf32->at("convolution", place).as_bool(place.member("convolution"));
      method.tf32.matmul = tf32->at("matmul", place).as_bool(place.member("matmul"));
    }
    if (const json::Value* variants = value.find_set("variants", what)) {
      const json::Array& items = variants->as_array(what.member("variants"));
      if (items.size() > kMaxVariants) what.fail(" has " + std::to_string(items.size()) + " variants");
      for (const json::Value& item : items) {
        const Place place = what.numbered("variant", method.variants.size());
        MethodVariant& variant = method.variants.emplace_back();
        read_code(variant, item, manifest, place);
        if (method.device != "cpu") {
          if (variant.gpu_architecture.empty()) place.fail(" has no gpu_architecture");
        } else if (read_cpu(variant, item.at("cpu", place), place.member("cpu")) != method.architecture) {
          place.fail(" is for another architecture than the method");
        }
      }
    }
    method.inputs_json = value.at("inputs", what);
    std::size_t number = 0;
    for (const json::Value& input : value.at("inputs", what).as_array(what.member("inputs"))) {
      const Place place = what.numbered("input", number++);
      if (is_constant(input, place)) continue;
      method.inputs.push_back(read_input(method, input, place));
    }
    if (const json::Value* weights = value.find_set("quantization", what)) {
      const Place list = what.member("quantization");
      number = 0;
      for (const json::Value& item : weights->as_array(list)) read_quantized(item, method, list.item(number++));
    }
    for (const json::Value& output : value.at("outputs", what).as_array(what.member("outputs"))) {
      const Place place = what.numbered("output", method.num_outputs++);
      if (output.is_null()) continue;
      (void)output.as_object(place);
      if (is_constant(output, place)) continue;
      (void)read_tensor(method, output, place);
    }
    return method;
  }

  // A quantized weight: what the inspector sums up, and for a linear layer what the loader needs to dequantize it.
  static void read_quantized(const json::Value& value, MethodSpec& method, const Place& what) {
    (void)short_text(value.at("dtype", what), what.member("dtype"));
    (void)natural(value.at("nbytes", what), what.member("nbytes"));
    (void)read_ints(value.at("packed_shape", what), what.member("packed_shape"));
    if (const json::Value* shape = value.find("shape", what)) (void)read_ints(*shape, what.member("shape"));
    for (const char* name : {"method", "prefill"}) {
      if (const json::Value* text = value.find(name, what)) (void)short_text(*text, what.member(name));
    }
    const std::int64_t group_size = value.at("group_size", what).as_int(what.member("group_size"));
    const json::Value* op = value.find("operator", what);
    if (op == nullptr) return;
    const std::string& name = op->as_string(what.member("operator"));
    PackedLinear linear;
    if (name == "nvfp4_linear") {
      linear.kind = PackedLinear::kNvfp4;
    } else if (name != "int4_linear") {
      return;
    }
    for (const json::Value& tensor : value.at("tensors", what).as_array(what.member("tensors"))) {
      linear.tensors.push_back(tensor.as_string(what.member("tensors")));
    }
    const std::size_t expected = linear.kind == PackedLinear::kInt4 ? 2 : 3;
    if (linear.tensors.size() != expected) {
      what.fail(detail::concat(" has ", linear.tensors.size(), " tensors, ", name, " takes ", expected));
    }
    linear.group_size = group_size;
    linear.activations = dtype_from_name(value.at("activations", what).as_string(what.member("activations")), what);
    method.packed_linears.push_back(std::move(linear));
  }

  // What differs between architectures.
  template <class Code>
  void read_code(Code& code, const json::Value& value, const Manifest& manifest, const Place& what) const {
    code.library = entry(value.at("library", what), what.member("library"));
    if (const json::Value* nodes = value.find_set("extern_nodes", what)) {
      code.extern_nodes = entry(*nodes, what.member("extern_nodes"));
    }
    if (const json::Value* gpu = value.find_set("gpu_architecture", what)) {
      code.gpu_architecture = short_text(*gpu, what.member("gpu_architecture"));
    }
    if (const json::Value* ptxas = value.find_set("ptxas", what)) (void)short_text(*ptxas, what.member("ptxas"));
    for (const json::Value& constant : value.at("constants", what).as_array(what.member("constants"))) {
      code.constants.push_back(read_constant(constant, manifest, what.numbered("constant", code.constants.size())));
    }
  }

  Archive& archive_;
  const std::string& path_;
  std::set<std::string, std::less<>> digested_;
  std::size_t tensors_ = 0;
  std::uint64_t block_bytes_ = 0;
  std::unordered_map<std::string, std::size_t> symbols_;  // of the method that is being read
};

// torch's names for instruction sets, as Linux calls the features that decide.
std::vector<std::string> features_of_stock_isa(const std::string& isa) {
  std::vector<std::string> features;
  const auto has = [&](const char* token) {
    return (" " + isa + " ").find(std::string(" ") + token + " ") != std::string::npos;
  };
  if (has("AVX2")) features = {"avx2", "fma"};
  if (has("AVX512")) features = {"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"};
  if (has("AVX512_VNNI")) features.emplace_back("avx512_vnni");
  return features;
}

Manifest read_stock(const Archive& archive) {
  const std::string& path = archive.file()->path();
  std::map<std::string, MethodSpec> methods;
  for (const auto& [name, entry] : archive.entries()) {
    if (!name.starts_with(kMethods)) continue;
    const std::string rest = name.substr(std::string_view(kMethods).size());
    const std::size_t slash = rest.find('/');
    if (slash == std::string::npos) continue;
    const std::string method_name = rest.substr(0, slash), file = rest.substr(slash + 1);
    MethodSpec& method = methods[method_name];
    method.name = method_name;
    method.tf32 = {.convolution = true, .matmul = false};  // PyTorch's defaults; the package does not tell
    if (ends_with(file, ".so")) {
      // Triton on the CPU packs several libraries; the wrapper is the model.
      if (method.library.empty() || ends_with(file, ".wrapper.so")) method.library = name;
    } else if (ends_with(file, ".cubin") || ends_with(file, ".fatbin")) {
      method.cubins.push_back(name);
    } else if (ends_with(file, "_weights.blob")) {
      method.weights_blob = name;
    } else if (ends_with(file, "weights_config.json")) {
      throw_error(
          ErrorKind::kUnsupported, path, ": method '", method_name,
          "' keeps its weights as pickles, which only PyTorch can read; compile it with "
          "aot_inductor.package_constants_on_disk_format=\"binary_blob\", with the weights in the library, or with "
          "untorch.export");
    } else if (ends_with(file, "wrapper_metadata.json") || ends_with(file, ".so_metadata.json")) {
      const std::string document = path + ": " + name;
      const json::Value metadata = json::parse(archive.text(name), document);
      const Place what(document);
      if (const json::Value* device = metadata.find("AOTI_DEVICE_KEY", what)) method.device = device->as_string(what);
      if (const json::Value* machine = metadata.find("AOTI_MACHINE", what))
        method.architecture = machine->as_string(what);
      if (const json::Value* capability = metadata.find("AOTI_COMPUTE_CAPABILITY", what);
          capability != nullptr && method.device.rfind("cuda", 0) == 0) {
        method.gpu_architecture = "sm_" + capability->as_string(what);
      }
      if (const json::Value* isa = metadata.find("AOTI_CPU_ISA", what)) {
        method.cpu_features = features_of_stock_isa(isa->as_string(what));
        if (!method.cpu_features.empty()) method.cpu_target = "native";
      }
    } else if (ends_with(file, ".json") && !ends_with(file, "_metadata.json")) {
      method.extern_nodes = name;
    }
  }
  Reader::check_methods(path, methods.size());
  // PyTorch's own switch; unset, PyTorch checks nothing.
  const char* const setting = std::getenv("AOTI_RUNTIME_CHECK_INPUTS");
  const bool check_inputs = setting == nullptr || setting[0] != '0';
  Manifest manifest;
  manifest.stock = true;
  for (auto& [name, method] : methods) {
    if (method.library.empty())
      throw_error(ErrorKind::kInvalidFile, path, ": method '", name, "' has no model library");
    const std::string source = method.library.substr(0, method.library.rfind('.')) + ".cpp";
    if (check_inputs && archive.contains(source)) {
      if (auto found = read_stock_inputs(archive.text(source))) {
        method.symbols = std::move(found->symbols);
        method.inputs = std::move(found->inputs);
      }
    }
    manifest.methods.push_back(std::move(method));
  }
  if (manifest.methods.empty()) {
    throw_error(ErrorKind::kInvalidFile, path, " holds no compiled model: it has no ", kMethods,
                "<method>/*.so (is it a "
                "torch.export archive that was never compiled? see untorch.export.export)");
  }
  return manifest;
}

}  // namespace

Manifest read_manifest(Archive& archive) {
  return archive.contains(kManifestEntry) ? Reader(archive).read() : read_stock(archive);
}

}  // namespace untorch
