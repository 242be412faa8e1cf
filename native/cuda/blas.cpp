// GEMM by cuBLASLt, with a plan cache: descriptors and algorithm by shape. A known shape costs a lookup and cuBLASLt's
// own call; from the third one on, where that does no more than launch kernels, their launch.
#include "cuda/blas.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "cuda/blas_library.h"
#include "cuda/device.h"
#include "cuda/memory_pool.h"
#include "cuda/recorded_launches.h"
#include "cuda/stream.h"
#include "cuda/tf32.h"

namespace untorch::cuda {
namespace {

using namespace lt;

int type_code(const char* op, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return kReal32;
    case DType::kFloat64:
      return kReal64;
    case DType::kFloat16:
      return kReal16;
    case DType::kBFloat16:
      return kBfloat16;
    case DType::kInt8:
      return kInt8;
    case DType::kInt32:
      return kInt32;
    case DType::kFloat8E4M3FN:
      return kE4m3;
    case DType::kFloat8E5M2:
      return kE5m2;
    case DType::kFloat4E2M1FNx2:
      return kE2m1;
    default:
      throw_error(ErrorKind::kInternal, op, ": cuBLAS has no type for ", dtype_name(dtype));
  }
}

// The largest power of two, up to 256, that the address is a multiple of.
std::uint32_t alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  return address == 0 ? 256 : std::uint32_t{1} << std::min(std::countr_zero(address), 8);
}

// Everything that the kernels of a call depend on besides its addresses; words only, so that it has no padding.
struct Key {
  std::int64_t batch, m, n, k, lda, ldb, ldc, ldd, a_batch, b_batch, c_batch, d_batch, alpha, beta;
  std::int32_t device, a_type, b_type, d_type, bias_type, compute;
  std::uint32_t flags, alignments;  // alignments: the exponents, 4 bits each
  bool operator==(const Key& other) const { return std::memcmp(this, &other, sizeof *this) == 0; }
};
static_assert(sizeof(Key) == 14 * 8 + 8 * 4);

enum : std::uint32_t {
  kTransposeA = 1,
  kTransposeB = 2,
  kHasBias = 4,
  kRelu = 8,
  kGelu = 16,
  kHasScaleA = 32,
  kHasScaleB = 64,
  kHasScaleD = 128,
  kRowwise = 256,
  kFastAccumulation = 512,
  kBlockScales = 1024,
  kScalesOf128 = 2048,
  kHasC = 4096,
};

struct KeyHash {
  std::size_t operator()(const Key& key) const noexcept {
    std::uint64_t words[sizeof(Key) / 8], hash = 0x9e3779b97f4a7c15u;
    std::memcpy(words, &key, sizeof key);
    for (const std::uint64_t word : words) {
      hash = (hash ^ word) * 0xff51afd7ed558ccdu;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

// A prepared GEMM. Layouts and algorithm are only read; a descriptor carries the pointers of a call (bias,
// factors), so each call in flight takes one of its own.
struct Plan {
  bool supported = false;
  int compute = 0, scale = 0;
  Layout a = nullptr, b = nullptr, c = nullptr, d = nullptr;
  Algorithm algorithm{};
  std::size_t workspace_bytes = 0;
  Descriptor shared = nullptr;  // when there are no pointers
  std::mutex mutex;
  std::vector<Descriptor> idle;
  RepeatedCall repeated;

  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    const Functions& library = opened();
    for (const Layout layout : {a, b, c, d}) {
      if (layout != nullptr) (void)library.layout_destroy(layout);
    }
    if (shared != nullptr) (void)library.descriptor_destroy(shared);
    for (const Descriptor descriptor : idle) (void)library.descriptor_destroy(descriptor);
  }
};

bool has_pointers(const Key& key) {
  return (key.flags & (kHasBias | kHasScaleA | kHasScaleB | kHasScaleD | kBlockScales)) != 0;
}

void set_pointers(const char* op, const Functions& library, Descriptor descriptor, const BlasGemm& p) {
  Status status = kOk;
  const auto set = [&](int attribute, const void* pointer) {
    if (pointer != nullptr && status == kOk) {
      status = library.descriptor_set(descriptor, attribute, &pointer, sizeof pointer);
    }
  };
  set(kDescBias, p.bias);
  // cuBLAS's first operand is our second: it computes the transposed GEMM.
  set(kDescScaleA, p.block_scale_b != nullptr ? p.block_scale_b : p.scale_b);
  set(kDescScaleB, p.block_scale_a != nullptr ? p.block_scale_a : p.scale_a);
  set(kDescScaleD, p.scale_d);
  if (status != kOk) throw_status(op, "setting a pointer", status);
}

Descriptor make_descriptor(const char* op, const Functions& library, const Key& key, int compute, int scale) {
  Descriptor descriptor = nullptr;
  Status status = library.descriptor_create(&descriptor, compute, scale);
  if (status != kOk) throw_status(op, "creating a descriptor", status);
  const auto set = [&](int attribute, std::int32_t value) {
    if (status == kOk) status = library.descriptor_set(descriptor, attribute, &value, sizeof value);
  };
  set(kDescTransposeA, (key.flags & kTransposeB) != 0 ? 1 : 0);
  set(kDescTransposeB, (key.flags & kTransposeA) != 0 ? 1 : 0);
  const std::int32_t epilogue =
      ((key.flags & kHasBias) != 0 ? 4 : 0) | ((key.flags & kRelu) != 0 ? 2 : 0) | ((key.flags & kGelu) != 0 ? 32 : 0);
  set(kDescEpilogue, epilogue == 0 ? 1 : epilogue);
  if ((key.flags & kHasBias) != 0) set(kDescBiasType, key.bias_type);
  if ((key.flags & kScalesOf128) != 0) {
    set(kDescScaleModeA, kScaleBlocksOf128);
    set(kDescScaleModeB, kScaleVectorsOf128);
  } else if ((key.flags & (kRowwise | kBlockScales)) != 0) {
    const std::int32_t mode = (key.flags & kRowwise) != 0 ? kScaleOuterVector : kScaleBlocksOf16;
    set(kDescScaleModeA, mode);
    set(kDescScaleModeB, mode);
  }
  if ((key.flags & kFastAccumulation) != 0 && status == kOk) {
    const std::int8_t fast = 1;
    status = library.descriptor_set(descriptor, kDescFastAccumulation, &fast, sizeof fast);
  }
  if (status != kOk) {
    (void)library.descriptor_destroy(descriptor);
    // Scales of rows and blocks are newer than the rest.
    if ((key.flags & (kRowwise | kBlockScales | kScalesOf128)) != 0) return nullptr;
    throw_status(op, "setting up a descriptor", status);
  }
  return descriptor;
}

Layout make_layout(const char* op, const Functions& library, int type, std::int64_t rows, std::int64_t cols,
                   std::int64_t ld, std::int64_t batch, std::int64_t batch_stride) {
  Layout layout = nullptr;
  Status status =
      library.layout_create(&layout, type, static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(cols), ld);
  if (status == kOk && batch > 1) {
    const auto count = static_cast<std::int32_t>(batch);
    status = library.layout_set(layout, kLayoutBatch, &count, sizeof count);
    if (status == kOk) status = library.layout_set(layout, kLayoutBatchStride, &batch_stride, sizeof batch_stride);
  }
  if (status != kOk) throw_status(op, "describing an operand", status);
  return layout;
}

std::size_t workspace_limit(int device) { return (device_properties(device).major >= 9 ? 32u : 8u) << 20; }

std::unique_ptr<Plan> prepare(const char* op, const Functions& library, Handle handle, const Key& key,
                              const BlasGemm& p) {
  auto plan = std::make_unique<Plan>();
  plan->compute = key.compute;
  plan->scale = key.compute == kCompute64 ? kReal64 : key.compute == kComputeInt32 ? kInt32 : kReal32;
  Descriptor descriptor = make_descriptor(op, library, key, plan->compute, plan->scale);
  if (descriptor == nullptr) return plan;
  if (has_pointers(key)) {
    plan->idle.push_back(descriptor);
    set_pointers(op, library, descriptor, p);  // the choice depends on the bias's alignment
  } else {
    plan->shared = descriptor;
  }
  const bool ta = p.a.transposed, tb = p.b.transposed;
  // A row-major matrix is the column-major one of its transpose.
  plan->a = make_layout(op, library, key.b_type, tb ? p.k : p.n, tb ? p.n : p.k, p.b.ld, p.batch, p.b.batch_stride);
  plan->b = make_layout(op, library, key.a_type, ta ? p.m : p.k, ta ? p.k : p.m, p.a.ld, p.batch, p.a.batch_stride);
  // A float8 result has bfloat16 for what is added to it.
  const bool narrow = key.d_type == kE4m3 || key.d_type == kE5m2;
  plan->c = make_layout(op, library, narrow ? kBfloat16 : key.d_type, p.n, p.m, key.ldc, p.batch, key.c_batch);
  plan->d = make_layout(op, library, key.d_type, p.n, p.m, p.ldd, p.batch, p.d_batch_stride);

  Preference preference = nullptr;
  Status status = library.preference_create(&preference);
  const auto set = [&](int attribute, auto value) {
    if (status == kOk) status = library.preference_set(preference, attribute, &value, sizeof value);
  };
  set(kPreferWorkspace, static_cast<std::uint64_t>(workspace_limit(key.device)));
  // In place, sums of half types would be rounded once per split of K.
  const bool is_wide = key.d_type == kReal32 || key.d_type == kReal64 || key.d_type == kInt32;
  set(kPreferReductions,
      is_wide ? kReductionInComputeType | kReductionInPlace : std::uint32_t{kReductionInComputeType});
  set(kPreferAlignmentA, alignment_of(p.b.data));
  set(kPreferAlignmentB, alignment_of(p.a.data));
  set(kPreferAlignmentC, alignment_of(p.c != nullptr ? p.c : p.d));
  set(kPreferAlignmentD, alignment_of(p.d));
  if (status != kOk) throw_status(op, "describing what is wanted", status);
  HeuristicResult result{};
  int count = 0;
  status = library.heuristic(handle, descriptor, plan->a, plan->b, plan->c, plan->d, preference, 1, &result, &count);
  (void)library.preference_destroy(preference);
  if (status == kOk && count > 0 && result.state == kOk) {
    plan->supported = true;
    plan->algorithm = result.algorithm;
    plan->workspace_bytes = result.workspace_bytes;
  } else if (status != kOk && status != kNotSupported && status != 7) {  // 7: a combination that it does not know
    throw_status(op, "choosing an algorithm", status);
  }
  return plan;
}

// Plans are kept for good: as many as a process has different shapes.
struct Plans {
  std::shared_mutex mutex;
  std::unordered_map<Key, std::unique_ptr<Plan>, KeyHash> table;
};
Plans& plans() {
  static Plans& made = *new Plans;
  return made;
}

Plan& plan_for(const char* op, const Functions& library, Handle handle, const Key& key, const BlasGemm& p) {
  Plans& known = plans();
  {
    const std::shared_lock lock(known.mutex);
    if (const auto it = known.table.find(key); it != known.table.end()) return *it->second;
  }
  const RelaxedCapture relaxed;
  std::unique_ptr<Plan> made = prepare(op, library, handle, key, p);
  const std::unique_lock lock(known.mutex);
  // Of two threads that prepared the same, the first one's stays.
  return *known.table.try_emplace(key, std::move(made)).first->second;
}

Key key_of(const char* op, const BlasGemm& p, int device) {
  Key key{};
  key.batch = p.batch, key.m = p.m, key.n = p.n, key.k = p.k;
  key.lda = p.a.ld, key.ldb = p.b.ld, key.ldd = p.ldd;
  key.a_batch = p.a.batch_stride, key.b_batch = p.b.batch_stride, key.d_batch = p.d_batch_stride;
  key.ldc = p.c != nullptr ? p.ldc : p.ldd;
  key.c_batch = p.c != nullptr ? p.c_batch_stride : p.d_batch_stride;
  key.alpha = std::bit_cast<std::int64_t>(p.alpha), key.beta = std::bit_cast<std::int64_t>(p.beta);
  key.device = device;
  key.a_type = type_code(op, p.a.dtype), key.b_type = type_code(op, p.b.dtype), key.d_type = type_code(op, p.d_dtype);
  key.bias_type = p.bias != nullptr ? type_code(op, p.bias_dtype) : 0;
  key.compute = p.a.dtype == DType::kFloat64                    ? kCompute64
                : p.a.dtype == DType::kInt8                     ? kComputeInt32
                : p.a.dtype == DType::kFloat32 && tf32().matmul ? kComputeTf32
                                                                : kCompute32;
  const auto flag = [&](bool on, std::uint32_t bit) { key.flags |= on ? bit : 0; };
  flag(p.a.transposed, kTransposeA), flag(p.b.transposed, kTransposeB);
  flag(p.bias != nullptr, kHasBias);
  flag(p.activation == BlasActivation::kRelu, kRelu), flag(p.activation == BlasActivation::kGeluTanh, kGelu);
  flag(p.scale_a != nullptr, kHasScaleA), flag(p.scale_b != nullptr, kHasScaleB);
  flag(p.scale_d != nullptr, kHasScaleD), flag(p.rowwise_scales, kRowwise);
  flag(p.fast_accumulation, kFastAccumulation), flag(p.block_scale_a != nullptr, kBlockScales);
  flag(p.scales_of_128, kScalesOf128), flag(p.c != nullptr, kHasC);
  int shift = 0;
  for (const void* const pointer : {p.a.data, p.b.data, p.c != nullptr ? p.c : p.d, static_cast<const void*>(p.d),
                                    p.bias, static_cast<const void*>(p.scale_a), static_cast<const void*>(p.scale_b)}) {
    key.alignments |= static_cast<std::uint32_t>(std::countr_zero(alignment_of(pointer))) << shift;
    shift += 4;
  }
  return key;
}

// alpha and beta in the scale type.
struct Factor {
  Factor(double value, int compute) {
    if (compute == kCompute64) {
      std::memcpy(bytes, &value, 8);
    } else if (compute == kComputeInt32) {
      const auto whole = static_cast<std::int32_t>(value);
      std::memcpy(bytes, &whole, 4);
    } else {
      const auto single = static_cast<float>(value);
      std::memcpy(bytes, &single, 4);
    }
  }
  alignas(8) unsigned char bytes[8] = {};
};

// Puts the descriptor back when the call has been enqueued: the library reads it during the call only.
class BorrowedDescriptor {
 public:
  BorrowedDescriptor(const char* op, const Functions& library, const Key& key, Plan& plan, const BlasGemm& p)
      : plan_(plan) {
    if (plan.shared != nullptr) return;
    {
      const std::lock_guard lock(plan.mutex);
      if (!plan.idle.empty()) {
        own_ = plan.idle.back();
        plan.idle.pop_back();
      }
    }
    if (own_ == nullptr) own_ = make_descriptor(op, library, key, plan.compute, plan.scale);
    set_pointers(op, library, own_, p);
  }
  ~BorrowedDescriptor() {
    if (own_ == nullptr) return;
    const std::lock_guard lock(plan_.mutex);
    plan_.idle.push_back(own_);
  }
  BorrowedDescriptor(const BorrowedDescriptor&) = delete;
  BorrowedDescriptor& operator=(const BorrowedDescriptor&) = delete;
  Descriptor get() const { return own_ != nullptr ? own_ : plan_.shared; }

 private:
  Plan& plan_;
  Descriptor own_ = nullptr;
};

// Calls with a reference to each pointer of the call, in the order of its addresses.
template <class Visit>
void for_each_pointer(BlasGemm& p, Visit&& visit) {
  visit(p.a.data), visit(p.b.data), visit(p.c), visit(p.d), visit(p.bias);
  visit(p.scale_a), visit(p.scale_b), visit(p.scale_d), visit(p.block_scale_a), visit(p.block_scale_b);
}

OperandAddresses addresses_of(BlasGemm p, const void* workspace) noexcept {
  OperandAddresses addresses;
  for_each_pointer(p, [&](const void* pointer) { addresses.add(pointer); });
  addresses.add(workspace);
  return addresses;
}

Status multiply(const char* op, const Functions& library, Handle handle, const Key& key, Plan& plan, const BlasGemm& p,
                void* workspace, Stream stream) {
  const BorrowedDescriptor descriptor(op, library, key, plan, p);
  const Factor alpha(p.alpha, key.compute), beta(p.beta, key.compute);
  // A float8 result and what is added to it differ in type, so they cannot be one place; with beta 0 none is read.
  const void* const c = p.c != nullptr ? p.c : element_size(p.d_dtype) == 1 ? nullptr : p.d;
  return library.matmul(handle, descriptor.get(), alpha.bytes, p.b.data, plan.a, p.a.data, plan.b, beta.bytes, c,
                        plan.c, p.d, plan.d, &plan.algorithm, workspace, plan.workspace_bytes, stream);
}

// The call with its operands at other addresses.
Status multiply_at(const char* op, const Functions& library, Handle handle, const Key& key, Plan& plan, BlasGemm p,
                   std::span<const DevicePtr> addresses, Stream stream) {
  std::size_t at = 0;
  for_each_pointer(p, [&]<class T>(T*& pointer) {
    if (pointer != nullptr) pointer = reinterpret_cast<T*>(addresses[at++]);
  });
  void* const workspace = plan.workspace_bytes == 0 ? nullptr : reinterpret_cast<void*>(addresses[at]);
  return multiply(op, library, handle, key, plan, p, workspace, stream);
}

}  // namespace

const char* try_blas(std::string* reason) noexcept {
  const Functions& library = opened();
  if (library.reason.empty()) return library.version.c_str();
  if (reason != nullptr) *reason = library.reason;
  return nullptr;
}

bool blas_gemm(const char* op, const BlasGemm& p, int device, Stream stream) {
  const Functions& library = functions();
  const Handle handle = handle_for(device);
  const Key key = key_of(op, p, device);
  Plan& plan = plan_for(op, library, handle, key, p);
  if (!plan.supported) return false;
  const StorageRef memory = plan.workspace_bytes > 0 ? allocate(plan.workspace_bytes, device) : StorageRef();
  void* const workspace = memory ? memory->data() : nullptr;
  const OperandAddresses addresses = addresses_of(p, workspace);
  if (const RecordedLaunches* const launches = plan.repeated.launches()) [[likely]] {
    launches->launch(addresses.all(), stream);
    return true;
  }
  std::optional<RelaxedCapture> relaxed;  // the algorithm's code may not be loaded yet
  if (is_capturing(stream)) relaxed.emplace();
  const Status status = multiply(op, library, handle, key, plan, p, workspace, stream);
  if (status != kOk) throw_status(op, "the GEMM", status);
  plan.repeated.called(device, stream, addresses.all(), [&](std::span<const DevicePtr> moved, Stream recording) {
    return multiply_at(op, library, handle, key, plan, p, moved, recording) == kOk;
  });
  return true;
}

}  // namespace untorch::cuda
