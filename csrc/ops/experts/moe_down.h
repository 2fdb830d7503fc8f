// Computes
//     y[t] = sum over j of topk_weights[t, j] (W hidden[t, j])
//          + sigmoid(shared_gate[t]) (W_shared shared_hidden[t]) + residual[t]
// with the weights W of expert topk_ids[t, j]. Sums are f32, in the order of j, with the shared expert and the residual
// last. y is rounded once. A negative id adds nothing.
#pragma once
#include "ops/experts/experts.h"

namespace torch_gdn {

template <typename Int>
struct MoeDown {
  static constexpr const char* kSchema =
      "moe_down(Tensor hidden, Tensor w_down, Tensor topk_weights, Tensor topk_ids, Tensor? shared_hidden=None, "
      "Tensor? shared_down_proj=None, Tensor? shared_gate=None, Tensor? w_scales=None, Tensor? w_biases=None, "
      "Tensor? shared_scales=None, Tensor? shared_biases=None, Tensor? residual=None) -> Tensor";

  Tensor hidden, w_down, topk_weights, topk_ids;
  optional<Tensor> shared_hidden, shared_down_proj, shared_gate, w_scales, w_biases, shared_scales, shared_biases,
      residual;

  ExpertShape<Int> shape;
  Packing packing, shared_packing;

  auto arguments() {
    return std::tie(hidden, w_down, topk_weights, topk_ids, shared_hidden, shared_down_proj, shared_gate, w_scales,
                    w_biases, shared_scales, shared_biases, residual);
  }

  void check(const char* op) {
    const Check<Int> check(op, "hidden", hidden);
    auto& s = shape;
    check.is_activation("hidden", hidden).dimensions(3, "[T, k, I]");
    s.T = size_of<Int>(hidden, 0), s.k = size_of<Int>(hidden, 1), s.I = size_of<Int>(hidden, 2);
    check.value(sym_ge(s.I, Int(1)), "hidden", "at least one column", s.I);
    check.dimensions("w_down", w_down, 3, "[E, D, I]");
    s.E = size_of<Int>(w_down, 0), s.D = size_of<Int>(w_down, 1);
    check.value(sym_ge(s.E, Int(1)), "w_down", "at least one expert", s.E);
    check.value(sym_ge(s.D, Int(1)), "w_down", "at least one row", s.D);
    packing = check_weight<Int>(check, {{"w_down", "w_scales", "w_biases"}, w_down, w_scales, w_biases}, "hidden",
                                hidden, "[E, D, I]", {s.E, s.D}, s.I);
    check.is_activation("topk_weights", topk_weights).shape("[T, k]", {s.T, s.k});
    check.dimensions("topk_ids", topk_ids, 2, "[T, k]");
    check_ids(check, topk_ids, s);
    check_shared(check);
    if (!residual.has_value()) return;
    check.same_dtype("residual", *residual, "hidden", hidden).shape("[T, D]", {s.T, s.D});
  }

  Tensor outputs() const { return empty<Int>({shape.T, shape.D}, hidden.options()); }

 private:
  void check_shared(const Check<Int>& check) {
    auto& s = shape;
    const bool is_shared = shared_hidden.has_value();
    check.value(shared_down_proj.has_value() == is_shared, "shared_down_proj",
                "a tensor if shared_hidden is one, else None", is_shared ? "None" : "a tensor");
    check.value(is_shared || !shared_gate.has_value(), "shared_gate", "None without shared_hidden", "a tensor");
    check_none(check, shared_hidden, "shared_scales", shared_scales);
    check_none(check, shared_hidden, "shared_biases", shared_biases);
    if (!is_shared) return;
    check.same_dtype("shared_hidden", *shared_hidden, "hidden", hidden).dimensions(2, "[T, IS]");
    s.IS = size_of<Int>(*shared_hidden, 1);
    check.value(sym_ge(s.IS, Int(1)), "shared_hidden", "at least one column", s.IS);
    check.shape("shared_hidden", *shared_hidden, "[T, IS]", {s.T, s.IS});
    const PackedNames names{"shared_down_proj", "shared_scales", "shared_biases"};
    shared_packing = check_weight<Int>(check, {names, *shared_down_proj, shared_scales, shared_biases}, "hidden",
                                       hidden, "[D, IS]", {s.D}, s.IS);
    check_shared_packing(check, "shared_scales", packing, shared_packing);
    if (!shared_gate.has_value()) return;
    check.is_activation("shared_gate", *shared_gate).shape("[T, 1]", {s.T, Int(1)});
  }
};

}  // namespace torch_gdn
