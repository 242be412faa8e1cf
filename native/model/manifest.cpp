// untorch.json and stock packages into MethodSpecs; nothing in either is believed before it is compared with the file.
#include "model/manifest.h"

#include <algorithm>
#include <map>

#include "model/json.h"

namespace untorch {
namespace {

constexpr std::int64_t kFormatVersion = 1;
constexpr const char* kManifest = "extra/untorch.json";
constexpr const char* kMethods = "data/aotinductor/";

bool ends_with(const std::string& text, const char* suffix) {
  const std::string tail = suffix;
  return text.size() >= tail.size() && text.compare(text.size() - tail.size(), tail.size(), tail) == 0;
}

DType dtype_from_name(const std::string& name, const std::string& what) {
  static const std::map<std::string, DType> names = [] {
    std::map<std::string, DType> all;
    for (int code = 0; code < 64; ++code) {
      const auto dtype = static_cast<DType>(code);
      if (is_known(dtype)) all.emplace(dtype_name(dtype), dtype);
    }
    return all;
  }();
  const auto it = names.find(name);
  if (it == names.end()) throw_error(ErrorKind::kInvalidFile, what, " has an unknown dtype \"", name, "\"");
  return it->second;
}

class Reader {
 public:
  explicit Reader(const Archive& archive) : archive_(archive), path_(archive.file()->path()) {}

  Manifest read() {
    const json::Value root = json::parse(archive_.text(kManifest), path_ + ": " + kManifest);
    const std::string what = path_ + ": " + kManifest;
    if (root.at("format", what).as_string(what + " format") != "untorch") {
      throw_error(ErrorKind::kInvalidFile, what, " is not of the format \"untorch\"");
    }
    const std::int64_t version = root.at("format_version", what).as_int(what + " format_version");
    if (version > kFormatVersion) {
      throw_error(ErrorKind::kUnsupported, path_, " has format version ", version, "; this untorch reads up to ",
                  kFormatVersion, ": upgrade untorch on this machine");
    }
    if (version < 1) throw_error(ErrorKind::kInvalidFile, what, " has the impossible format version ", version);
    Manifest manifest;
    for (const json::Value& weight : root.at("weights", what).as_array(what + " weights")) {
      manifest.weights.push_back(
          read_weight(weight, what + " weights[" + std::to_string(manifest.weights.size()) + "]"));
    }
    if (const json::Value* states = root.find("states", what)) {
      for (const json::Value& state : states->as_array(what + " states")) {
        manifest.states.push_back(
            read_state(state, manifest.weights, what + " states[" + std::to_string(manifest.states.size()) + "]"));
      }
    }
    std::vector<bool> placed(manifest.states.size(), false);
    for (const auto& [name, method] : root.at("methods", what).as_object(what + " methods")) {
      manifest.methods.push_back(read_method(name, method, manifest, what + " method '" + name + "'"));
      MethodSpec& added = manifest.methods.back();
      place_states(manifest, added.device, added.constants, placed, what + " method '" + name + "'");
      for (MethodVariant& variant : added.variants) {
        place_states(manifest, added.device, variant.constants, placed,
                     what + " method '" + name + "' for " + variant.gpu_architecture);
      }
    }
    if (manifest.methods.empty()) throw_error(ErrorKind::kInvalidFile, what, " has no methods");
    return manifest;
  }

 private:
  std::string entry(const json::Value& value, const std::string& what) const {
    const std::string& name = value.as_string(what);
    if (!archive_.contains(name))
      throw_error(ErrorKind::kInvalidFile, what, " names '", name, "', which is not in the archive");
    return name;
  }

  std::uint64_t natural(const json::Value& value, const std::string& what) const {
    const std::int64_t n = value.as_int(what);
    if (n < 0) throw_error(ErrorKind::kInvalidFile, what, " is negative: ", n);
    return static_cast<std::uint64_t>(n);
  }

  WeightSpec read_weight(const json::Value& value, const std::string& what) const {
    WeightSpec weight{entry(value.at("file", what), what + " file"),
                      natural(value.at("nbytes", what), what + " nbytes")};
    const std::size_t actual = archive_.read(weight.file).size();
    if (actual < weight.nbytes) {
      throw_error(ErrorKind::kInvalidFile, what, ": '", weight.file, "' holds ", actual, " bytes, the manifest says ",
                  weight.nbytes);
    }
    return weight;
  }

  std::vector<std::int64_t> read_ints(const json::Value& value, const std::string& what) const {
    std::vector<std::int64_t> ints;
    for (const json::Value& item : value.as_array(what)) ints.push_back(static_cast<std::int64_t>(natural(item, what)));
    return ints;
  }

  static std::size_t symbol_index(MethodSpec& method, const std::string& name) {
    const auto it = std::find(method.symbols.begin(), method.symbols.end(), name);
    const auto index = static_cast<std::size_t>(it - method.symbols.begin());
    if (it == method.symbols.end()) method.symbols.push_back(name);
    return index;
  }

  DimSpec read_dim(MethodSpec& method, const json::Value& value, const std::string& what) const {
    DimSpec dim;
    if (value.is_int()) {
      dim.kind = DimSpec::kFixed;
      dim.value = static_cast<std::int64_t>(natural(value, what));
      return dim;
    }
    if (const json::Value* symbol = value.find("symbol", what)) {
      dim.kind = DimSpec::kSymbol;
      dim.text = symbol->as_string(what + " symbol");
      dim.symbol = symbol_index(method, dim.text);
      if (const json::Value* min = value.find("min", what); min != nullptr && !min->is_null())
        dim.min = min->as_int(what + " min");
      if (const json::Value* max = value.find("max", what); max != nullptr && !max->is_null())
        dim.max = max->as_int(what + " max");
      return dim;
    }
    if (const json::Value* expression = value.find("expr", what)) dim.text = expression->as_string(what + " expr");
    const json::Value* rpn = value.find("rpn", what);
    if (rpn == nullptr || rpn->is_null()) return dim;  // an expression that has no postfix form is not checked here
    dim.kind = DimSpec::kExpression;
    static const std::map<std::string, DimSpec::Token::Op> kOperators = {
        {"+", DimSpec::Token::kAdd},       {"-", DimSpec::Token::kSub}, {"*", DimSpec::Token::kMul},
        {"//", DimSpec::Token::kFloorDiv}, {"%", DimSpec::Token::kMod}, {"min", DimSpec::Token::kMin},
        {"max", DimSpec::Token::kMax}};
    int depth = 0;
    for (const json::Value& item : rpn->as_array(what + " rpn")) {
      if (item.is_int()) {
        dim.tokens.push_back({DimSpec::Token::kNumber, item.as_int(what)});
        ++depth;
        continue;
      }
      const std::string& word = item.as_string(what + " rpn");
      if (const auto op = kOperators.find(word); op != kOperators.end()) {
        dim.tokens.push_back({op->second, 0});
        if (--depth < 1) throw_error(ErrorKind::kInvalidFile, what, " rpn is malformed");
      } else {
        dim.tokens.push_back({DimSpec::Token::kSymbolValue, static_cast<std::int64_t>(symbol_index(method, word))});
        ++depth;
      }
    }
    if (depth != 1) throw_error(ErrorKind::kInvalidFile, what, " rpn is malformed");
    return dim;
  }

  TensorSpec read_input(MethodSpec& method, const json::Value& value, const std::string& what) const {
    TensorSpec spec;
    spec.name = value.at("name", what).as_string(what + " name");
    spec.dtype = dtype_from_name(value.at("dtype", what).as_string(what + " dtype"), what);
    for (const json::Value& dim : value.at("shape", what).as_array(what + " shape")) {
      spec.shape.push_back(read_dim(method, dim, what + " shape"));
    }
    if (const json::Value* contiguous = value.find("contiguous", what))
      spec.contiguous = contiguous->as_bool(what + " contiguous");
    if (const json::Value* mutated = value.find("mutated", what)) spec.mutated = mutated->as_bool(what + " mutated");
    spec.on_cpu = is_on_cpu(value, what);
    const json::Value* strides = value.find("strides", what);
    if (strides != nullptr && !strides->is_null() && !spec.contiguous) {
      const json::Array& items = strides->as_array(what + " strides");
      const bool all = std::all_of(items.begin(), items.end(), [](const json::Value& v) { return v.is_int(); });
      if (all) {
        spec.strides = read_ints(*strides, what + " strides");
        if (spec.strides->size() != spec.shape.size()) {
          throw_error(ErrorKind::kInvalidFile, what, " has ", spec.shape.size(), " sizes and ", spec.strides->size(),
                      " strides");
        }
      }
    }
    return spec;
  }

  static bool is_on_cpu(const json::Value& value, const std::string& what) {
    const json::Value* device = value.find("device", what);
    return device != nullptr && !device->is_null() && device->as_string(what + " device") == "cpu";
  }

  static constexpr std::size_t kNoState = static_cast<std::size_t>(-1);

  ConstantSpec read_constant(const json::Value& value, const Manifest& manifest, const std::string& what) const {
    const std::vector<WeightSpec>& weights = manifest.weights;
    ConstantSpec constant;
    constant.name = value.at("name", what).as_string(what + " name");
    constant.fqn = value.at("fqn", what).as_string(what + " fqn");
    constant.dtype = dtype_from_name(value.at("dtype", what).as_string(what + " dtype"), what);
    constant.shape = read_ints(value.at("shape", what), what + " shape");
    constant.strides = read_ints(value.at("strides", what), what + " strides");
    constant.storage_offset =
        static_cast<std::int64_t>(natural(value.at("storage_offset", what), what + " storage_offset"));
    constant.weight = natural(value.at("weight", what), what + " weight");
    constant.on_cpu = is_on_cpu(value, what);
    if (const json::Value* mutated = value.find("mutated", what))
      constant.mutated = mutated->as_bool(what + " mutated");
    constant.state = kNoState;
    if (const json::Value* state = value.find("state", what); state != nullptr && constant.mutated) {
      constant.state = natural(*state, what + " state");
      if (constant.state >= manifest.states.size()) {
        throw_error(ErrorKind::kInvalidFile, what, " names state ", constant.state, " of ", manifest.states.size());
      }
    }
    if (constant.weight >= weights.size()) {
      throw_error(ErrorKind::kInvalidFile, what, " names weight ", constant.weight, " of ", weights.size());
    }
    std::int64_t extent = 0, elements = 0, bytes = 0;
    try {
      extent = storage_extent(constant.shape, constant.strides);
    } catch (const Error& e) {
      throw_error(ErrorKind::kInvalidFile, what, ": ", e.what());
    }
    const auto itemsize = static_cast<std::int64_t>(element_size(constant.dtype));
    if ((__builtin_add_overflow(extent, constant.storage_offset, &elements) ||
         __builtin_mul_overflow(elements, itemsize, &bytes) ||
         static_cast<std::uint64_t>(bytes) > weights[constant.weight].nbytes)) {
      throw_error(ErrorKind::kInvalidFile, what, " (", to_string(constant.shape), " ", dtype_name(constant.dtype),
                  ") does not fit into its weight of ", weights[constant.weight].nbytes, " bytes");
    }
    return constant;
  }

  StateSpec read_state(const json::Value& value, const std::vector<WeightSpec>& weights,
                       const std::string& what) const {
    StateSpec state;
    state.fqn = value.at("fqn", what).as_string(what + " fqn");
    state.weight = natural(value.at("weight", what), what + " weight");
    if (state.weight >= weights.size()) {
      throw_error(ErrorKind::kInvalidFile, what, " names weight ", state.weight, " of ", weights.size());
    }
    return state;
  }

  // A state lies where the methods that share it run. Files from before sessions give every changed constant one.
  static void place_states(Manifest& manifest, const std::string& device, std::vector<ConstantSpec>& constants,
                           std::vector<bool>& placed, const std::string& what) {
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
        throw_error(ErrorKind::kInvalidFile, what, ": the constant '", constant.fqn, "' does not fit state ",
                    constant.state, ", '", state.fqn, "'");
      }
      state.on_cpu = here;
      placed[constant.state] = true;
    }
  }

  MethodSpec read_method(const std::string& name, const json::Value& value, const Manifest& manifest,
                         const std::string& what) const {
    MethodSpec method;
    method.name = name;
    method.has_specs = true;
    read_code(method, value, manifest, what);
    method.device = value.at("device", what).as_string(what + " device");
    if (const json::Value* cpu = value.find("cpu", what); cpu != nullptr && !cpu->is_null()) {
      method.cpu_target = cpu->at("target", what).as_string(what + " cpu target");
      method.architecture = cpu->at("architecture", what).as_string(what + " cpu architecture");
      for (const json::Value& feature : cpu->at("features", what).as_array(what + " cpu features")) {
        method.cpu_features.push_back(feature.as_string(what + " cpu features"));
      }
    }
    if (const json::Value* variants = value.find("variants", what); variants != nullptr && !variants->is_null()) {
      for (const json::Value& item : variants->as_array(what + " variants")) {
        const std::string where = what + " variant " + std::to_string(method.variants.size());
        MethodVariant& variant = method.variants.emplace_back();
        read_code(variant, item, manifest, where);
        if (variant.gpu_architecture.empty()) {
          throw_error(ErrorKind::kInvalidFile, where, " has no gpu_architecture");
        }
      }
    }
    for (const json::Value& input : value.at("inputs", what).as_array(what + " inputs")) {
      if (input.find("constant", what) != nullptr) continue;  // a leaf that is no tensor; the container never sees it
      method.inputs.push_back(read_input(method, input, what + " input " + std::to_string(method.inputs.size())));
    }
    if (const json::Value* weights = value.find("quantization", what); weights != nullptr && !weights->is_null()) {
      std::size_t number = 0;
      for (const json::Value& item : weights->as_array(what + " quantization")) {
        read_packed_linear(item, method, what + " quantization[" + std::to_string(number++) + "]");
      }
    }
    for (const json::Value& output : value.at("outputs", what).as_array(what + " outputs")) {
      if (!output.is_null()) (void)output.as_object(what + " output " + std::to_string(method.num_outputs));
      ++method.num_outputs;
    }
    return method;
  }

  // Experts' weights and those of files from before they told their tensors are passed over.
  static void read_packed_linear(const json::Value& value, MethodSpec& method, const std::string& what) {
    const json::Value* op = value.find("operator", what);
    if (op == nullptr) return;
    const std::string& name = op->as_string(what + " operator");
    PackedLinear linear;
    if (name == "nvfp4_linear") {
      linear.kind = PackedLinear::kNvfp4;
    } else if (name != "int4_linear") {
      return;
    }
    for (const json::Value& tensor : value.at("tensors", what).as_array(what + " tensors")) {
      linear.tensors.push_back(tensor.as_string(what + " tensors"));
    }
    const std::size_t expected = linear.kind == PackedLinear::kInt4 ? 2 : 3;
    if (linear.tensors.size() != expected) {
      throw_error(ErrorKind::kInvalidFile, what, " has ", linear.tensors.size(), " tensors, ", name, " takes ",
                  expected);
    }
    linear.group_size = value.at("group_size", what).as_int(what + " group_size");
    linear.activations = dtype_from_name(value.at("activations", what).as_string(what + " activations"), what);
    method.packed_linears.push_back(std::move(linear));
  }

  // What differs between architectures.
  template <class Code>
  void read_code(Code& code, const json::Value& value, const Manifest& manifest, const std::string& what) const {
    code.library = entry(value.at("library", what), what + " library");
    if (const json::Value* nodes = value.find("extern_nodes", what); nodes != nullptr && !nodes->is_null()) {
      code.extern_nodes = entry(*nodes, what + " extern_nodes");
    }
    if (const json::Value* gpu = value.find("gpu_architecture", what); gpu != nullptr && !gpu->is_null()) {
      code.gpu_architecture = gpu->as_string(what + " gpu_architecture");
    }
    for (const json::Value& constant : value.at("constants", what).as_array(what + " constants")) {
      code.constants.push_back(
          read_constant(constant, manifest, what + " constant " + std::to_string(code.constants.size())));
    }
  }

  const Archive& archive_;
  const std::string& path_;
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
  for (const std::string& name : archive.names()) {
    if (name.rfind(kMethods, 0) != 0) continue;
    const std::string rest = name.substr(std::string(kMethods).size());
    const std::size_t slash = rest.find('/');
    if (slash == std::string::npos) continue;
    const std::string method_name = rest.substr(0, slash), file = rest.substr(slash + 1);
    MethodSpec& method = methods[method_name];
    method.name = method_name;
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
      const std::string what = path + ": " + name;
      const json::Value metadata = json::parse(archive.text(name), what);
      if (const json::Value* device = metadata.find("AOTI_DEVICE_KEY", what)) method.device = device->as_string(what);
      if (const json::Value* machine = metadata.find("AOTI_MACHINE", what))
        method.architecture = machine->as_string(what);
      if (const json::Value* capability = metadata.find("AOTI_COMPUTE_CAPABILITY", what);
          capability != nullptr && method.device.rfind("cuda", 0) == 0) {
        method.gpu_architecture = "sm_" + capability->as_string(what);
      }
      if (const json::Value* isa = metadata.find("AOTI_CPU_ISA", what)) {
        method.cpu_features = features_of_stock_isa(isa->as_string(what));
      }
    } else if (ends_with(file, ".json") && !ends_with(file, "_metadata.json")) {
      method.extern_nodes = name;
    }
  }
  Manifest manifest;
  manifest.stock = true;
  for (auto& [name, method] : methods) {
    if (method.library.empty())
      throw_error(ErrorKind::kInvalidFile, path, ": method '", name, "' has no model library");
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

Manifest read_manifest(const Archive& archive) {
  return archive.contains(kManifest) ? Reader(archive).read() : read_stock(archive);
}

}  // namespace untorch
