// An op on the CPU: implement<Op, run>(m) in TORCH_LIBRARY_IMPL(gdn, CPU, m).
#pragma once
#include "cpu/outputs.h"
#include "ops/op.h"

namespace torch_gdn::cpu {

template <template <typename> class Op, auto run>
void implement(torch::Library& m) {
  torch_gdn::implement<Op, run, &prepare_output>(m);
}

}  // namespace torch_gdn::cpu
