// What the causal convolution accepts: checks.h, for its ops.
#pragma once
#include <string_view>

#include "ops/slots.h"

namespace torch_gdn {

struct ConvolutionShape {
  ChunkShape sequence;  // B, T, N, NT of blocks of kConvolutionTokens, packed
  int64_t D = 0, W = 0;
  int64_t S = 0;  // columns of a state
  bool silu = false;
};

constexpr int64_t kConvolutionTokens = 32;  // that one threadgroup convolves

inline ConvolutionShape check_convolution(const Check& check, const Tensor& x, const Tensor& weight,
                                          const optional<Tensor>& bias, optional<std::string_view> activation,
                                          const optional<Tensor>& cu_seqlens) {
  check.is_activation("x", x);
  check.dimensions("x", x, 3, "[B, T, D]");
  check.is_activation("weight", weight);
  check.dimensions("weight", weight, 2, "[D, W]");
  ConvolutionShape s{.D = x.size(2), .W = weight.size(1)};
  check.shape("weight", weight, "[D, W]", {s.D, s.W});
  check.value(s.W >= 2 && s.W <= 4, "weight", "W from 2 to 4", s.W);
  if (bias.has_value()) {
    check.same_dtype("bias", *bias, weight, "weight");
    check.shape("bias", *bias, "[D]", {s.D});
  }
  check.value(!activation || *activation == "silu" || *activation == "swish", "activation", "None, 'silu' or 'swish'",
              activation.value_or(""));
  s.silu = activation.has_value();
  s.sequence = {.B = x.size(0), .T = x.size(1), .C = kConvolutionTokens};
  check.sequences(s.sequence, cu_seqlens, std::nullopt);
  return s;
}

inline void check_convolution_state(const Check& check, const char* argument, const Tensor& state,
                                    const ConvolutionShape& s) {
  check.is_activation(argument, state);
  check.value(state.size(2) >= s.W - 1, argument, "a width of at least W - 1", state.size(2), " for W = ", s.W);
}

inline ConvolutionShape check_causal_conv1d(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias,
                                            const optional<Tensor>& initial_state, bool output_final_state,
                                            optional<int64_t> state_width, optional<std::string_view> activation,
                                            const optional<Tensor>& cu_seqlens, const optional<Tensor>& seq_idx) {
  const Check check("causal_conv1d", "x", x);
  auto s = check_convolution(check, x, weight, bias, activation, cu_seqlens);
  s.S = state_width.value_or(s.W);
  if (initial_state.has_value()) {
    check.dimensions("initial_state", *initial_state, 3, "[N, D, S]");
    s.S = initial_state->size(2);
    check.shape("initial_state", *initial_state, "[N, D, S]", {s.sequence.N, s.D, s.S});
    check_convolution_state(check, "initial_state", *initial_state, s);
  }
  check.value(state_width.value_or(s.S) == s.S && s.S >= s.W - 1, "state_width",
              "that of initial_state, or at least W - 1", state_width.value_or(s.S), " for W = ", s.W);
  if (seq_idx.has_value()) {
    check.integers("seq_idx", *seq_idx);
    check.value(seq_idx->device() == x.device(), "seq_idx", "a tensor on the device of x", "one on ",
                seq_idx->device());
    check.shape("seq_idx", *seq_idx, "[B, T]", {s.sequence.B, s.sequence.T});
    check.value(!initial_state.has_value() && !output_final_state && !cu_seqlens.has_value(), "seq_idx",
                "None where there is a cu_seqlens, an initial or a final state", "a tensor");
  }
  return s;
}

inline ConvolutionShape check_causal_conv1d_update_(const Tensor& x, const Tensor& weight, const Tensor& state_pool,
                                                    const optional<Tensor>& state_indices,
                                                    const optional<Tensor>& has_initial_state, int64_t null_index,
                                                    const optional<Tensor>& bias, optional<std::string_view> activation,
                                                    const optional<Tensor>& cu_seqlens) {
  const Check check("causal_conv1d_update_", "x", x);
  auto s = check_convolution(check, x, weight, bias, activation, cu_seqlens);
  check.dimensions("state_pool", state_pool, 3, "[slots, D, S]");
  check.shape("state_pool", state_pool, "[slots, D, S]", {state_pool.size(0), s.D, state_pool.size(2)});
  check_convolution_state(check, "state_pool", state_pool, s);
  s.S = state_pool.size(2);
  check_slots(check, s.sequence.N, state_pool, state_indices, has_initial_state, null_index);
  return s;
}

}  // namespace torch_gdn
