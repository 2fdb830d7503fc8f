// What the kernels of the delta rule share with their hosts, except those of the gradients.
#pragma once
#include "core/parameters.h"

// The tile of the kernels that carry a state. A threadgroup of 4 simdgroups owns 32 value columns of a head.
GDN_CONSTANT int kStateColumns = 32;
GDN_CONSTANT int kStateThreads = 128;

// The number of threads in a kernel whose threadgroups own one chunk: one simdgroup per 16 tokens.
constexpr int chunk_threads(int chunk_size) { return 2 * chunk_size; }

// The number of heads that a threadgroup owns, one per lane.
GDN_CONSTANT int kCumsumHeads = 32;

struct ChunkLocalCumsumParameters {
  SequenceParameters sequence;
  RowStrides g;
  int32_t g_type;
  int32_t value_heads;
};

struct ChunkScaledDotKktParameters {
  SequenceParameters sequence;
  RowStrides k;
  HeadGroups heads;
  int32_t value_heads;
};

struct SolveTrilParameters {
  SequenceParameters sequence;
  int32_t value_heads;
};

struct RecomputeWUParameters {
  SequenceParameters sequence;
  RowStrides k, v;
  HeadGroups heads;
  int32_t value_heads;
};

struct ChunkFwdIntraParameters {
  SequenceParameters sequence;
  GateParameters gates;
  RowStrides k, v;
  HeadGroups heads;
  int32_t value_heads;
  int32_t members;  // value heads of one key head that a threadgroup owns
};

struct ChunkFwdHParameters {
  SequenceParameters sequence;
  SlotParameters slots;
  CheckpointParameters checkpoints;
  RowStrides k;
  StateStrides initial_state, final_state, h;  // for h, the sequence stride is the stride of chunks
  HeadGroups heads;
  int32_t value_heads;
  int32_t has_initial_state, has_final_state;
};

struct ChunkFwdOParameters {
  SequenceParameters sequence;
  SlotParameters slots;
  RowStrides q, k, o;
  StateStrides h;
  HeadGroups heads;
  int32_t value_heads;
  int32_t output_is_f32;  // if 1, o is f32, else T
  float scale;
};

struct FusedChunkParameters {
  SequenceParameters sequence;
  SlotParameters slots;
  CheckpointParameters checkpoints;
  RowStrides q, k, v, o;
  StateStrides initial_state, final_state;
  GateParameters gates;
  HeadGroups heads;
  int32_t value_heads, value_size;
  int32_t has_initial_state, has_final_state;
  int32_t has_norm;            // if 1, q and k are normalised
  int32_t output_is_f32;       // if 1, o is f32, else T
  int32_t counted_chunk_size;  // chunk size that NT was computed with; 0 skips the check of NT
  float scale;
};

// A thread holds K / 4 floats of S for K up to 128, and K / 8 for larger K. More floats would spill.
constexpr int recurrent_threads(int K) { return K > 128 ? 2 * kStateThreads : kStateThreads; }

// The decays of channels (1 if absent), and beta per value column.
struct ChannelParameters {
  ChannelGateParameters gk, gv;
  int32_t has_vector_beta;
};

struct FusedRecurrentParameters {
  SequenceParameters sequence;
  SlotParameters slots;
  CheckpointParameters checkpoints;
  RowStrides q, k, v, o;
  StateStrides initial_state, final_state;
  GateParameters gates;
  ChannelParameters channels;
  HeadGroups heads;
  int32_t value_heads, value_size;
  int32_t has_initial_state, has_final_state;
  int32_t initial_has_vectors, final_has_vectors;  // if 1, a load or store takes 4 elements of the inner dimension
  int32_t v_type, o_type;                          // ElementType
  int32_t counted_chunk_size;                      // chunk size that NT was computed with; 0 skips the check
  float scale;
};

// A threadgroup owns all columns of V. Each group of 32 columns has as many threads as in the recurrent kernel.
constexpr int decode_threads(int K, int V) { return (V + kStateColumns - 1) / kStateColumns * recurrent_threads(K); }

// The value heads of a key head are neighbours, `head` elements apart. Key heads are `group` elements apart.
struct GroupedStrides {
  int64_t batch, token, group, head;
};

struct GdnDecodeParameters {
  SequenceParameters sequence;
  SlotParameters slots;
  GateParameters gates;  // the head stride applies within a group
  StateStrides states;
  RowStrides o;
  GroupedStrides z;
  int64_t g_group, beta_group;
  int32_t key_heads, value_heads, group_heads;  // H, HV, HV / H
  int32_t has_state_vectors;                    // if 1, a load or store takes 4 elements of the inner dimension
  int32_t z_type, weight_type;                  // ElementType
  int32_t has_sigmoid;                          // if 0, the gate is silu
  int32_t round_norm, round_product;            // 1 to round to o's type before and after the product with the weight
  float scale, eps;
};
