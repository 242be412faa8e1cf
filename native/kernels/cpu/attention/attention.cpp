// Divides attention among threads; float64, which no model is served in, as two GEMMs with a softmax between.
#include "kernels/cpu/attention/attention.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "kernels/cpu/attention/attention_levels.h"
#include "kernels/cpu/gemm/gemm.h"

namespace untorch::kernels::cpu {
namespace {

struct Free {
  void operator()(void* p) const noexcept { std::free(p); }
};

// Memory that the calling thread keeps between calls, up to a limit; bigger blocks are returned at once.
void* workspace(std::size_t nbytes, std::unique_ptr<void, Free>& owned) {
  constexpr std::size_t kKeep = std::size_t{16} << 20;
  thread_local std::unique_ptr<void, Free> kept;
  thread_local std::size_t kept_bytes = 0;
  const std::size_t rounded = (nbytes + 4095) / 4096 * 4096;
  if (rounded <= kept_bytes) return kept.get();
  void* const fresh = std::aligned_alloc(4096, rounded);
  if (fresh == nullptr) throw std::bad_alloc();
  if (rounded <= kKeep) {
    kept.reset(fresh);
    kept_bytes = rounded;
  } else {
    owned.reset(fresh);
  }
  return fresh;
}

void head_double(const Attention<double>& p, std::int64_t b, std::int64_t h, double* scores) {
  const std::int64_t kv = h / (p.heads / p.kv_heads);
  const auto at = [&](const auto& ref, std::int64_t head) {
    return ref.data + b * ref.batch_stride + head * ref.head_stride;
  };
  kernels::gemm_serial(p.queries, p.keys, p.width, p.scale, {at(p.query, h), p.query.row_stride, p.query.col_stride},
                       {at(p.key, kv), p.key.col_stride, p.key.row_stride}, 0.0, {scores, p.keys, 1});
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  for (std::int64_t i = 0; i < p.queries; ++i) {
    double* const row = scores + i * p.keys;
    double largest = kNone;
    for (std::int64_t j = 0; j < p.keys; ++j) {
      if (p.causal && j > i) row[j] = kNone;
      if (p.mask.data != nullptr) row[j] += at(p.mask, h)[i * p.mask.row_stride + j * p.mask.col_stride];
      largest = std::max(largest, row[j]);
    }
    double sum = 0.0;
    for (std::int64_t j = 0; j < p.keys; ++j) sum += row[j] = largest == kNone ? 0.0 : std::exp(row[j] - largest);
    for (std::int64_t j = 0; j < p.keys; ++j) row[j] /= sum == 0.0 ? 1.0 : sum;
    at(p.logsumexp, h)[i * p.logsumexp.row_stride] = largest == kNone ? 0.0 : largest + std::log(sum);
  }
  kernels::gemm_serial(p.queries, p.width, p.keys, 1.0, {scores, p.keys, 1},
                       {at(p.value, kv), p.value.row_stride, p.value.col_stride}, 0.0,
                       {at(p.out, h), p.out.row_stride, p.out.col_stride});
}

// Calls body(first, last, workspace) for each thread's items: batch × heads × blocks of queries.
template <class Problem, class Body>
void divide(const Problem& p, std::size_t nbytes, Body&& body) {
  const std::int64_t items = p.batch * p.heads * ((p.queries + kQueryBlock - 1) / kQueryBlock);
  if (items == 0) return;
  const double operations =
      4.0 * static_cast<double>(p.batch * p.heads * p.queries) * static_cast<double>(p.keys * p.width);
  int threads = omp_in_parallel() || operations < 1e6 ? 1 : omp_get_max_threads();
  threads = static_cast<int>(std::min<std::int64_t>(threads, items));
  const std::size_t each = (nbytes + 4095) / 4096 * 4096;
  std::unique_ptr<void, Free> owned;
  char* const memory = static_cast<char*>(workspace(each * static_cast<std::size_t>(threads), owned));
  if (threads == 1) return body(0, items, memory);
#pragma omp parallel for schedule(static, 1) num_threads(threads)
  for (int t = 0; t < threads; ++t) {
    body(items * t / threads, items * (t + 1) / threads, memory + static_cast<std::size_t>(t) * each);
  }
}

}  // namespace

void attention(const Attention<float>& p) {
  divide(p, UNTORCH_ISA_CALL(attention_workspace)(p), [&](std::int64_t first, std::int64_t last, void* own) {
    UNTORCH_ISA_CALL(attention_items)(p, first, last, own);
  });
}

void attention(const HalfAttention& p) {
  HalfMath math = HalfMath::kWidened;
  if (p.type == HalfType::kBFloat16) {
    if (cpu_has_amx()) {
      math = HalfMath::kAmx;
    } else if (cpu_has_fast_bf16()) {
      math = HalfMath::kDotBf16;
    }
  }
  const std::size_t each = UNTORCH_ISA_CALL(attention_half_workspace)(p, math);
  divide(p, each, [&](std::int64_t first, std::int64_t last, void* own) {
    UNTORCH_ISA_CALL(attention_half_items)(p, math, first, last, own);
  });
}

void attention(const Attention<double>& p) {
  std::vector<double> scores(static_cast<std::size_t>(std::max<std::int64_t>(p.queries * p.keys, 1)));
  for (std::int64_t b = 0; b < p.batch; ++b) {
    for (std::int64_t h = 0; h < p.heads; ++h) head_double(p, b, h, scores.data());
  }
}

}  // namespace untorch::kernels::cpu
