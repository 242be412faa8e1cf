// The template instances of attention(), attention_wgmma(), paged_prefill() and paged_decode(), one per file, so that
// they build in parallel.
#pragma once

#include "kernels/attention.h"
#include "kernels/paged_prefill.h"

namespace untorch::kernels::cuda {

int attention_float16(const Attention& problem, const AttentionPlan& plan, Stream stream);
int attention_float16_bias(const Attention& problem, const AttentionPlan& plan, Stream stream);
int attention_bfloat16(const Attention& problem, const AttentionPlan& plan, Stream stream);
int attention_bfloat16_bias(const Attention& problem, const AttentionPlan& plan, Stream stream);
int attention_float32(const Attention& problem, const AttentionPlan& plan, Stream stream);

int attention_wgmma_float16(const Attention& problem, const WgmmaAttentionPlan& plan, Stream stream);
int attention_wgmma_bfloat16(const Attention& problem, const WgmmaAttentionPlan& plan, Stream stream);

int paged_prefill_float16(const PagedPrefill& problem, const PagedPrefillPlan& plan, Stream stream);
int paged_prefill_bfloat16(const PagedPrefill& problem, const PagedPrefillPlan& plan, Stream stream);
int paged_decode_sm90(const PagedPrefill& problem, const PagedDecodePlan& plan, Stream stream);
// Of the paged prefill's tiles: keys, and rows of a row block, 64 for each consumer warpgroup.
constexpr int paged_keys(int width) { return width == 256 ? 80 : 128; }
constexpr int paged_rows(int width) { return width == 64 ? 192 : 128; }

}  // namespace untorch::kernels::cuda
