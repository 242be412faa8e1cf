// Small-M GEMM (M up to 16 per tile): a linear layer at decode, and the GEMMs of small models.
#pragma once

#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

enum class Activation : std::int8_t { kNone, kRelu, kGeluTanh };

// out[m, n] = activation(alpha · a[m, k] · b[k, n] + beta · c[m, n]), `batch` times, all of one dtype (float32,
// float16, bfloat16, float64), summed in float32 (float64 in itself). Strides are elements; every stride of c may be 0.
struct SmallGemm {
  DType dtype = DType::kFloat32;
  std::int64_t batch = 1, m = 0, n = 0, k = 0;
  const void* a = nullptr;
  std::int64_t a_row = 0, a_col = 0, a_batch = 0;
  const void* b = nullptr;
  std::int64_t b_row = 0, b_col = 0, b_batch = 0;
  const void* c = nullptr;  // null: nothing is added
  std::int64_t c_row = 0, c_col = 0, c_batch = 0;
  void* out = nullptr;  // may be c
  std::int64_t out_row = 0, out_col = 0, out_batch = 0;
  double alpha = 1.0, beta = 1.0;
  Activation activation = Activation::kNone;
  int num_sms = 1;
  bool has_clusters = false;   // sm_90 and newer
  bool pdl = false;            // Launch::pdl
  int max_shared_bytes = 0;    // of a CTA
  bool b_is_constant = false;  // no kernel writes b: PDL kernels read it before the one before them has ended
};

// The kernels by what the operands' strides and addresses allow.
enum class SmallPath : std::int8_t {
  kNone,     // more than the grid takes, or a dtype without a kernel
  kRows,     // b's columns are dense (a linear layer's weight, which is stored transposed): 16-byte loads along k
  kColumns,  // b's rows are dense: 16-byte (or 8-byte) loads along n
  kAny,      // any strides: element by element, for problems that are small altogether
};
SmallPath small_path(const SmallGemm& p);

// Enqueues it; kNoKernel when small_path says kNone. Deterministic: every sum has a fixed order.
int gemm_small(const SmallGemm& p, Stream stream);

}  // namespace untorch::kernels::cuda
