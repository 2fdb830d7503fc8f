// The ops on experts' weights share this code.
#pragma once
#include "ops/indices.h"
#include "ops/quantized/packed.h"

namespace torch_gdn {

// Every token uses the shared expert. Its id is E here, and its weights are separate tensors.
template <typename Int = int64_t>
struct ExpertShape {
  Int T = 0, k = 0;  // number of tokens, and experts per token
  Int E = 0, D = 0, I = 0;
  Int IS = 0;  // I of the shared expert; 0 if there is none
};

// A matrix [rows..., columns] with x's dtype, or packed if it has scales.
template <typename Int>
Packing check_weight(const Check<Int>& check, const PackedWeight& weight, const char* name, const Tensor& x,
                     const char* pattern, Sizes<Int> rows, const Int& columns) {
  const auto& [of, matrix, scales, biases] = weight;
  if (scales.has_value()) return check_packed(check, of, matrix, *scales, biases, rows, columns);
  check.value(!biases.has_value(), of.biases, "None without scales", "a tensor");
  check.same_dtype(of.weight, matrix, name, x);
  check.shape(of.weight, matrix, pattern, with_last(std::move(rows), columns));
  check_unit_stride(check, of.weight, matrix, kNoCopyOfWeights);
  return {};
}

// Checks that an argument of the shared expert is absent if there is no shared expert.
template <typename Int>
void check_none(const Check<Int>& check, const optional<Tensor>& shared, const char* argument,
                const optional<Tensor>& x) {
  check.value(shared.has_value() || !x.has_value(), argument, "None without a shared expert", "a tensor");
}

// A checkpoint packs either the experts alone, or the shared expert too.
template <typename Int>
void check_shared_packing(const Check<Int>& check, const char* argument, const Packing& experts,
                          const Packing& shared) {
  check.value(experts.bits != 0 || shared.bits == 0, argument, "None when the experts' weights are not packed",
              "a tensor");
}

// The ids in topk_ids [T, k] are below E. A negative id means that the token has one expert fewer.
template <typename Int>
void check_ids(const Check<Int>& check, const Tensor& topk_ids, const ExpertShape<Int>& shape) {
  check.is_index("topk_ids", topk_ids).shape("[T, k]", {shape.T, shape.k});
  check.in_range("topk_ids", "1 to 1024 experts per token", shape.k, 1, 1024);
  if constexpr (is_run<Int>) {
    if (!topk_ids.is_cpu()) return;  // the kernel checks ids on the device
    for_each_index(topk_ids, [&](int64_t id, int64_t) {
      check.value(id < shape.E, "topk_ids", "ids below the number of experts", id, " for ", shape.E, " experts");
    });
  }
}

}  // namespace torch_gdn
