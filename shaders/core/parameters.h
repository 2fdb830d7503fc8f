// Parameter blocks of the Gated DeltaNet kernels: one text for Metal and for the C++ that fills them in.
#pragma once
#ifdef __METAL__
#include <metal_stdlib>
#else
#include <cstdint>
#endif

// A number that a kernel and its host both use.
#ifdef __METAL__
#define GDN_CONSTANT static constant constexpr const
#else
#define GDN_CONSTANT constexpr
#endif

// Strides in elements of a [B, T, heads, D] tensor whose last stride is 1.
struct RowStrides {
  int64_t batch, token, head;
};

// Strides in elements of a state [N, HV, K, V] in either layout.
struct StateStrides {
  int64_t sequence, head, key, value;
};

// Which value heads a key head serves: a block of neighbours (divisor: HV / H), or every H-th one (divisor 1).
struct HeadGroups {
  int32_t divisor, modulus;        // the key head of value head hv is hv / divisor % modulus
  int32_t members, member_stride;  // key head h serves h * divisor + m * member_stride for m < members
};

// The dtype of a tensor that a kernel takes as bytes: gates are small, and a conversion would be a dispatch of its own.
enum ElementType { kAbsent = 0, kFloat32 = 1, kFloat16 = 2, kBfloat16 = 3 };

// g and beta [B, T, HV] of any strides (beta [B, T, HV, V] where the kernel takes it), or what they are made of.
struct GateParameters {
  RowStrides g, beta;
  int32_t g_type, beta_type;         // absent: g is 0, beta is 1
  int32_t A_log_type, dt_bias_type;  // [HV]; A_log absent: g is the log decay itself
  float beta_scale;                // beta is a logit, of this times its sigmoid; 0: beta is the step itself
};

// Decays and steps for each channel; an absent one leaves the state as it is.
struct ChannelParameters {
  RowStrides gk, gv;
  int32_t gk_type, gv_type;
  int32_t has_vector_beta;
};

// The tokens of a batch, or of packed sequences whose limits stand in `cu_seqlens`.
struct SequenceParameters {
  int32_t tokens;     // T
  int32_t sequences;  // N; B for a batch
  int32_t packed;     // 1: cu_seqlens[0..N] is read
  int32_t chunks;     // NT: chunks of a batch row, or of all packed sequences with surplus ones at the end
};

// How a kernel finds the state of each sequence in a pool. All zero where the states are those of the sequences in
// turn, and each is read.
struct SlotParameters {
  int64_t index_stride, flag_stride;  // in elements of state_indices and has_initial_state
  int32_t index_bytes;                // 4 or 8; 0: sequence n has slot n
  int32_t has_flags;                  // 1: has_initial_state is read
  int32_t slots;                      // that the pool has
  int32_t null_index;                 // a sequence with this index or a lower one has no slot
  int32_t is_checked;                 // 1: every index is below `slots`, and no slot has two sequences
};

struct LocateSlotsParameters {
  SlotParameters slots;
  int32_t sequences;
};

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
  int32_t members;  // value heads of a key head that a threadgroup owns
};

struct ChunkFwdHParameters {
  SequenceParameters sequence;
  SlotParameters slots;
  RowStrides k;
  StateStrides initial_state, final_state, h;  // h: the sequence stride is that of a chunk
  HeadGroups heads;
  int32_t value_heads;
  int32_t has_initial_state, has_final_state;
};

struct ChunkFwdOParameters {
  SequenceParameters sequence;
  SlotParameters slots;
  RowStrides q, k;
  StateStrides h;
  HeadGroups heads;
  int32_t value_heads;
  int32_t output_is_f32;  // 1: o is f32 whatever q is
  float scale;
};

struct FusedRecurrentParameters {
  SequenceParameters sequence;
  SlotParameters slots;
  RowStrides q, k, v;
  StateStrides initial_state, final_state;
  GateParameters gates;
  ChannelParameters channels;
  HeadGroups heads;
  int32_t value_heads, value_size;
  int32_t has_initial_state, has_final_state;
  int32_t initial_has_vectors, final_has_vectors;  // 1: 4 neighbouring keys can be moved at once
  int32_t output_is_f32;                                 // 1: o is f32 whatever q is
  float scale;
};

struct FusedChunkParameters {
  SequenceParameters sequence;
  SlotParameters slots;
  RowStrides q, k, v;
  StateStrides initial_state, final_state;
  GateParameters gates;
  HeadGroups heads;
  int32_t value_heads, value_size;
  int32_t has_initial_state, has_final_state;
  int32_t has_norm;            // q and k are divided by their norms
  int32_t output_is_f32;             // 1: o is f32 whatever q is
  int32_t counted_chunk_size;  // of the chunks that the caller made room for
  float scale;
};

struct L2NormParameters {
  int32_t tokens, heads;  // the rows are [B, T, H]
  int64_t rows;
  RowStrides x;
  float eps;
};

struct GdnGatingParameters {
  GateParameters gates;
  int32_t tokens, heads;
  int64_t count;
};

struct RmsNormGatedParameters {
  int32_t tokens, heads;  // the rows are [B, T, H]
  int64_t rows;
  RowStrides x, gate;
  float eps;
  int32_t has_weight, has_sigmoid;    // else silu
  int32_t round_norm, round_product;  // to x's type, before and behind the product with the weight
};

// Strides in elements of states [slots, D, S].
struct ColumnStrides {
  int64_t slot, channel, column;
};

struct ConvolutionParameters {
  SequenceParameters sequence;
  SlotParameters slots;
  RowStrides x;                        // the head is the channel
  int64_t weight_channel, weight_tap;  // strides
  ColumnStrides state, new_state;
  int64_t segment_batch, segment_token;           // strides of seq_idx
  int32_t channels, columns;              // D, S
  int32_t has_bias, has_silu, has_state;  // has_state: the states before the first tokens are there
  int32_t segment_bytes;                      // of a number in seq_idx: 4 or 8; 0: there is none
  // 1: the four taps of a channel, and the four columns of its state before and behind, can be moved at once.
  int32_t has_tap_vectors, has_column_vectors;
};
