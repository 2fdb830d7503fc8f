#pragma once
#include "ops/gdn/gated_delta_rule.h"

namespace torch_gdn {

// The gradients of the end-to-end prefill ops with final gates. Raw gates have their own gradients.
template <typename Int>
struct ChunkedBackward : GatedDeltaRule<Int> {
  using Shared = ChunkedBackward;

  Tensor grad_o;
  optional<Tensor> grad_final_state, initial_state;

  auto options() {
    return std::tie(grad_o, grad_final_state, this->scale, initial_state, this->use_qk_l2norm, this->state_v_first,
                    this->cu_seqlens, this->head_grouping);
  }

  void check(const char* op) {
    const Check<Int> check(op, "q", this->q);
    this->check_inputs(check);
    auto& s = this->shape;
    check.shape("beta", *this->beta, "[B, T, HV]", {s.B, s.T, s.HV});
    check.is_activation("do", grad_o).shape("[B, T, HV, V]", {s.B, s.T, s.HV, s.V});
    check_sequences(check, s, this->cu_seqlens);
    check_initial_state(check, s, initial_state, this->state_v_first);
    check_initial_state(check, s, grad_final_state, this->state_v_first, "dht");
  }

  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> outputs() const {
    const auto& s = this->shape;
    const auto f32 = this->q.options().dtype(at::kFloat);
    const Tensor dq = empty<Int>({s.B, s.T, s.H, s.K}, this->q.options());
    const Tensor dk = empty<Int>({s.B, s.T, s.H, s.K}, this->q.options());
    const Tensor dv = empty<Int>({s.B, s.T, s.HV, s.V}, this->v.options());
    const bool per_channel = this->channels.gk.has_value();
    const Tensor dg = per_channel ? empty<Int>({s.B, s.T, s.HV, s.K}, f32) : empty<Int>({s.B, s.T, s.HV}, f32);
    return {dq,
            dk,
            dv,
            dg,
            empty<Int>({s.B, s.T, s.HV}, f32),
            final_state(s, this->q, initial_state.has_value(), this->state_v_first)};
  }
};

template <typename Int>
struct ChunkGatedDeltaRuleBackward : ChunkedBackward<Int> {
  static constexpr const char* kSchema =
      "chunk_gated_delta_rule_bwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor do, Tensor? dht=None, "
      "float? scale=None, Tensor? initial_state=None, bool use_qk_l2norm_in_kernel=False, bool state_v_first=False, "
      "Tensor? cu_seqlens=None, str head_grouping='block') -> "
      "(Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dinitial_state)";

  auto arguments() { return std::tuple_cat(this->inputs(), this->options()); }
};

template <typename Int>
struct ChunkKdaBackward : ChunkedBackward<Int> {
  static constexpr const char* kSchema =
      "chunk_kda_bwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor do, Tensor? dht=None, "
      "float? scale=None, Tensor? initial_state=None, bool use_qk_l2norm_in_kernel=False, bool state_v_first=False, "
      "Tensor? cu_seqlens=None, str head_grouping='block') -> "
      "(Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dinitial_state)";

  auto arguments() { return std::tuple_cat(this->kda_inputs(), this->options()); }
};

// The stages of the gradients of the chunked rule, over chunks of 16 tokens, in float32. g is the sum of a chunk's log
// decays up to each token. Gradients of g are those of the log decays.
template <typename Int>
struct ChunkBwdStage {
  static constexpr int64_t kTokens = 16;  // in a chunk, because the Metal kernels have no other size

  Tensor k, g;
  optional<double> scale;
  optional<Tensor> cu_seqlens, chunk_indices;
  int64_t chunk_size = kTokens;

  ChunkShape<Int> shape;

  auto options() { return std::tie(scale, cu_seqlens, chunk_size, chunk_indices); }

  // Checks the sizes, which those of `key` [B, T, H, K] and `value` [B, T, HV, V] give, and g and the sequences.
  void check_shape(const Check<Int>& check, const char* key_name, const Tensor& key, const char* name,
                   const Tensor& value) {
    check.value(chunk_size == kTokens, "chunk_size", "16, the chunk of the gradients", chunk_size);
    check.is_float32(key_name, key).dimensions(4, "[B, T, H, K]");
    check.is_float32(name, value).dimensions(4, "[B, T, HV, V]");
    const auto& s = shape = shape_of<Int>(check, key_name, key, name, value, kTokens);
    check.is_float32("k", k).shape("[B, T, H, K]", {s.B, s.T, s.H, s.K});
    check.is_float32("g", g).shape("[B, T, HV]", {s.B, s.T, s.HV});
    check_sequences(check, shape, cu_seqlens, chunk_indices);
  }

  void check_keys(const Check<Int>& check, const char* name, const Tensor& x) const {
    check.is_float32(name, x).shape("[B, T, HV, K]", {shape.B, shape.T, shape.HV, shape.K});
  }
  void check_values(const Check<Int>& check, const char* name, const Tensor& x) const {
    check.is_float32(name, x).shape("[B, T, HV, V]", {shape.B, shape.T, shape.HV, shape.V});
  }

  Tensor rows(const Int& heads, const Int& columns) const {
    return empty<Int>({shape.B, shape.T, heads, columns}, k.options());
  }
  Tensor numbers() const { return empty<Int>({shape.B, shape.T, shape.HV}, k.options()); }
};

template <typename Int>
struct ChunkBwdDvLocal : ChunkBwdStage<Int> {
  static constexpr const char* kSchema =
      "chunk_bwd_dv_local(Tensor q, Tensor k, Tensor do, Tensor g, float? scale=None, Tensor? cu_seqlens=None, "
      "int chunk_size=16, Tensor? chunk_indices=None) -> Tensor";

  Tensor q, d_o;

  auto arguments() { return std::tuple_cat(std::tie(q, this->k, d_o, this->g), this->options()); }
  void check(const char* op) { this->check_shape(Check<Int>(op, "q", q), "q", q, "do", d_o); }
  Tensor outputs() const { return this->rows(this->shape.HV, this->shape.V); }
};

template <typename Int>
struct ChunkGatedDeltaRuleBwdDhu : ChunkBwdStage<Int> {
  static constexpr const char* kSchema =
      "chunk_gated_delta_rule_bwd_dhu(Tensor q, Tensor k, Tensor w, Tensor do, Tensor dv, Tensor g, Tensor? h0=None, "
      "Tensor? dht=None, float? scale=None, Tensor? cu_seqlens=None, int chunk_size=16, Tensor? chunk_indices=None) "
      "-> (Tensor dh, Tensor dh0, Tensor dv2)";

  Tensor q, w, d_o, dv;
  optional<Tensor> h0, dht;

  auto arguments() { return std::tuple_cat(std::tie(q, this->k, w, d_o, dv, this->g, h0, dht), this->options()); }

  void check(const char* op) {
    const Check<Int> check(op, "q", q);
    this->check_shape(check, "q", q, "do", d_o);
    this->check_keys(check, "w", w);
    this->check_values(check, "dv", dv);
    check_initial_state(check, this->shape, h0, false, "h0");
    check_initial_state(check, this->shape, dht, false, "dht");
  }

  std::tuple<Tensor, Tensor, Tensor> outputs() const {
    const auto& s = this->shape;
    return {empty<Int>({s.B, s.NT, s.HV, s.K, s.V}, q.options()), final_state(s, q, h0.has_value(), false),
            this->rows(s.HV, s.V)};
  }
};

template <typename Int>
struct PrepareWyReprBwd : ChunkBwdStage<Int> {
  static constexpr const char* kSchema =
      "prepare_wy_repr_bwd(Tensor k, Tensor v, Tensor beta, Tensor dw, Tensor du, Tensor g, "
      "Tensor? cu_seqlens=None, Tensor? chunk_indices=None) -> (Tensor dk, Tensor dv, Tensor dbeta, Tensor dg)";

  Tensor v, beta, dw, du;

  auto arguments() { return std::tie(this->k, v, beta, dw, du, this->g, this->cu_seqlens, this->chunk_indices); }

  void check(const char* op) {
    const Check<Int> check(op, "k", this->k);
    this->check_shape(check, "k", this->k, "v", v);
    const auto& s = this->shape;
    check.is_float32("beta", beta).shape("[B, T, HV]", {s.B, s.T, s.HV});
    this->check_keys(check, "dw", dw);
    this->check_values(check, "du", du);
  }

  std::tuple<Tensor, Tensor, Tensor, Tensor> outputs() const {
    const auto& s = this->shape;
    return {this->rows(s.H, s.K), this->rows(s.HV, s.V), this->numbers(), this->numbers()};
  }
};

template <typename Int>
struct ChunkBwdDqkwg : ChunkBwdStage<Int> {
  static constexpr const char* kSchema =
      "chunk_bwd_dqkwg(Tensor q, Tensor k, Tensor v, Tensor do, Tensor h, Tensor dh, Tensor dv, Tensor g, "
      "float? scale=None, Tensor? cu_seqlens=None, int chunk_size=16, Tensor? chunk_indices=None) -> "
      "(Tensor dq, Tensor dk, Tensor dw, Tensor dg)";

  Tensor q, v, d_o, h, dh, dv;

  auto arguments() { return std::tuple_cat(std::tie(q, this->k, v, d_o, h, dh, dv, this->g), this->options()); }

  void check(const char* op) {
    const Check<Int> check(op, "q", q);
    this->check_shape(check, "q", q, "v", v);
    const auto& s = this->shape;
    this->check_values(check, "do", d_o);
    check.is_float32("h", h).shape("[B, NT, HV, K, V]", {s.B, s.NT, s.HV, s.K, s.V});
    check.is_float32("dh", dh).shape("[B, NT, HV, K, V]", {s.B, s.NT, s.HV, s.K, s.V});
    this->check_values(check, "dv", dv);
  }

  std::tuple<Tensor, Tensor, Tensor, Tensor> outputs() const {
    const auto& s = this->shape;
    return {this->rows(s.H, s.K), this->rows(s.H, s.K), this->rows(s.HV, s.K), this->numbers()};
  }
};

}  // namespace torch_gdn
