// The window of the convolution's kernels. A thread owns `Width` neighbouring channels of one sequence. Position p of
// the sequence is its token p. A negative p is column end + p of its state, or zero without a state. The history ends
// at S, or earlier if the last tokens of the previous step were not accepted.
#pragma once
#include "core/sequences.h"
#include "core/slots.h"
#include "core/vectors.h"
#include "layers/convolution.h"

template <int Width>
METAL_FUNC Values<Width> from_lane(Values<Width> values, int lane) {
  UNROLL for (int i = 0; i < Width; ++i) values.at[i] = simd_shuffle(values.at[i], ushort(lane));
  return values;
}

// These functions move 32 * Count vectors of a simdgroup that are neighbours in device memory. Each lane owns Count of
// them. The lanes move the vectors together, as whole cache lines, and exchange them by shuffles. If each lane loaded
// its own vectors, it would touch each line Count times. Every lane of the simdgroup must call this. Vectors from
// `available` on are not touched. A lane stores to the addresses that it loaded from, so one tensor may be source and
// target without a barrier. own[i] is vector Count * lane + i, or zeros if there is no such vector.
template <int Count, int Width, typename T>
METAL_FUNC void load_neighbours(device const T* first, int available, int lane, thread Values<Width>* own) {
  Values<Width> lines[Count];
  UNROLL for (int line = 0; line < Count; ++line) {
    const int at = line * 32 + lane;
    lines[line] = no_values<Width>();
    if (at < available) lines[line] = load_values<Width>(first + at * Width);
  }
  UNROLL for (int i = 0; i < Count; ++i) {
    const int at = Count * lane + i;
    UNROLL for (int line = 0; line < Count; ++line) {
      const Values<Width> neighbour = from_lane(lines[line], at % 32);
      if (line == 0 || line == at / 32) own[i] = neighbour;
    }
  }
}

template <int Count, int Width, typename T>
METAL_FUNC void store_neighbours(device T* first, int available, int lane, thread const Values<Width>* own) {
  UNROLL for (int line = 0; line < Count; ++line) {
    const int at = line * 32 + lane;
    Values<Width> values = no_values<Width>();
    UNROLL for (int i = 0; i < Count; ++i) {
      const Values<Width> neighbour = from_lane(own[i], at / Count);
      if (i == at % Count) values = neighbour;
    }
    if (at < available) store_values(first + at * Width, values);
  }
}

// Reads a negative position. `state` points to the state of the thread's first channel.
template <int Width, typename State>
METAL_FUNC Values<Width> load_history(
    device const State* state, constant ConvolutionParameters& parameters, bool has_state, int end, int position) {
  Values<Width> channels = no_values<Width>();
  if (!has_state) return channels;
  device const State* column = state + (end + position) * parameters.state.column;
  UNROLL for (int i = 0; i < Width; ++i) channels.at[i] = float(column[i * parameters.state.channel]);
  return channels;
}

template <int W, int Width>
struct Filter {
  static_assert(W >= 2 && W <= 4, "W is 2, 3 or 4");
  Values<Width> weight[W];
  Values<Width> bias;
};

template <int W, int Width, typename Weight>
METAL_FUNC Filter<W, Width> load_bias(
    device const Weight* bias, constant ConvolutionParameters& parameters, int channel) {
  Filter<W, Width> filter;
  filter.bias = no_values<Width>();
  UNROLL for (int tap = 0; tap < W; ++tap) filter.weight[tap] = no_values<Width>();
  if (parameters.has_bias != 0) {
    UNROLL for (int i = 0; i < Width; ++i) filter.bias.at[i] = float(bias[channel + i]);
  }
  return filter;
}

template <int W, int Width, typename Weight>
METAL_FUNC void load_taps(
    device const Weight* weight,
    constant ConvolutionParameters& parameters,
    int channel,
    thread Filter<W, Width>& filter) {
  UNROLL for (int i = 0; i < Width; ++i) {
    device const Weight* taps = weight + (channel + i) * parameters.weight_channel;
    if (W == 4 && parameters.has_tap_vectors != 0) {
      const Values<4> together = load_values<4>(taps);
      UNROLL for (int tap = 0; tap < W; ++tap) filter.weight[tap].at[i] = together.at[tap];
    } else {
      UNROLL for (int tap = 0; tap < W; ++tap) filter.weight[tap].at[i] = float(taps[tap * parameters.weight_tap]);
    }
  }
}

template <int W, int Width, typename Weight>
METAL_FUNC Filter<W, Width> load_filter(
    device const Weight* weight, device const Weight* bias, constant ConvolutionParameters& parameters, int channel) {
  Filter<W, Width> filter = load_bias<W, Width>(bias, parameters, channel);
  load_taps<W, Width>(weight, parameters, channel, filter);
  return filter;
}

// Loads the taps as whole cache lines if the taps of all channels are neighbours. All lanes of the simdgroup must call
// this, including those beyond the last channel.
template <int W, int Width, typename Weight>
METAL_FUNC Filter<W, Width> load_filter_together(
    device const Weight* weight,
    device const Weight* bias,
    constant ConvolutionParameters& parameters,
    int channel,
    int lane) {
  Filter<W, Width> filter = load_bias<W, Width>(bias, parameters, min(channel, parameters.channels - Width));
  if constexpr (W == 4 && Width == 4) {
    if (parameters.has_tap_vectors != 0 && parameters.weight_channel == W) {
      const int first = channel - lane * Width;  // first channel of the simdgroup
      Values<W> taps[Width];
      load_neighbours<Width>(weight + int64_t(first) * W, parameters.channels - first, lane, taps);
      UNROLL for (int i = 0; i < Width; ++i) {
        UNROLL for (int tap = 0; tap < W; ++tap) filter.weight[tap].at[i] = taps[i].at[tap];
      }
      return filter;
    }
  }
  load_taps<W, Width>(weight, parameters, min(channel, parameters.channels - Width), filter);
  return filter;
}

template <int W, int Width>
METAL_FUNC Values<Width> convolve(
    thread const Values<Width>* window, thread const Filter<W, Width>& filter, bool has_silu) {
  Values<Width> sum = filter.bias;
  UNROLL for (int tap = 0; tap < W; ++tap) {
    UNROLL for (int i = 0; i < Width; ++i) sum.at[i] += filter.weight[tap].at[i] * window[tap].at[i];
  }
  if (has_silu) {
    UNROLL for (int i = 0; i < Width; ++i) sum.at[i] /= 1.0f + exp(-sum.at[i]);
  }
  return sum;
}

// Returns the segment that seq_idx gives for a token.
METAL_FUNC int64_t
segment_of(device const int* seq_idx, constant ConvolutionParameters& parameters, int batch, int token) {
  const int64_t at = batch * parameters.segment_batch + token * parameters.segment_token;
  return read_index(seq_idx, at, parameters.segment_bytes);
}

// Adds the residual before the result is rounded. `residual` points to the token and the thread's first channel.
template <int Width, typename T>
METAL_FUNC void add_residual(
    thread Values<Width>& result, device const T* residual, constant ConvolutionParameters& parameters) {
  if (parameters.has_residual == 0) return;
  const Values<Width> values = load_values<Width>(residual);
  UNROLL for (int i = 0; i < Width; ++i) result.at[i] += values.at[i];
}

// `residual` points to the batch row and the thread's first channel. A sequence without a slot gives zeros, and so does
// a negative segment.
template <int W, int Width, typename T>
METAL_FUNC Values<Width> convolve_token(
    thread const Values<Width>* window,
    thread const Filter<W, Width>& filter,
    device const T* residual,
    bool is_present,
    device const int* seq_idx,
    constant ConvolutionParameters& parameters,
    Chunk chunk,
    int token) {
  if (!is_present) return no_values<Width>();
  Values<Width> result;
  if (parameters.segment_bytes != 0) {
    const int64_t segment = segment_of(seq_idx, parameters, chunk.batch, token);
    if (segment < 0) return no_values<Width>();
    Values<Width> segment_window[W];  // taps whose tokens are in another segment read zero
    UNROLL for (int tap = 0; tap < W; ++tap) {
      const int source_token = token - (W - 1) + tap;
      const bool is_inside =
          source_token >= 0 && segment_of(seq_idx, parameters, chunk.batch, max(source_token, 0)) == segment;
      segment_window[tap] = window[tap];
      if (!is_inside) segment_window[tap] = no_values<Width>();
    }
    result = convolve<W, Width>(segment_window, filter, parameters.has_silu != 0);
  } else {
    result = convolve<W, Width>(window, filter, parameters.has_silu != 0);
  }
  add_residual<Width>(result, residual + token * parameters.residual.token, parameters);
  return result;
}

// This is written out, because a compiler takes a loop for a copy of memory, and then keeps the window in memory.
template <int W, typename T>
METAL_FUNC void move_window(thread T* window) {
  window[0] = window[1];
  if constexpr (W > 2) window[1] = window[2];
  if constexpr (W > 3) window[2] = window[3];
}

// Stores columns of a state from position `first` on. It goes from left to right, so that the new columns may overwrite
// the old state: each column is read before it is overwritten.
template <int Width, typename T, typename State>
METAL_FUNC void write_state(
    device State* new_state,
    device const State* state,
    device const T* x,
    constant ConvolutionParameters& parameters,
    bool has_state,
    int end,
    int first,
    int columns) {
  for (int column = 0; column < columns; ++column) {
    const int position = first + column;
    Values<Width> channels;
    if (position >= 0) {
      channels = load_values<Width>(x + position * parameters.x.token);
    } else {
      channels = load_history<Width>(state, parameters, has_state, end, position);
    }
    device State* target = new_state + column * parameters.new_state.column;
    UNROLL for (int i = 0; i < Width; ++i) target[i * parameters.new_state.channel] = State(channels.at[i]);
  }
}
