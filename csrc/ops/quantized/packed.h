// Packed weights: w[n, k] = scales[n, k / group] * code[n, k] + biases[n, k / group]. Biases of dtype uint8 are zero
// points, which stand for -scale * zero point; the scales then have 16 bits. A code has 4 or 8 bits. A word holds per =
// 32 / bits codes, and code k of a row has bits (k % per) * bits of word k / per. A group has 32, 64 or 128 codes. The
// shapes give bits and group.
#pragma once
#include "ops/op.h"

namespace torch_gdn {

struct Packing {
  int64_t bits = 0, group = 0;  // 0 if the weights are not packed

  bool operator==(const Packing&) const = default;
};

// The names of a packed matrix's tensors in errors.
struct PackedNames {
  const char *weight, *scales, *biases;
};

// A matrix is packed if it has scales and biases.
struct PackedWeight {
  PackedNames names;
  const Tensor& weight;
  const optional<Tensor>&scales, &biases;
};

constexpr const char* kNoCopyOfWeights = "a last stride of 1 (a step must not copy weights)";

// Weight sizes are constants. A compiled model is specialised for them.
inline int64_t known(int64_t size) { return size; }
inline int64_t known(const c10::SymInt& size) { return size.guard_int(__FILE__, __LINE__); }

inline bool has_zero_points(const Tensor& biases) { return biases.scalar_type() == at::kByte; }

// Checks scales and biases [rows..., K / group], and returns the group.
template <typename Int>
int64_t check_scales(const Check<Int>& check, const PackedNames& names, const Tensor& scales, const Tensor& biases,
                     const Sizes<Int>& rows, int64_t columns) {
  check.is_activation(names.scales, scales);
  check.dimensions(names.scales, scales, int64_t(rows.size()) + 1, "[..., K / group]");
  const int64_t groups = known(size_of<Int>(scales, -1));
  const int64_t group = groups > 0 && columns % groups == 0 ? columns / groups : 0;
  check.value(group == 32 || group == 64 || group == 128, names.scales, "K / 32, K / 64 or K / 128 columns", groups,
              " for K of ", columns);
  const auto sizes = with_last(rows, Int(groups));
  check.shape(names.scales, scales, "[..., K / group]", sizes);
  check_unit_stride(check, names.scales, scales, kNoCopyOfWeights);
  const bool may_have_zero_points = scales.scalar_type() != at::kFloat;
  if (!may_have_zero_points || !has_zero_points(biases)) check.same_dtype(names.biases, biases, names.scales, scales);
  check.shape(names.biases, biases, "[..., K / group]", sizes);
  check_unit_stride(check, names.biases, biases, kNoCopyOfWeights);
  return group;
}

// Checks a weight [rows..., K * bits / 32] that multiplies vectors of K columns.
template <typename Int>
Packing check_packed(const Check<Int>& check, const PackedNames& names, const Tensor& weight, const Tensor& scales,
                     const Tensor& biases, const Sizes<Int>& rows, const Int& columns) {
  check.is_int32(names.weight, weight);
  check.dimensions(names.weight, weight, int64_t(rows.size()) + 1, "[..., K * bits / 32]");
  const int64_t words = known(size_of<Int>(weight, -1)), K = known(columns);
  const int64_t bits = words * 8 == K ? 4 : 8;
  check.value(words > 0 && words * 32 == K * bits, names.weight, "K / 8 words of 4-bit codes or K / 4 of 8-bit codes",
              words, " for K of ", K);
  check.shape(names.weight, weight, "[..., K * bits / 32]", with_last(rows, Int(words)));
  check_unit_stride(check, names.weight, weight, kNoCopyOfWeights);
  return {bits, check_scales(check, names, scales, biases, rows, K)};
}

}  // namespace torch_gdn
