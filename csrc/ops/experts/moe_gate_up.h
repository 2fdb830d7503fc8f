// Computes hidden[t, j] = silu(x[t] W_gate) * (x[t] W_up) with the weights of expert topk_ids[t, j], and
// shared_hidden[t] in the same way with the weights of the shared expert. Sums are f32, and a value is rounded once.
// The row of a negative id is zeros.
#pragma once
#include "ops/experts/experts.h"

namespace torch_gdn {

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
            shared_gate_proj.has_value() ? empty<Int>({shape.T, shape.IS}, x.options()) : no_output(x.options())};
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

}  // namespace torch_gdn
