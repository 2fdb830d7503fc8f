// What the ops on experts' weights have in common.
#pragma once
#include "ops/indices.h"
#include "ops/op.h"

namespace torch_gdn {

// A shared expert, which every token goes through, has id E here: its weights are tensors of their own.
template <typename Int = int64_t>
struct ExpertShape {
  Int T = 0, k = 0;  // tokens, and experts of each
  Int E = 0, D = 0, I = 0;
  Int IS = 0;  // of the shared expert; 0: there is none
};

template <typename Int>
void check_unit_stride(const Check<Int>& check, const char* argument, const Tensor& x) {
  const auto stride = x.sym_stride(-1);
  check.value(sym_eq(stride, c10::SymInt(1)), argument, "a last stride of 1 (a step must not copy weights)", stride);
}

template <typename Int>
void check_weight(const Check<Int>& check, const char* argument, const Tensor& weight, const char* name,
                  const Tensor& x, const char* pattern, std::initializer_list<Int> sizes) {
  check.same_dtype(argument, weight, name, x);
  check.shape(argument, weight, pattern, sizes);
  check_unit_stride(check, argument, weight);
}

// topk_ids [T, k]: below E. A negative id means that the token has one expert fewer.
template <typename Int>
void check_ids(const Check<Int>& check, const Tensor& topk_ids, const ExpertShape<Int>& shape) {
  check.is_index("topk_ids", topk_ids);
  check.shape("topk_ids", topk_ids, "[T, k]", {shape.T, shape.k});
  check.in_range("topk_ids", "1 to 1024 experts per token", shape.k, 1, 1024);
  if constexpr (is_run<Int>) {
    if (!topk_ids.is_cpu()) return;  // the kernel checks ids on the device
    for_each_index(topk_ids, [&](int64_t id, int64_t) {
      check.value(id < shape.E, "topk_ids", "ids below the number of experts", id, " for ", shape.E, " experts");
    });
  }
}

}  // namespace torch_gdn
