// Parameter structs that kernels share, for Metal and for the C++ that fills them in.
#pragma once
#ifdef __METAL__
#include <metal_stdlib>
#else
#include <cstdint>
#endif

// A constant of both: program scope is the constant address space in Metal.
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
  float beta_scale;                  // beta is a logit, of this times its sigmoid; 0: beta itself
};

// The tokens of a batch, or of packed sequences with boundaries `cu_seqlens`.
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
