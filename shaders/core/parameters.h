// Defines the parameter structs that kernels share with the host.
#pragma once
#ifdef __METAL__
#include <metal_stdlib>
#else
#include <cstdint>
#endif
#if defined(__METAL__) && defined(__FAST_MATH__)
#error "torch_gdn needs safe math: fast math drops infinities and NaN (csrc/metal/library.mm sets the mode)"
#endif

// Metal keeps program-scope constants in the constant address space. A kernel need not use all those of its family.
#ifdef __METAL__
#define GDN_CONSTANT __attribute__((unused)) static constant constexpr const
#else
#define GDN_CONSTANT static constexpr
#endif

// The running op. A kernel's errors start with its name.
struct OpName {
  char text[40];
};

// Strides in elements of a tensor [B, T, heads, D]. The last stride is 1.
struct RowStrides {
  int64_t batch, token, head;
};

// Strides in elements of a state [N, HV, K, V] in either layout.
struct StateStrides {
  int64_t sequence, head, key, value;
};

// Maps value heads to key heads. A key head serves HV / H neighbouring value heads (divisor HV / H), or every H-th one
// (divisor 1).
struct HeadGroups {
  int32_t divisor, modulus;        // the key head of value head hv is hv / divisor % modulus
  int32_t members, member_stride;  // key head h serves h * divisor + m * member_stride for m < members
};

// The dtype of a tensor that is passed as bytes. A conversion of gates on the host would cost a dispatch.
enum ElementType { kAbsent = 0, kFloat32 = 1, kFloat16 = 2, kBfloat16 = 3 };

// g [B, T, HV], and beta [B, T, HV] or [B, T, HV, V], have any strides. Both are final or raw.
struct GateParameters {
  RowStrides g, beta;
  int32_t g_type, beta_type;         // if absent, g is 0 and beta is 1
  int32_t A_log_type, dt_bias_type;  // [HV]; without A_log, g is the log decay
  float beta_scale;                  // beta is beta_scale * sigmoid(beta); 0 if beta is final
};

// Describes the contents of g. A final g holds log decays. A raw g gives the log decay
//     -exp(A_log) softplus(g + dt_bias)  or  lower_bound sigmoid(exp(A_log) (g + dt_bias)).
enum ChannelGateKind { kFinalGate = 0, kSoftplusGate = 1, kBoundedGate = 2 };

// g [B, T, HV, K] has any float dtype. Its last stride is 1.
struct ChannelGateParameters {
  RowStrides g;
  int32_t g_type;
  int32_t kind;                      // ChannelGateKind
  int32_t A_log_type, dt_bias_type;  // [HV] and [HV, K]; zeros if absent
  float lower_bound;
};

struct SequenceParameters {
  int64_t boundary_stride;  // in elements of cu_seqlens
  int32_t boundary_bytes;   // size of a number in cu_seqlens: 4 or 8; 0 for a batch, which has no cu_seqlens
  int32_t tokens;           // T
  int32_t sequences;        // N; B for a batch
  int32_t chunks;           // NT: per batch row, or for all packed sequences; surplus chunks are at the end
  OpName op;
};

// Maps sequences, or their tokens, to slots in a pool of states. If all fields are zero, sequence n has state n.
struct SlotParameters {
  int64_t index_stride, flag_stride;  // in elements of state_indices and has_initial_state
  int64_t row_gap;                    // elements to skip at the end of a row of state_indices [N, columns]
  int32_t index_bytes;                // size of an index: 4 or 8; 0 if sequence n has slot n
  int32_t has_flags;                  // 1 to read has_initial_state
  int32_t slots;           // number of slots in the pool; 0 if states are read from one tensor and written to another
  int32_t null_index;      // indices up to this one mean "no slot"
  int32_t is_checked;      // 1 if the host checked that indices are below `slots` and distinct
  int32_t columns;         // columns of state_indices [N, columns], one slot per token; 0 for one slot per sequence
  int32_t accepted_bytes;  // size of a number in num_accepted_tokens: 4 or 8; 0 if there is none
  int64_t accepted_stride;
};

// A checkpoint stores the state after some tokens of a sequence in a second slot. If all fields are zero, there are no
// checkpoints.
struct CheckpointParameters {
  int64_t offset_stride, index_stride;
  int32_t offset_bytes, index_bytes;  // size of a number: 4 or 8
  int32_t null_index;                 // indices up to this one mean "no slot"
  int32_t multiple;                   // offsets are multiples of this; 0 if there are no checkpoints
};

struct LocateSlotsParameters {
  SlotParameters slots;
  int32_t indices;
  OpName op;
};

// The kernel adds this to the squared length of q and k when it normalises them, so that rows of zeros stay zero.
GDN_CONSTANT float kNormEps = 1e-6f;

// Log decays are clamped at this value. In f32, exp is 0 from -104 on, so the clamp changes no decay; it keeps the
// digits of g_cumsum.
GDN_CONSTANT float kLowestLogDecay = -104.0f;

// The template argument Bits of a matrix of e4m3 numbers, or of e2m1 numbers with e8m0 scales, in the place of a number
// of bits.
enum { kE4M3 = 43, kE2M1 = 21 };

// Describes one matrix of weights, or one per expert. Strides are in elements. The last strides are 1.
struct MatrixParameters {
  int64_t expert_stride, row_stride;
  // The strides of the scales and biases of packed weights.
  int64_t scales_expert_stride, scales_row_stride, biases_expert_stride, biases_row_stride;
  int16_t scale_type;       // ElementType
  int16_t has_zero_points;  // 1 if biases are zero points in bytes
  int32_t group_shift;      // a group has 1 << group_shift columns
  int32_t row_shift;        // of e4m3 numbers, 1 << row_shift rows share a scale
  int32_t columns;          // of e4m3 numbers
};
