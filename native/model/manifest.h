// What a .pt2 file holds, method by method: from untorch's manifest, or as much as a stock package tells.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda/tf32.h"
#include "model/archive.h"
#include "model/json.h"
#include "tensor/tensor.h"

namespace untorch {

// One dimension of an input: a number, a symbol with a range, or an expression over symbols in postfix order.
struct DimSpec {
  enum Kind { kFixed, kSymbol, kExpression, kAny } kind = kAny;
  std::int64_t value = 0;                 // kFixed
  std::size_t symbol = 0;                 // kSymbol: index into MethodSpec::symbols
  std::string text;                       // kSymbol: its name; kExpression: "2*s0", for messages
  std::int64_t min = 0, max = INT64_MAX;  // kSymbol
  struct Token {
    enum Op { kNumber, kSymbolValue, kAdd, kSub, kMul, kFloorDiv, kMod, kMin, kMax } op;
    std::int64_t number;  // the number, or the symbol's index
  };
  std::vector<Token> tokens;  // kExpression
};

struct TensorSpec {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<DimSpec> shape;
  bool contiguous = false;  // row-major strides are expected
  bool mutated = false;     // the model writes into it
  bool on_cpu = false;      // of a method for another device: must be on the CPU
  // Of an int64 without dimensions that is a number of the model: its bounds, and the symbol that sizes depend on.
  std::optional<DimSpec> value;
  static constexpr std::int64_t kAnyStride = -1;
  // Expected when not contiguous: numbers, or kAnyStride, which our manifests never have.
  std::optional<std::vector<std::int64_t>> strides;
};

struct ConstantSpec {
  std::string name;  // as the model library's container calls it
  std::string fqn;
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> shape, strides;
  std::int64_t storage_offset = 0;
  std::size_t weight = 0;  // index into Manifest::weights
  bool mutated = false;
  std::size_t state = 0;  // index into Manifest::states, when mutated
  bool on_cpu = false;    // of a method for another device
};

// A weight that lies in a .safetensors file, and what it was at export.
struct ExternalTensor {
  std::size_t file = 0;  // index into Manifest::external_files
  std::string tensor;    // its name there
  std::string dtype;     // as the format names it: "BF16"
  std::vector<std::int64_t> shape;
  Sha256Digest sample{};  // of its first and last bytes (external_weights.h)
  std::uint64_t block_bytes = 0;
  std::vector<Sha256Digest> digests;  // one for each block
};

struct WeightSpec {
  std::string file;  // the archive's entry; empty when external
  std::uint64_t nbytes = 0;
  std::optional<ExternalTensor> external;
  // Of an external one, once its file is open.
  std::shared_ptr<const MappedFile> source;
  std::uint64_t offset = 0;
};

// A .safetensors file that weights lie in: a plain name, without a folder.
struct ExternalFile {
  std::string name;
  std::shared_ptr<const MappedFile> file;  // null until it is opened
};

// A buffer that calls change. Every session has its own copy, which all methods that name it share.
struct StateSpec {
  std::string fqn;
  std::size_t weight = 0;  // its initial value: index into Manifest::weights
  bool on_cpu = true;
};

// A linear layer with a weight in four bits, as the loader may dequantize it.
struct PackedLinear {
  enum Kind { kInt4, kNvfp4 } kind = kInt4;
  std::vector<std::string> tensors;     // constants by fqn, in the operator's order: the packed values, then the scales
  std::int64_t group_size = 0;          // kInt4
  DType activations = DType::kFloat32;  // what it is multiplied with
};

// Code of a method for another GPU architecture or another level of CPUs. What it takes and gives is the same.
struct MethodVariant {
  std::string gpu_architecture;  // "sm_90"; empty in methods for CPUs
  std::string cpu_target;
  std::vector<std::string> cpu_features;
  std::string library;
  std::optional<std::string> extern_nodes;
  std::vector<ConstantSpec> constants;
};

struct MethodSpec {
  std::string name;
  std::string library;                      // archive entry
  std::optional<std::string> extern_nodes;  // archive entry: operators that go to the proxy executor
  std::optional<std::string> weights_blob;  // archive entry of a stock package with its weights beside the library
  std::string device = "cpu";
  std::string cpu_target;
  std::string architecture;
  std::vector<std::string> cpu_features;
  std::string gpu_architecture;     // "sm_90"; empty: not known
  cuda::Tf32 tf32;                  // as PyTorch was set at export; float32 where the file does not tell
  std::vector<std::string> cubins;  // archive entries of a stock package with its kernels beside the library
  bool has_specs = false;           // inputs, outputs and constants below are known (false: a stock package)
  std::vector<std::string> symbols;
  std::vector<TensorSpec> inputs;  // of a stock package, too, if its source tells; empty otherwise
  json::Value inputs_json;         // the same as the manifest has it
  std::size_t num_outputs = 0;
  std::vector<ConstantSpec> constants;
  std::vector<PackedLinear> packed_linears;  // none in files that do not tell
  std::vector<MethodVariant> variants;       // beside the code above
};

inline constexpr const char* kManifestEntry = "extra/untorch.json";

struct Manifest {
  bool stock = false;  // made by PyTorch's own packager
  std::vector<ExternalFile> external_files;
  std::vector<WeightSpec> weights;
  std::vector<StateSpec> states;
  std::vector<MethodSpec> methods;
};

// Reads extra/untorch.json, or finds the methods of a stock package by its folders. Every reference into the archive
// and every size is checked against what is there, and so is what only the inspector shows: load and inspect refuse the
// same files. Files beside the archive are not looked at. Tells the archive the digests of its entries; once for each
// archive. Throws kInvalidFile, or kUnsupported for another format version.
Manifest read_manifest(Archive& archive);

}  // namespace untorch
