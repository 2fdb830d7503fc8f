// Gradients of parameters are sums over all tokens. Each block of tokens has a row of partial sums. The blocks depend
// only on the shape, so the number of threads does not change a bit.
#pragma once
#include "cpu/common.h"

namespace torch_gdn::cpu {

constexpr int64_t kMostBlocks = 256;

// Returns the number of tokens of each block.
inline int64_t tokens_of_block(int64_t tokens, int64_t at_least) {
  return std::max(at_least, ceil_div(tokens, kMostBlocks));
}

inline Tensor partial_sums(int64_t blocks, int64_t columns) {
  return at::zeros({blocks, columns}, at::TensorOptions().dtype(at::kFloat));
}

// Adds up the rows in f64, and the columns of each element of `out`.
inline void add_partial_sums(const Tensor& partials, const Tensor& out) {
  if (out.numel() == 0) return;
  if (partials.numel() == 0) {
    out.zero_();
    return;
  }
  out.copy_(partials.view({partials.size(0), out.numel(), -1}).sum({0, 2}, false, at::kDouble).view_as(out));
}

}  // namespace torch_gdn::cpu
