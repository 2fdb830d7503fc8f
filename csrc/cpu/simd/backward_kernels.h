// The inner loops of the gradients of the delta rules, in f32. A chunk is a matrix form of the rule: with the decays in
// q_read, k_read and k_write, and S the state before the chunk,
//   r = v - k_read S - L u,  u = beta r,  o = q_read S + P u,  S' = last S + k_write^T u
// where L is strictly lower triangular and P lower triangular. A rule makes these parts from q, k and its log decays,
// and turns their gradients into those of q, k and g. Everything between is the same for both rules.
#pragma once
#include "cpu/simd/gdn_kernels.h"

namespace torch_gdn::cpu {

constexpr int64_t kSquare = kTokens * kTokens;
inline int64_t padded_to_panel(int64_t columns) { return ceil_div(columns, kColumns) * kColumns; }

// What the walk forward leaves for the walk back.
struct ChunkRecord {
  alignas(64) float L[kSquare], P[kSquare];
  alignas(64) float inverse[kSquare];  // (I + beta L)^-1
};

// A chunk has 32 rows, with zeros past its tokens. K and V are multiples of 32, with zeros past the columns. A state is
// V / 32 panels of [K, 32].
struct BackwardTiles {
  int64_t tokens, K, V;
  const float *q, *k;  // rows that read_keys wrote; q is scaled
  alignas(64) float q_read[kTokens * kLargestK], k_read[kTokens * kLargestK], k_write[kTokens * kLargestK];
  alignas(64) float decays[kTokens * kLargestK], left[kTokens * kLargestK];  // of channels; exp(g), and to the end
  alignas(64) float last[kLargestK];
  double sums[kTokens];  // of a head's log decays
  alignas(64) float beta[kTokens];
  alignas(64) float u[kTokens * kLargestV], work[kTokens * kLargestV];
  alignas(64) float d_o[kTokens * kLargestV], du[kTokens * kLargestV];
  alignas(64) float o_across[kTokens * kLargestV], u_across[kTokens * kLargestV], r_across[kTokens * kLargestV];
  alignas(64) float across[kTokens * kLargestK];
  alignas(64) float dq_read[kTokens * kLargestK], dk_read[kTokens * kLargestK], dk_write[kTokens * kLargestK];
  alignas(64) float dlast[kLargestK];  // times last
  alignas(64) float dL[kSquare], dP[kSquare];
  alignas(64) float dbeta[kTokens];
  alignas(64) float dq[kTokens * kLargestK], dk[kTokens * kLargestK];  // dq is that of the scaled q
  alignas(64) float dg[kTokens * kLargestK];                           // one per token if a head has one decay
};

struct BackwardKernels {
  // Writes tokens in f32 as whole chunks of rows of K floats, normalised if requested, and the factors of the norms.
  void (*read_keys)(const HeadRows& x, int64_t tokens, int64_t width, bool normalise, float scale, int64_t K,
                    float* out, float* factors);
  // These two make the parts of a chunk. `g` has one f32 per token, or `width` log decays. L and P are only made if
  // there is a record.
  void (*decay_head)(const HeadRows& g, int64_t width, BackwardTiles& tiles, ChunkRecord* record);
  void (*decay_channels)(const HeadRows& g, int64_t width, BackwardTiles& tiles, ChunkRecord* record);
  // Computes r [32, V] from the values and the inverse. advance() computes the state after the chunk.
  void (*solve)(const HeadRows& v, int64_t columns, const ChunkRecord& record, const float* state, float* r,
                BackwardTiles& tiles);
  void (*advance)(const float* r, const float* from, float* to, BackwardTiles& tiles);
  // Computes the gradients of the parts, of beta and of v, and turns dstate from that after the chunk into that before.
  void (*retreat)(const HeadRows& d_o, const HeadRows& dv, int64_t columns, const ChunkRecord& record, const float* r,
                  const float* state, float* dstate, BackwardTiles& tiles);
  // These two compute dq, dk and dg from the gradients of the parts.
  void (*leave_head)(const ChunkRecord& record, BackwardTiles& tiles);
  void (*leave_channels)(const ChunkRecord& record, BackwardTiles& tiles);
  // Writes gradients [rows, K] of the rows of a chunk that read_keys wrote as those of what it read.
  void (*write_keys)(const float* x, const float* factors, int64_t rows, int64_t width, bool normalised, float scale,
                     float* gradients, int64_t K, const HeadRows& out);
};

const BackwardKernels& backward_kernels();

}  // namespace torch_gdn::cpu
