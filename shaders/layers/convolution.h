// Defines the arguments of all kernels of the causal convolution.
#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kConvolutionThreads = 128;  // per threadgroup

// Strides in elements of states [slots, D, S].
struct ColumnStrides {
  int64_t slot, channel, column;
};

// The order of the channels in x. The weight and the states have all heads of q, then of k, then of v. x has the same
// order, except that for causal_conv1d_update it may also be ordered by key head:
// [q | k | v of its value heads | as many more] x H.
struct ChannelOrder {
  int32_t keys, values;  // per key head: K and HV / H * V; 0 if x has the weight's order
  int32_t all_keys;      // H K
};

struct ConvolutionParameters {
  SequenceParameters sequence;
  SlotParameters slots;
  CheckpointParameters checkpoints;      // read by causal_conv1d_state
  RowStrides x, residual;                // a head is a channel
  int64_t y_batch, y_token;              // strides of y, whose channels are neighbours
  int64_t weight_channel, weight_tap;    // strides of the weight
  ColumnStrides state, new_state;        // the state before the first token and the state after the last
  int64_t segment_batch, segment_token;  // strides of seq_idx
  ChannelOrder order;
  int32_t channels, columns;              // D, S
  int32_t has_bias, has_silu, has_state;  // has_state: 1 to read `state`
  int32_t has_residual;
  int32_t segment_bytes;                // size of a number in seq_idx: 4 or 8; 0 without seq_idx
  int32_t has_tap_vectors;              // 1 if one load can take the 4 taps of a channel
  int32_t has_column_vectors;           // 1 if one load or store can take the 4 columns of a channel's state
  int32_t has_new_state, has_partials;  // read by the backward
  int32_t keeps_each;                   // 1 to keep the state after each token in the columns, for the next step
};

GDN_CONSTANT int kConvolutionTokens = 32;  // per threadgroup

// The numbers of channels and tokens that a threadgroup owns.
GDN_CONSTANT int kChannelFirstTokens = 64;
GDN_CONSTANT int kChannelFirstChannels = 32;

GDN_CONSTANT int kConvolutionBwdTokens = 128;  // per threadgroup
