// The template instances of attention() and attention_wgmma(), one per file, so that they build in parallel.
#pragma once

#include "kernels/attention.h"

namespace untorch::kernels::cuda {

int attention_float16(const Attention& problem, const AttentionPlan& plan, Stream stream);
int attention_float16_bias(const Attention& problem, const AttentionPlan& plan, Stream stream);
int attention_bfloat16(const Attention& problem, const AttentionPlan& plan, Stream stream);
int attention_bfloat16_bias(const Attention& problem, const AttentionPlan& plan, Stream stream);
int attention_float32(const Attention& problem, const AttentionPlan& plan, Stream stream);

int attention_wgmma_float16(const Attention& problem, const WgmmaAttentionPlan& plan, Stream stream);
int attention_wgmma_bfloat16(const Attention& problem, const WgmmaAttentionPlan& plan, Stream stream);

}  // namespace untorch::kernels::cuda
