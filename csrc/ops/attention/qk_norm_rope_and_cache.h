// Prepares the heads of q and k as `qk_norm_rope` does, and stores k and v in the pages of a cache.
#pragma once
#include "ops/attention/reshape_and_cache.h"
#include "ops/layers/qk_norm_rope.h"

namespace torch_gdn {

template <typename Int>
struct QkNormRopeAndCache {
  static constexpr const char* kSchema =
      "qk_norm_rope_and_cache_(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) key_cache, "
      "Tensor(b!) value_cache, Tensor slot_mapping, Tensor? q_weight=None, Tensor? k_weight=None, float eps=1e-6, "
      "bool zero_centered=False) -> Tensor q_out";

  Tensor q, k, v, cos, sin, key_cache, value_cache, slot_mapping;
  optional<Tensor> q_weight, k_weight;
  double eps;
  bool zero_centered;

  QkNormRope<Int> heads;
  CacheSlots<Int> slots;
  Int HK = 0, DV = 0;

  auto arguments() {
    return std::tie(q, k, v, cos, sin, key_cache, value_cache, slot_mapping, q_weight, k_weight, eps, zero_centered);
  }

  void check(const char* op) {
    heads = {q, k, cos, sin, q_weight, k_weight, eps, zero_centered, false};
    heads.check(op);
    const Check<Int> check(op, "q", q);
    HK = size_of<Int>(k, 2);
    check.same_dtype("v", v, "q", q).dimensions(4, "[B, T, HK, DV]");
    DV = size_of<Int>(v, 3);
    check.shape("v", v, "[B, T, HK, DV]", {heads.B, heads.T, HK, DV});
    slots = {key_cache, value_cache, slot_mapping};
    slots.check(check, heads.B * heads.T, HK, heads.D, DV);
  }

  Tensor outputs() const { return empty({heads.B, heads.T, size_of<Int>(q, 2), heads.D}, q.options()); }
};

}  // namespace torch_gdn
