// Runs a Gated DeltaNet layer's decoding step between its projections. It updates both of the layer's pools in place.
// It computes causal_conv1d_update_, then fused_recurrent_gated_delta_rule_ with raw gates and normalised q and k, then
// rms_norm_gated.
// The projections are [q of all heads | k | v], z, b and a. Qwen3-Next has no separate z and a, and groups by key head:
// qkv [q | k | v of r heads | z of r heads] x H, b [b of r heads | a of r heads] x H, with r = HV / H.
#pragma once
#include <string_view>

#include "ops/chunk_shape.h"
#include "ops/gates.h"
#include "ops/layers/causal_conv1d.h"
#include "ops/layers/rows.h"
#include "ops/op.h"
#include "ops/slots.h"

namespace torch_gdn {

template <typename Int>
struct GdnDecode {
  static constexpr const char* kSchema =
      "gdn_decode_(Tensor qkv, Tensor? z, Tensor b, Tensor? a, Tensor conv_weight, Tensor(a!) conv_pool, Tensor A_log, "
      "Tensor? dt_bias, Tensor(b!) state_pool, Tensor? norm_weight=None, Tensor? state_indices=None, "
      "Tensor? has_initial_state=None, int null_index=-1, Tensor? conv_bias=None, str? activation='silu', "
      "bool allow_neg_eigval=False, bool state_v_first=False, str norm_activation='silu', float norm_eps=1e-6, "
      "bool round_norm=False, Tensor? cu_seqlens=None, Tensor? num_accepted_tokens=None, Tensor(c!)? out=None) "
      "-> Tensor o";

  // A threadgroup owns all columns of a head, so that the norm does not need another threadgroup.
  static constexpr int64_t kMostKeys = 128, kMostValues = 192;

  Tensor qkv, b, conv_weight, conv_pool;
  optional<Tensor> z, a, norm_weight, conv_bias;
  GateOptions gates;
  StatePool pool;
  optional<std::string_view> activation;
  bool state_v_first;
  std::string_view norm_activation;
  double norm_eps;
  bool round_norm;
  optional<Tensor> cu_seqlens, out;

  ChunkShape<Int> shape;
  Int D = 0, W = 0, S = 0;  // channels and taps of the convolution, and columns of its state

  auto arguments() {
    return std::tie(qkv, z, b, a, conv_weight, conv_pool, required(gates.A_log), gates.dt_bias, pool.states,
                    norm_weight, pool.indices, pool.has_initial_state, pool.null_index, conv_bias, activation,
                    gates.allow_neg_eigval, state_v_first, norm_activation, norm_eps, round_norm, cu_seqlens,
                    pool.num_accepted_tokens, out);
  }

  bool is_by_key_head() const { return !z.has_value(); }
  // The convolution of x [B, T, D] has one slot per sequence. If each token has a slot, it uses the first one.
  CausalConv1dUpdate<Int> convolution(const Tensor& x, const optional<Tensor>& boundaries) const {
    CausalConv1dUpdate<Int> result;
    result.x = x;
    result.weight = conv_weight;
    result.bias = conv_bias;
    result.activation = activation;
    result.cu_seqlens = boundaries;
    result.shape = shape;
    result.D = D, result.W = W, result.S = S;
    result.pool = pool;
    result.pool.states = conv_pool;
    if (pool.has_slot_per_token()) result.pool.indices = pool.indices->select(1, 0);
    return result;
  }
  bool has_sigmoid() const { return norm_activation == "sigmoid"; }
  // A product of two numbers of o's dtype is rounded to that dtype.
  bool round_product() const {
    return round_norm && norm_weight.has_value() && norm_weight->scalar_type() == qkv.scalar_type();
  }

  void check(const char* op) {
    const Check<Int> check(op, "qkv", qkv);
    gates.use_gate = gates.use_beta_sigmoid = true;
    check.is_activation("qkv", qkv).dimensions(3, "[B, T, D]");
    check_sizes(check);
    check_projections(check);
    check_convolution(check);
    check_norm(check);
    check_sequences(check, shape, cu_seqlens);
    check_states(check);
    if (out.has_value()) {
      const auto& s = shape;
      check.is_output("out", *out, "[B, T, HV, V]", {s.B, s.T, s.HV, s.V}, qkv.scalar_type());
    }
  }

  Tensor outputs() const {
    const auto& s = shape;
    return empty_if<Int>(!out.has_value(), {s.B, s.T, s.HV, s.V}, qkv.options());
  }

 private:
  // The states give HV, K and V. The remaining channels, which q and k share, give H.
  void check_sizes(const Check<Int>& check) {
    auto& s = shape;
    const char* pattern = state_v_first ? "[slots, HV, V, K]" : "[slots, HV, K, V]";
    check.is_activation("state_pool", pool.states).dimensions(4, pattern);
    s.B = size_of<Int>(qkv, 0), s.T = size_of<Int>(qkv, 1);
    s.HV = size_of<Int>(pool.states, 1);
    s.K = size_of<Int>(pool.states, state_v_first ? 3 : 2), s.V = size_of<Int>(pool.states, state_v_first ? 2 : 3);
    check.value(sym_ge(s.HV, Int(1)), "state_pool", "at least one head", s.HV);
    static_assert(kMostKeys == 128 && kMostValues == 192);
    check.in_range("state_pool", "K from 1 to 128", s.K, 1, kMostKeys);
    check.in_range("state_pool", "V from 1 to 192", s.V, 1, kMostValues);
    check.is_activation("conv_weight", conv_weight).dimensions(2, "[D, W]");
    D = size_of<Int>(conv_weight, 0), W = size_of<Int>(conv_weight, 1);
    check.in_range("conv_weight", "W from 2 to 4", W, 2, 4);
    const Int keys = D - s.HV * s.V;
    const char* expected = "D = 2 H K + HV V channels, where HV is a multiple of H";
    check.value(sym_ge(keys, s.K * 2), "conv_weight", expected, D);
    check.value(sym_eq(keys % (s.K * 2), Int(0)), "conv_weight", expected, D);
    s.H = keys / (s.K * 2);
    check.value(sym_eq(s.HV % s.H, Int(0)), "conv_weight", expected, D, ", which gives ", s.H, " for ", s.HV);
  }

  void check_projections(const Check<Int>& check) {
    const auto& s = shape;
    const char* together = "None if z is None (qkv and b then hold z and a by key head), else a tensor";
    check.value(a.has_value() == z.has_value(), "a", together, a.has_value() ? "a tensor" : "None");
    check.is_floating("b", b);
    if (is_by_key_head()) {
      check.shape("qkv", qkv, "[B, T, D + HV V] when z is None", {s.B, s.T, D + s.HV * s.V});
      check.shape("b", b, "[B, T, 2 HV] when a is None", {s.B, s.T, s.HV * 2});
    } else {
      check.shape("qkv", qkv, "[B, T, D]", {s.B, s.T, D});
      check.is_activation("z", *z).shape("[B, T, HV V]", {s.B, s.T, s.HV * s.V});
      check.shape("b", b, "[B, T, HV]", {s.B, s.T, s.HV});
      check.is_floating("a", *a).shape("[B, T, HV]", {s.B, s.T, s.HV});
    }
    check.is_floating("A_log", *gates.A_log).shape("[HV]", {s.HV});
    if (!gates.dt_bias.has_value()) return;
    check.is_floating("dt_bias", *gates.dt_bias).shape("[HV]", {s.HV});
  }

  void check_convolution(const Check<Int>& check) {
    check.dimensions("conv_pool", conv_pool, 3, "[slots, D, S]");
    check.is_activation("conv_pool", conv_pool);
    S = size_of<Int>(conv_pool, 2);
    check.shape("conv_pool", conv_pool, "[slots, D, S]", {size_of<Int>(conv_pool, 0), D, S});
    check.value(sym_ge(S, W - 1), "conv_pool", "a width of at least W - 1", S, " for W = ", W);
    if (conv_bias.has_value()) check.same_dtype("conv_bias", *conv_bias, "conv_weight", conv_weight).shape("[D]", {D});
    check.value(!activation.has_value() || *activation == "silu" || *activation == "swish", "activation",
                "None, 'silu' or 'swish'", "'", activation.value_or(""), "'");
  }

  void check_norm(const Check<Int>& check) {
    if (norm_weight.has_value()) check.is_activation("norm_weight", *norm_weight).shape("[V]", {shape.V});
    check.value(norm_eps >= 0, "norm_eps", "a non-negative number", norm_eps);
    check_activation(check, "norm_activation", norm_activation);
  }

  void check_states(const Check<Int>& check) {
    check_slots(check, shape.N, pool, true);
    const Int slots = size_of<Int>(pool.states, 0), conv_slots = size_of<Int>(conv_pool, 0);
    check.value(sym_eq(conv_slots, slots), "conv_pool", "as many slots as state_pool has", conv_slots, " for ", slots);
    const auto columns = check_columns_of_slots(check, pool, shape, cu_seqlens);
    if (!pool.num_accepted_tokens.has_value()) return;
    const Int kept = S - (W - 2);
    check_tokens_of_sequences(check, "conv_pool", "W - 2 columns plus one per token of a sequence", shape, cu_seqlens,
                              kept);
    check_num_accepted_tokens(check, shape.N, pool, holds(sym_le(*columns, kept)) ? *columns : kept);
  }
};

}  // namespace torch_gdn
