// The ops on experts' weights.
#pragma once
#include <string_view>

#include "ops/indices.h"
#include "ops/op.h"
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

// Computes router_logits = x W^T. Products, sums and logits are f32, whatever x's dtype is.
template <typename Int>
struct MoeLogits {
  static constexpr const char* kSchema = "moe_logits(Tensor x, Tensor weight) -> Tensor";

  Tensor x, weight;

  Int T = 0, D = 0, E = 0;

  auto arguments() { return std::tie(x, weight); }

  void check(const char* op) {
    const Check<Int> check(op, "x", x);
    check.is_activation("x", x).dimensions(2, "[T, D]");
    T = size_of<Int>(x, 0), D = size_of<Int>(x, 1);
    check.value(sym_ge(D, Int(1)), "x", "at least one column", D);
    check.dimensions("weight", weight, 2, "[E, D]");
    E = size_of<Int>(weight, 0);
    check.value(sym_ge(E, Int(1)), "weight", "at least one expert", E);
    const optional<Tensor> none;
    check_weight<Int>(check, {{"weight", "", ""}, weight, none, none}, "x", x, "[E, D]", {E}, D);
  }

  Tensor outputs() const { return empty<Int>({T, E}, x.options().dtype(at::kFloat)); }
};

// Chooses each token's experts and their weights. The score is softmax(logits) or sigmoid(logits), in f32. The experts
// with the top_k highest values of score + correction_bias are chosen, the highest first. The lower id wins a tie. A
// weight is the score, without the bias. With groups, only the experts of the topk_group best groups can be chosen. The
// value of a group is the sum of its two highest values with a bias, and its highest value without one.
template <typename Int>
struct MoeRouter {
  static constexpr const char* kSchema =
      "moe_router(Tensor router_logits, int top_k, str scoring='softmax', Tensor? correction_bias=None, int n_group=1, "
      "int topk_group=1, bool renormalize=True, float routed_scaling_factor=1.0) -> "
      "(Tensor topk_weights, Tensor topk_ids)";

  static constexpr int64_t kMostExperts = 1024, kMostGroups = 32, kMostChosen = 32;

  Tensor router_logits;
  int64_t top_k;
  std::string_view scoring;
  optional<Tensor> correction_bias;
  int64_t n_group, topk_group;
  bool renormalize;
  double routed_scaling_factor;

  Int T = 0, E = 0;

  auto arguments() {
    return std::tie(router_logits, top_k, scoring, correction_bias, n_group, topk_group, renormalize,
                    routed_scaling_factor);
  }

  bool has_sigmoid() const { return scoring == "sigmoid"; }

  void check(const char* op) {
    const Check<Int> check(op, "router_logits", router_logits);
    check.is_activation("router_logits", router_logits).dimensions(2, "[T, E]");
    T = size_of<Int>(router_logits, 0), E = size_of<Int>(router_logits, 1);
    check.in_range("router_logits", "1 to 1024 experts", E, 1, kMostExperts);
    check.value(scoring == "softmax" || has_sigmoid(), "scoring", "'softmax' or 'sigmoid'", "'", scoring, "'");
    check.value(n_group >= 1 && n_group <= kMostGroups, "n_group", "1 to 32", n_group);
    check.value(sym_eq(E % Int(n_group), Int(0)), "n_group", "a divisor of the number of experts", n_group, " for ", E);
    check.value(topk_group >= 1 && topk_group <= n_group, "topk_group", "1 to n_group", topk_group, " of ", n_group);
    check.value(top_k >= 1 && top_k <= kMostChosen, "top_k", "1 to 32", top_k);
    check.value(sym_le(Int(top_k), E / Int(n_group) * Int(topk_group)), "top_k",
                "at most the experts that can be chosen", top_k);
    check.value(std::isfinite(routed_scaling_factor), "routed_scaling_factor", "a finite number",
                routed_scaling_factor);
    if (!correction_bias.has_value()) return;
    check.is_activation("correction_bias", *correction_bias).dimensions(1, "[E]");
    const Int size = size_of<Int>(*correction_bias, 0);
    check.value(sym_eq(size, E), "correction_bias", "one value per expert", size, " for ", E, " experts");
  }

  std::tuple<Tensor, Tensor> outputs() const {
    const auto options = router_logits.options();
    return {empty<Int>({T, Int(top_k)}, options.dtype(at::kFloat)),
            empty<Int>({T, Int(top_k)}, options.dtype(at::kInt))};
  }
};

// Computes hidden[t, j] = silu(x[t] W_gate) * (x[t] W_up) with the weights of expert topk_ids[t, j], and
// shared_hidden[t] in the same way with the weights of the shared expert. Sums are f32, and a value is rounded once.
// The row of a negative id is zeros.
template <typename Int>
struct MoeGateUp {
  static constexpr const char* kSchema =
      "moe_gate_up(Tensor x, Tensor w_gate_up, Tensor topk_ids, Tensor? shared_gate_proj=None, "
      "Tensor? shared_up_proj=None, Tensor? w_scales=None, Tensor? w_biases=None, Tensor? shared_gate_scales=None, "
      "Tensor? shared_gate_biases=None, Tensor? shared_up_scales=None, Tensor? shared_up_biases=None) -> "
      "(Tensor hidden, Tensor shared_hidden)";

  Tensor x, w_gate_up, topk_ids;
  optional<Tensor> shared_gate_proj, shared_up_proj;
  optional<Tensor> w_scales, w_biases;
  optional<Tensor> shared_gate_scales, shared_gate_biases, shared_up_scales, shared_up_biases;

  ExpertShape<Int> shape;
  Packing packing, shared_packing;

  auto arguments() {
    return std::tie(x, w_gate_up, topk_ids, shared_gate_proj, shared_up_proj, w_scales, w_biases, shared_gate_scales,
                    shared_gate_biases, shared_up_scales, shared_up_biases);
  }

  void check(const char* op) {
    const Check<Int> check(op, "x", x);
    auto& s = shape;
    check.is_activation("x", x).dimensions(2, "[T, D]");
    s.T = size_of<Int>(x, 0), s.D = size_of<Int>(x, 1);
    check.value(sym_ge(s.D, Int(1)), "x", "at least one column", s.D);
    check.dimensions("w_gate_up", w_gate_up, 3, "[E, 2 I, D]");
    s.E = size_of<Int>(w_gate_up, 0), s.I = size_of<Int>(w_gate_up, 1) / Int(2);
    check.value(sym_ge(s.E, Int(1)), "w_gate_up", "at least one expert", s.E);
    check.value(sym_ge(s.I, Int(1)), "w_gate_up", "at least two rows", size_of<Int>(w_gate_up, 1));
    packing = check_weight<Int>(check, {{"w_gate_up", "w_scales", "w_biases"}, w_gate_up, w_scales, w_biases}, "x", x,
                                "[E, 2 I, D]", {s.E, s.I * Int(2)}, s.D);
    check.dimensions("topk_ids", topk_ids, 2, "[T, k]");
    s.k = size_of<Int>(topk_ids, 1);
    check_ids(check, topk_ids, s);
    check_shared(check);
  }

  std::tuple<Tensor, Tensor> outputs() const {
    return {empty<Int>({shape.T, shape.k, shape.I}, x.options()),
            empty_if<Int>(shared_gate_proj.has_value(), {shape.T, shape.IS}, x.options())};
  }

 private:
  void check_shared(const Check<Int>& check) {
    auto& s = shape;
    check.value(shared_gate_proj.has_value() == shared_up_proj.has_value(), "shared_up_proj",
                "a tensor if shared_gate_proj is one, else None", shared_up_proj.has_value() ? "a tensor" : "None");
    check_none(check, shared_gate_proj, "shared_gate_scales", shared_gate_scales);
    check_none(check, shared_gate_proj, "shared_gate_biases", shared_gate_biases);
    check_none(check, shared_gate_proj, "shared_up_scales", shared_up_scales);
    check_none(check, shared_gate_proj, "shared_up_biases", shared_up_biases);
    if (!shared_gate_proj.has_value()) return;
    check.dimensions("shared_gate_proj", *shared_gate_proj, 2, "[IS, D]");
    s.IS = size_of<Int>(*shared_gate_proj, 0);
    check.value(sym_ge(s.IS, Int(1)), "shared_gate_proj", "at least one row", s.IS);
    const PackedNames gate{"shared_gate_proj", "shared_gate_scales", "shared_gate_biases"};
    const PackedNames up{"shared_up_proj", "shared_up_scales", "shared_up_biases"};
    shared_packing = check_weight<Int>(check, {gate, *shared_gate_proj, shared_gate_scales, shared_gate_biases}, "x", x,
                                       "[IS, D]", {s.IS}, s.D);
    const Packing up_packing = check_weight<Int>(check, {up, *shared_up_proj, shared_up_scales, shared_up_biases}, "x",
                                                 x, "[IS, D]", {s.IS}, s.D);
    check.value(up_packing == shared_packing, "shared_up_proj", "the bits and the group of shared_gate_proj",
                up_packing.bits, " and ", up_packing.group, " for ", shared_packing.bits, " and ",
                shared_packing.group);
    check_shared_packing(check, "shared_gate_scales", packing, shared_packing);
    if (shared_packing.bits != 0) {
      check.same_dtype("shared_up_scales", *shared_up_scales, "shared_gate_scales", *shared_gate_scales);
      if (shared_up_biases.has_value()) {
        check.same_dtype("shared_up_biases", *shared_up_biases, "shared_gate_biases", *shared_gate_biases);
      }
    }
  }
};

// Computes
//     y[t] = sum over j of topk_weights[t, j] (W hidden[t, j])
//          + sigmoid(shared_gate[t]) (W_shared shared_hidden[t]) + residual[t]
// with the weights W of expert topk_ids[t, j]. Sums are f32, in the order of j, with the shared expert and the residual
// last. y is rounded once. A negative id adds nothing.
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
