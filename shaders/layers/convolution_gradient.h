// The gradient of a token's sum before the activation, which both kernels of causal_conv1d_bwd compute.
#pragma once
#include "core/exponential.h"
#include "layers/convolution_window.h"

// Returns the taps that a token reads, as a bit for each: those with the token's number in seq_idx.
template <int W>
METAL_FUNC uint taps_of(device const int* seq_idx, constant ConvolutionParameters& parameters, int batch, int token) {
  constexpr uint kAll = (1u << W) - 1u;
  if (parameters.segment_bytes == 0) return kAll;
  const int64_t segment = segment_of(seq_idx, parameters, batch, token);
  if (segment < 0) return 0u;
  uint taps = 0u;
  UNROLL for (int tap = 0; tap < W; ++tap) {
    const int source_token = token - (W - 1) + tap;
    const bool is_inside = source_token >= 0 && segment_of(seq_idx, parameters, batch, max(source_token, 0)) == segment;
    if (is_inside) taps |= 1u << tap;
  }
  return taps;
}

// Turns the gradient of a token's output into that of its sum z. The slope of silu is s(z) (1 + z s(-z)).
template <int W>
METAL_FUNC float gradient_of_sum(
    float dy, thread const Values<1>* window, thread const Filter<W, 1>& filter, uint taps, bool has_silu) {
  if (taps == 0u) return 0.0f;
  if (!has_silu) return dy;
  float z = filter.bias.at[0];
  UNROLL for (int tap = 0; tap < W; ++tap) {
    if ((taps >> tap & 1u) != 0u) z += filter.weight[tap].at[0] * window[tap].at[0];
  }
  const float opened = 1.0f / (1.0f + gate_exp(-z)), closed = 1.0f / (1.0f + gate_exp(z));
  return dy * (opened * (1.0f + z * closed));
}

// Adds what the sums of W tokens give to the first one: the sum of the next token but j reads it with tap W - 1 - j.
template <int W>
METAL_FUNC float gradient_of_token(
    thread const Values<1>* sums, thread const Filter<W, 1>& filter, thread const uint* taps) {
  float gradient = 0.0f;
  UNROLL for (int j = 0; j < W; ++j) {
    if ((taps[j] >> (W - 1 - j) & 1u) != 0u) gradient += filter.weight[W - 1 - j].at[0] * sums[j].at[0];
  }
  return gradient;
}
