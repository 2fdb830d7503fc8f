// What the causal convolution's kernels share. A thread owns `Packet` neighbouring channels of one sequence. Position p
// of the sequence is its token p or, where p is negative, column S + p of its state, or else zero.
#pragma once
#include "core/packet.h"
#include "core/parameters.h"
#include "core/sequences.h"
#include "core/slots.h"

static constant constexpr const int kConvolutionThreads = 128;

// What lies before the first token: `position` is negative. `state` is that of the thread's first channel.
template <int Packet, typename S>
METAL_FUNC Values<Packet> load_history(
    device const S* state, constant ConvolutionParameters& parameters, bool has_state, int position) {
  Values<Packet> channels = no_values<Packet>();
  if (!has_state) return channels;
  device const S* column = state + (parameters.columns + position) * parameters.state.column;
  UNROLL for (int i = 0; i < Packet; ++i) channels.at[i] = float(column[i * parameters.state.channel]);
  return channels;
}

template <int W, int Packet>
struct Filter {
  static_assert(W >= 2 && W <= 4, "W is 2, 3 or 4");
  Values<Packet> weight[W];
  Values<Packet> bias;
};

template <int W, int Packet, typename P>
METAL_FUNC Filter<W, Packet> load_filter(
    device const P* weight, device const P* bias, constant ConvolutionParameters& parameters, int channel) {
  Filter<W, Packet> filter;
  UNROLL for (int i = 0; i < Packet; ++i) {
    device const P* taps = weight + (channel + i) * parameters.weight_channel;
    if (W == 4 && parameters.has_tap_vectors != 0) {
      const Values<4> together = load_values<4>(taps);
      UNROLL for (int tap = 0; tap < W; ++tap) filter.weight[tap].at[i] = together.at[tap];
    } else {
      UNROLL for (int tap = 0; tap < W; ++tap) filter.weight[tap].at[i] = float(taps[tap * parameters.weight_tap]);
    }
    filter.bias.at[i] = parameters.has_bias != 0 ? float(bias[channel + i]) : 0.0f;
  }
  return filter;
}

// y = weight . window + bias, then silu: y / (1 + exp(-y)).
template <int W, int Packet>
METAL_FUNC Values<Packet> convolve(
    thread const Values<Packet>* window, thread const Filter<W, Packet>& filter, bool has_silu) {
  Values<Packet> sum = filter.bias;
  UNROLL for (int tap = 0; tap < W; ++tap) {
    UNROLL for (int i = 0; i < Packet; ++i) sum.at[i] += filter.weight[tap].at[i] * window[tap].at[i];
  }
  if (has_silu) {
    UNROLL for (int i = 0; i < Packet; ++i) sum.at[i] /= 1.0f + exp(-sum.at[i]);
  }
  return sum;
}

// The number of the run that a token belongs to (seq_idx): taps do not reach into another run.
METAL_FUNC int64_t run_of(device const int* runs, constant ConvolutionParameters& parameters, int batch, int token) {
  const int64_t at = batch * parameters.segment_batch + token * parameters.segment_token;
  if (parameters.segment_bytes == 4) return runs[at];
  return ((device const int64_t*)runs)[at];
}

// The window with what is of another run set to zero; a run with a negative number gives zeros altogether.
template <int W, int Packet>
METAL_FUNC Values<Packet> convolve_run(
    thread const Values<Packet>* window,
    thread const Filter<W, Packet>& filter,
    device const int* runs,
    constant ConvolutionParameters& parameters,
    Chunk chunk,
    int token) {
  const int64_t run = run_of(runs, parameters, chunk.batch, token);
  Values<Packet> of_run[W];
  UNROLL for (int tap = 0; tap < W; ++tap) {
    const int there = token - (W - 1) + tap;
    const bool is_inside = there >= 0 && run_of(runs, parameters, chunk.batch, max(there, 0)) == run;
    of_run[tap] = window[tap];
    if (!is_inside) of_run[tap] = no_values<Packet>();
  }
  if (run < 0) return no_values<Packet>();
  return convolve<W, Packet>(of_run, filter, parameters.has_silu != 0);
}

template <int W, int Packet>
METAL_FUNC Values<Packet> convolve_token(
    thread const Values<Packet>* window,
    thread const Filter<W, Packet>& filter,
    bool is_present,
    device const int* runs,
    constant ConvolutionParameters& parameters,
    Chunk chunk,
    int token) {
  if (!is_present) return no_values<Packet>();
  if (parameters.segment_bytes != 0) return convolve_run<W, Packet>(window, filter, runs, parameters, chunk, token);
  return convolve<W, Packet>(window, filter, parameters.has_silu != 0);
}

template <int W, int Packet>
METAL_FUNC void move_window(thread Values<Packet>* window) {
  UNROLL for (int tap = 0; tap + 1 < W; ++tap) window[tap] = window[tap + 1];
}

// The state after the last of `tokens` tokens: the last S of the columns before and the tokens. From left to right, so
// that it may lie where the state before lay: a column is read before it is written to.
template <int Packet, typename T, typename S>
METAL_FUNC void write_state(
    device S* new_state,
    device const S* state,
    device const T* x,
    constant ConvolutionParameters& parameters,
    bool has_state,
    int tokens) {
  for (int column = 0; column < parameters.columns; ++column) {
    const int position = tokens - parameters.columns + column;
    Values<Packet> channels;
    if (position >= 0) {
      channels = load_values<Packet>(x + position * parameters.x.token);
    } else {
      channels = load_history<Packet>(state, parameters, has_state, position);
    }
    device S* target = new_state + column * parameters.new_state.column;
    UNROLL for (int i = 0; i < Packet; ++i) target[i * parameters.new_state.channel] = S(channels.at[i]);
  }
}
