// int4_moe: its arguments, and its implementation on CUDA (int4_moe_cuda.cpp).
#pragma once

#include "cuda/on_device.h"
#include "shims/moe_arguments.h"
#include "tensor/tensor.h"

namespace untorch::shims {

// Of a weight [experts · n, k] as it is stored, with padding.
struct Int4WeightShape {
  std::int64_t n = 0, k = 0;  // of an expert
  int inner_k_tiles = 8;      // for int4_linear's layout
};

struct Int4MoeShape : MoeShape {
  std::int64_t group = 0;
  bool integers = false;  // w4a8_linear's layout, on the CPU alone; else int4_linear's
  Int4WeightShape w13, w2;
};

struct Int4MoeArguments : MoeArguments {
  const Tensor &w13, &w13_scales, &w2, &w2_scales;
  std::int64_t group = 0, intermediate = 0;
};

// Into `into`, or new memory where it is null.
TensorPtr int4_moe_cuda(const char* op, const OnDevice& on, const Int4MoeArguments& given, const Int4MoeShape& shape,
                        const Tensor* into = nullptr);

}  // namespace untorch::shims
