// What the causal convolution's kernels share. A thread owns `Packet` neighbouring channels of one sequence. Position p
// of the sequence is its token p or, where p is negative, column S + p of its state, or else zero.
#pragma once
#include "common/fragment.h"
#include "common/sequences.h"
#include "common/slots.h"
#include "common/tile.h"
#include "gdn/parameters.h"

static constant constexpr const int kConvolutionTokens = 32;  // as csrc/checks/causal_conv1d.h has it
static constant constexpr const int kConvolutionThreads = 128;

template <int Packet>
struct Channels {
  static_assert(Packet == 1 || Packet == 4, "a thread owns 1 or 4 channels");
  float at[Packet];
};

// Neighbouring channels of one token; where there are 4, their stride is 1.
template <int Packet, typename T>
METAL_FUNC Channels<Packet> load_channels(device const T* source) {
  Channels<Packet> channels;
  if constexpr (Packet == 4) {
    const vec<T, 4> values = *(device const vec<T, 4>*)source;
    UNROLL for (int i = 0; i < 4; ++i) channels.at[i] = float(values[i]);
  } else {
    channels.at[0] = float(source[0]);
  }
  return channels;
}

template <typename T, int Packet>
METAL_FUNC void store_channels(device T* target, Channels<Packet> channels) {
  if constexpr (Packet == 4) {
    vec<T, 4> values;
    UNROLL for (int i = 0; i < 4; ++i) values[i] = T(channels.at[i]);
    *(device vec<T, 4>*)target = values;
  } else {
    target[0] = T(channels.at[0]);
  }
}

template <int Packet>
METAL_FUNC Channels<Packet> no_channels() {
  Channels<Packet> channels;
  UNROLL for (int i = 0; i < Packet; ++i) channels.at[i] = 0.0f;
  return channels;
}

// What lies before the first token: `position` is negative. `state` is that of the thread's first channel.
template <int Packet, typename S>
METAL_FUNC Channels<Packet> load_history(
    device const S* state, constant ConvolutionParameters& parameters, bool has_state, int position) {
  Channels<Packet> channels = no_channels<Packet>();
  if (!has_state) return channels;
  device const S* column = state + (parameters.columns + position) * parameters.state.column;
  UNROLL for (int i = 0; i < Packet; ++i) channels.at[i] = float(column[i * parameters.state.channel]);
  return channels;
}

template <int W, int Packet>
struct Filter {
  static_assert(W >= 2 && W <= 4, "W is 2, 3 or 4");
  Channels<Packet> weight[W];
  Channels<Packet> bias;
};

template <int W, int Packet, typename P>
METAL_FUNC Filter<W, Packet> load_filter(
    device const P* weight, device const P* bias, constant ConvolutionParameters& parameters, int channel) {
  Filter<W, Packet> filter;
  UNROLL for (int i = 0; i < Packet; ++i) {
    device const P* taps = weight + (channel + i) * parameters.weight_channel;
    UNROLL for (int tap = 0; tap < W; ++tap) filter.weight[tap].at[i] = float(taps[tap * parameters.weight_tap]);
    filter.bias.at[i] = parameters.has_bias != 0 ? float(bias[channel + i]) : 0.0f;
  }
  return filter;
}

// y = weight . window + bias, then silu: y / (1 + exp(-y)).
template <int W, int Packet>
METAL_FUNC Channels<Packet> convolve(
    thread const Channels<Packet>* window, thread const Filter<W, Packet>& filter, bool has_silu) {
  Channels<Packet> sum = filter.bias;
  UNROLL for (int tap = 0; tap < W; ++tap) {
    UNROLL for (int i = 0; i < Packet; ++i) sum.at[i] += filter.weight[tap].at[i] * window[tap].at[i];
  }
  if (has_silu) {
    UNROLL for (int i = 0; i < Packet; ++i) sum.at[i] /= 1.0f + exp(-sum.at[i]);
  }
  return sum;
}

template <int W, int Packet>
METAL_FUNC void move_window(thread Channels<Packet>* window) {
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
    Channels<Packet> channels;
    if (position >= 0) {
      channels = load_channels<Packet>(x + position * parameters.x.token);
    } else {
      channels = load_history<Packet>(state, parameters, has_state, position);
    }
    device S* target = new_state + column * parameters.new_state.column;
    UNROLL for (int i = 0; i < Packet; ++i) target[i * parameters.new_state.channel] = S(channels.at[i]);
  }
}
