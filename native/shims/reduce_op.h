// The 'reduce' argument of scatter_reduce, index_reduce and segment_reduce.
#pragma once

#include <string_view>

#include "kernels/reduce_op.h"
#include "shims/shim.h"

namespace untorch::shims {

inline kernels::ReduceOp parse_reduce(const char* name, const char* op) {
  using kernels::ReduceOp;
  const std::string_view text = name == nullptr ? "" : name;
  if (text == "sum") return ReduceOp::kSum;
  if (text == "prod") return ReduceOp::kProd;
  if (text == "mean") return ReduceOp::kMean;
  if (text == "amax" || text == "max") return ReduceOp::kMax;
  if (text == "amin" || text == "min") return ReduceOp::kMin;
  throw_error(ErrorKind::kInvalidArgument, op, ": 'reduce' is \"", text,
              "\", expected \"sum\", \"prod\", \"mean\", \"amax\" or \"amin\"");
}

}  // namespace untorch::shims
