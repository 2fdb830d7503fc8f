// Defines an op together with its CPU kernel, which every op has. Use define<Op, run>(m) in TORCH_LIBRARY_FRAGMENT(gdn,
// m).
#pragma once
#include "ops/op.h"

namespace torch_gdn::cpu {

// Makes the first access to a large output cheap.
void prepare_output(const Tensor& output);

template <template <typename> class Op, Run<Op> run>
void define(torch::Library& m) {
  torch_gdn::define<Op>(m);
  implement<Op, run, &prepare_output>(m, c10::DispatchKey::CPU);
}

}  // namespace torch_gdn::cpu
