// Implements an op on Metal. Use implement<Op, run>(m) in TORCH_LIBRARY_IMPL(gdn, MPS, m).
#pragma once
#include "metal/parameters.h"
#include "ops/op.h"

namespace torch_gdn::metal {

// Under a recorder, no kernel writes the outputs. Zeros keep a model's forward pass finite.
inline void prepare_output(const Tensor& output) {
  if (is_recording()) output.zero_();
}

template <template <typename> class Op, Run<Op> run>
void implement(torch::Library& m) {
  torch_gdn::implement<Op, run, &prepare_output>(m, c10::DispatchKey::MPS);
}

}  // namespace torch_gdn::metal
