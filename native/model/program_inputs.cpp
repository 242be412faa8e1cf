// Checks of a call's inputs against the method's specification: generated code trusts them.
#include <algorithm>
#include <cstring>
#include <span>

#include "model/dim_expression.h"
#include "model/program.h"

namespace untorch {
namespace {

// Of an input that the model writes into: code for GPUs copies one that is aligned to less, and writes to the copy.
constexpr std::uintptr_t kWrittenAlignment = 16;

// Where numpy has a dtype from that is not its own.
const char* source_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kBFloat16:
      return " (in numpy: ml_dtypes.bfloat16)";
    case DType::kFloat8E4M3FN:
      return " (in numpy: ml_dtypes.float8_e4m3fn)";
    case DType::kFloat8E5M2:
      return " (in numpy: ml_dtypes.float8_e5m2)";
    default:
      return "";
  }
}

// Complex numbers are pairs.
std::size_t alignment_of(DType dtype) noexcept { return element_size(dtype) / (is_complex(dtype) ? 2 : 1); }

std::string describe(const TensorSpec& spec) {
  std::string out = dtype_name(spec.dtype) + "[";
  for (std::size_t d = 0; d < spec.shape.size(); ++d) {
    const DimSpec& dim = spec.shape[d];
    out += d == 0 ? "" : ", ";
    out += dim.kind == DimSpec::kFixed ? std::to_string(dim.value) : dim.text.empty() ? "?" : dim.text;
  }
  return out + "]";
}

// A number of the model that varies: within its bounds, and the same wherever its symbol stands.
void check_value(const std::string& method, const TensorSpec& expected, const untorch_view& input,
                 std::span<std::int64_t> symbols) {
  const DimSpec& bounds = *expected.value;
  if (device_of(input).type != DeviceType::kCPU) {
    throw_error(ErrorKind::kInvalidArgument, "method '", method, "', input '", expected.name,
                "': expected a Python int, or an array on the CPU");
  }
  if (bounds.kind != DimSpec::kSymbol) return;
  std::int64_t value = 0;
  std::memcpy(&value, input.data, sizeof(value));
  if (value < bounds.min || value > bounds.max) {
    const std::string low = bounds.min == INT64_MIN ? "" : " of at least " + std::to_string(bounds.min);
    const std::string both = " from " + std::to_string(bounds.min) + " to " + std::to_string(bounds.max);
    throw_error(ErrorKind::kInvalidArgument, "method '", method, "', input '", expected.name, "': expected a number",
                bounds.max == INT64_MAX ? low : both, ", got ", value);
  }
  std::int64_t& known = symbols[bounds.symbol];
  if (known >= 0 && known != value) {
    throw_error(ErrorKind::kInvalidArgument, "method '", method, "', input '", expected.name, "': expected ", known,
                ", as ", bounds.text, " is in another input, got ", value);
  }
  if (value >= 0) known = value;
}

}  // namespace

void Method::check_inputs(std::span<const untorch_view> inputs, const Container& container) const {
  const std::string& method = spec_.name;
  if (inputs.size() != container.num_inputs()) {
    throw_error(ErrorKind::kInvalidArgument, "method '", method, "': expected ", container.num_inputs(),
                " tensors, got ", inputs.size());
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const untorch_view& input = inputs[i];
    check_view(input);
    const DimSpan sizes = sizes_of(input), strides = strides_of(input);
    const DType dtype = dtype_of(input);
    const Device device = device_of(input);
    const TensorSpec* const spec = input_spec(i);
    const std::string number = spec != nullptr ? "" : std::to_string(i);
    const std::string& name = spec != nullptr ? spec->name : number;
    if (!is_known(dtype)) {
      throw_error(ErrorKind::kInvalidArgument, "method '", method, "', input '", name, "': unknown dtype code ",
                  input.dtype);
    }
    if (std::any_of(sizes.begin(), sizes.end(), [](std::int64_t s) { return s < 0; })) {
      throw_error(ErrorKind::kInvalidArgument, "method '", method, "', input '", name, "': has negative sizes ",
                  to_string(sizes));
    }
    const bool has_elements = std::all_of(sizes.begin(), sizes.end(), [](std::int64_t s) { return s != 0; });
    if (has_elements &&
        (input.data == nullptr || reinterpret_cast<std::uintptr_t>(input.data) % alignment_of(dtype) != 0)) {
      throw_error(ErrorKind::kInvalidArgument, "method '", method, "', input '", name, "': its memory is ",
                  input.data == nullptr ? "null" : "not aligned to its dtype: pass a copy");
    }
    // A CUDA method takes CPU memory too: it is copied.
    if (device.type != DeviceType::kCPU &&
        (input_on_cpu(i) || device.type != device_.type || device.index != device_.index)) {
      throw_error(ErrorKind::kInvalidArgument, "method '", method, "', input '", name, "': is on ", device_name(device),
                  ", expected ", input_on_cpu(i) ? "cpu" : device_name(device_));
    }
    if (std::any_of(strides.begin(), strides.end(), [](std::int64_t s) { return s < 0; })) {
      throw_error(ErrorKind::kInvalidArgument, "method '", method, "', input '", name, "': has negative strides ",
                  to_string(strides), ": pass a contiguous copy (numpy.ascontiguousarray)");
    }
  }
  if (spec_.inputs.empty()) return;  // a stock package of which nothing is known: the library checks itself

  SmallVector<std::int64_t, 8> symbols(spec_.symbols.size());
  SmallVector<std::size_t, 8> bound_by(spec_.symbols.size());
  std::fill(symbols.begin(), symbols.end(), -1);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const untorch_view& input = inputs[i];
    const DimSpan sizes = sizes_of(input), strides = strides_of(input);
    const DType dtype = dtype_of(input);
    const TensorSpec& expected = spec_.inputs[i];
    const auto fail = [&](const auto&... parts) {
      throw_error(ErrorKind::kInvalidArgument, "method '", method, "', input '", expected.name, "': expected ",
                  describe(expected), ", got ", dtype_name(dtype), to_string(sizes), parts...);
    };
    if (expected.mutated && input.read_only != 0)
      fail(", read-only: the model writes into this input, pass memory that may be written");
    if (expected.mutated && device_.type == DeviceType::kCUDA && !input_on_cpu(i) &&
        reinterpret_cast<std::uintptr_t>(input.data) % kWrittenAlignment != 0) {
      fail(" at an address that is no multiple of ", kWrittenAlignment,
           ": the model writes into this input, and may write to an aligned copy instead: pass aligned memory "
           "(untorch.zeros, untorch.empty)");
    }
    if (dtype != expected.dtype) fail(": convert it to ", dtype_name(expected.dtype), source_of(expected.dtype));
    if (sizes.size() != expected.shape.size()) fail(" (", sizes.size(), "-D instead of ", expected.shape.size(), "-D)");
    bool empty = false;
    for (std::size_t d = 0; d < sizes.size(); ++d) {
      const DimSpec& dim = expected.shape[d];
      const std::int64_t size = sizes[d];
      empty = empty || size == 0;
      if (dim.kind == DimSpec::kFixed && size != dim.value) fail(": dimension ", d, " must be ", dim.value);
      if (dim.kind != DimSpec::kSymbol) continue;
      if (size < dim.min || size > dim.max) {
        if (dim.max == INT64_MAX) fail(": dimension ", d, " (", dim.text, ") must be at least ", dim.min);
        fail(": dimension ", d, " (", dim.text, ") must be from ", dim.min, " to ", dim.max);
      }
      std::int64_t& value = symbols[dim.symbol];
      if (value >= 0 && value != size) {
        fail(": dimension ", d, " must be ", value, ", as ", dim.text, " is in input '",
             spec_.inputs[bound_by[dim.symbol]].name, "'");
      }
      value = size;
      bound_by[dim.symbol] = i;
    }
    if (expected.value) check_value(method, expected, input, symbols);
    if (empty) continue;
    std::int64_t running = 1;
    for (std::size_t d = sizes.size(); d-- > 0;) {
      const std::int64_t want = expected.contiguous ? running : expected.strides ? (*expected.strides)[d] : strides[d];
      if (sizes[d] != 1 && strides[d] != want && want != TensorSpec::kAnyStride) {
        if (expected.contiguous) {
          fail(" with strides ", to_string(strides), ": it must be contiguous (numpy.ascontiguousarray makes it so)");
        }
        fail(" with strides ", to_string(strides), ": stride ", d, " must be ", want);
      }
      running *= sizes[d];
    }
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const DimSpan sizes = sizes_of(inputs[i]);
    for (std::size_t d = 0; d < sizes.size(); ++d) {
      const DimSpec& dim = spec_.inputs[i].shape[d];
      std::int64_t value = 0;
      if (dim.kind == DimSpec::kExpression && evaluate(dim.tokens, symbols, value) && sizes[d] != value) {
        throw_error(ErrorKind::kInvalidArgument, "method '", method, "', input '", spec_.inputs[i].name, "': expected ",
                    describe(spec_.inputs[i]), ", got ", dtype_name(dtype_of(inputs[i])), to_string(sizes),
                    ": dimension ", d, " must be ", dim.text, " = ", value);
      }
    }
  }
}

TensorPtr borrow_view(const untorch_view& view, const TensorSpec* spec) {
  auto tensor = std::make_unique<Tensor>(borrowed_storage(view), 0, dtype_of(view), sizes_of(view), strides_of(view));
  if (spec == nullptr || (!spec->contiguous && !spec->strides)) return tensor;
  const DimSpan sizes = sizes_of(view);
  Dims& strides = tensor->mutable_strides();
  std::int64_t running = 1;
  for (std::size_t d = sizes.size(); d-- > 0;) {
    const std::int64_t expected = spec->contiguous ? running : (*spec->strides)[d];
    if (sizes[d] == 1 && expected != TensorSpec::kAnyStride) strides[d] = expected;
    running *= sizes[d];
  }
  return tensor;
}

}  // namespace untorch
