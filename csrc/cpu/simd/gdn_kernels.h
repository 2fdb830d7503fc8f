// The inner loops of the chunked ops and of the recurrence. They work on raw memory, in the best ISA variant for this
// machine. A panel is 32 columns (of V) of one head's state, [K, 32] and contiguous. With K = 128 it has 16 KB, half of
// a first-level cache.
#pragma once
#include "cpu/simd/row_kernels.h"
#include "ops/chunk_shape.h"
#include "shaders/core/parameters.h"

namespace torch_gdn::cpu {

constexpr int64_t kTokens = 32;     // most tokens per chunk
constexpr int64_t kColumns = 32;    // columns per panel
constexpr int64_t kRowsAtOnce = 8;  // tiles have a multiple of this many rows; they are zero past the chunk and past K

inline float clamped_log_decay(float g) { return g < kLowestLogDecay ? kLowestLogDecay : g; }  // passes NaN on

inline int64_t padded(int64_t rows) { return ceil_div(rows, kRowsAtOnce) * kRowsAtOnce; }

constexpr int64_t kChannelsAtOnce = 16;  // rows of channels with decays have a multiple of this many floats
inline int64_t padded_channels(int64_t K) { return ceil_div(K, kChannelsAtOnce) * kChannelsAtOnce; }

// The type that a product multiplies: floats, or bf16 numbers in pairs. The numbers of a pair are neighbours along the
// sum of a product, and the first is in the low half. Products of pairs are also summed in f32.
using Pair = uint32_t;
template <typename Operand>
constexpr int64_t kTogether = sizeof(float) / sizeof(Operand);
template <>
inline constexpr int64_t kTogether<Pair> = 2;

// A chunk's tokens of one key head, and their products.
template <typename Operand>
struct KeyTiles {
  static constexpr int64_t kMultiple = kRowsAtOnce;   // K is one
  int64_t tokens, rows, K;                            // rows and K after padding
  alignas(64) Operand q[kTokens * kLargestK];         // [rows, K]
  alignas(64) Operand k[kTokens * kLargestK];         // [rows, K]
  alignas(64) Operand k_across[kLargestK * kTokens];  // [K, 32]
  alignas(64) Operand k_down[kTokens * kLargestK];    // pairs along the tokens (pair_rows); not used with floats
  alignas(64) float k_k[kTokens * kTokens];           // k k^T and q k^T, [rows, 32], up to the diagonal
  alignas(64) float q_k[kTokens * kTokens];
  alignas(64) float q_factor[kTokens],
      k_factor[kTokens];  // scale and 1, times what makes the row's norm 1 if requested
};

// A chunk's tokens of one value head. This does not depend on the state. c is the cumulative sum of g.
template <typename Operand>
struct HeadTiles {
  alignas(64) float update[kTokens * kTokens];    // -A, strictly lower: v_new = (I + A)^-1 beta (v - exp(c) k S)
  alignas(64) Operand scores[kTokens * kTokens];  // scale tril(q k^T exp(c_i - c_j))
  alignas(64) float beta[kTokens];
  alignas(64) float reading[kTokens];   // beta exp(c)
  alignas(64) float querying[kTokens];  // scale exp(c)
  alignas(64) float writing[kTokens];   // exp(c_last - c)
  float base, change;                   // the sum of both is exp(c_last)
};

// The scratch memory of one panel of one chunk.
template <typename Operand>
struct PanelTiles {
  alignas(64) float v[kTokens * kColumns];  // [rows, 32]
  alignas(64) float o[kTokens * kColumns];
  alignas(64) float v_new[kTokens * kColumns];
  alignas(64) Operand v_new_down[kTokens * kColumns];  // pairs along the tokens; not used with floats
  alignas(64) Operand writing[kTokens * kColumns];     // exp(c_last - c) v_new, along the tokens
};

// A chunk's tokens of one key head, if each channel of K has a decay. Rows are K floats apart.
struct ChannelKeys {
  static constexpr int64_t kMultiple = kChannelsAtOnce;
  int64_t tokens, rows, K;                   // rows and K after padding
  alignas(64) float q[kTokens * kLargestK];  // normalised if requested, and scaled
  alignas(64) float k[kTokens * kLargestK];
};

// The same tokens after the decays of a value head. c is the cumulative sum of log decays.
struct ChannelTiles {
  int64_t tokens, rows, K;
  alignas(64) float q[kTokens * kLargestK];              // q exp(c)
  alignas(64) float k[kTokens * kLargestK];              // k exp(c)
  alignas(64) float k_writing[kTokens * kLargestK];      // k exp(c_last - c)
  alignas(64) float base[kLargestK], change[kLargestK];  // as in HeadTiles
  alignas(64) float log_decays[kTokens * kLargestK];
  alignas(64) float left[kTokens * kLargestK];  // c_last - c, up to the tokens processed so far
  alignas(64) float update[kTokens * kTokens];  // these two are as in HeadTiles
  alignas(64) float scores[kTokens * kTokens];
  alignas(64) float beta[kTokens], reading[kTokens], querying[kTokens], writing[kTokens];
};

// g and beta of a value head, token by token. Channels may have a gate: then g is raw, and its log decay is -rate
// softplus(g + bias), or lower_bound sigmoid(rate (g + bias)) with a lower_bound below 0.
struct Gates {
  HeadRows g, beta;   // f32, except the g of channels
  int64_t width = 1;  // K, if channels have decays
  bool gate = false;
  float rate = 1, lower_bound = 0;
  const float* bias = nullptr;  // `padded_channels(width)` values, or nullptr
};

template <typename Operand_, typename Keys_ = KeyTiles<Operand_>, typename Head_ = HeadTiles<Operand_>>
struct ChunkKernels {
  using Operand = Operand_;
  using Keys = Keys_;
  using Head = Head_;
  // Reads the tokens of a chunk (`keys.tokens`, with K columns of `width`) and computes their products.
  void (*read_keys)(const HeadRows& q, const HeadRows& k, int64_t width, bool normalise, float scale, Keys& keys);
  void (*make_head)(const Keys& keys, const Gates& gates, Head& head);
  // Advances one panel by one chunk. Computes `columns` columns of o from those of v, and the state after the chunk.
  // `operand` is the state as an operand. With floats, it is the state itself.
  void (*advance)(const Keys& keys, const Head& head, const HeadRows& v, const HeadRows& o, int64_t columns,
                  float* state, Operand* operand, PanelTiles<Operand>& tiles);
  void (*make_operand)(const float* state, int64_t K, Operand* operand);  // unless it is the state itself
};

const ChunkKernels<float>& chunk_kernels();
// Returns the kernels for bf16, or nullptr if this machine has no instructions for bf16.
const ChunkKernels<Pair>* chunk_kernels_of_pairs();

struct ChannelKernels : ChunkKernels<float, ChannelKeys, ChannelTiles> {
  // Computes the log decays of one raw row of g with any width.
  void (*write_log_decays)(const Gates& gates, const HeadRows& out);
};
const ChannelKernels& channel_kernels();

// The inputs and outputs of the recurrence for some columns of V of one head of one sequence.
struct RecurrentHead {
  HeadRows q, k, v, o;
  HeadRows g, beta;  // one f32 per token; beta is one row if has_vector_beta
  HeadRows gk, gv;   // rows of further decays; data is nullptr if there are no such decays
  int64_t tokens, K, columns;
  float scale;
  bool normalise, has_vector_beta;
};

// f32 rows of the old state, and the address of the new ones, which may be the same.
struct StateRows {
  const float* from;
  float* to;
  int64_t from_stride, to_stride;
  int64_t to_next;  // floats to the next state of this core, which is fetched meanwhile; 0 if there is no next one
};

struct RecurrentKernels {
  // Takes rows [K, columns]. Also reads and writes the columns up to the next multiple of 32. Only a panel may have gv.
  void (*run_key_rows)(const RecurrentHead& head, const StateRows& state);
  // Takes rows [columns, K]. K must be a multiple of 16, `columns` must be a multiple of 4, and there must be no gv.
  void (*run_value_rows)(const RecurrentHead& head, const StateRows& state);
};

const RecurrentKernels& recurrent_kernels();

}  // namespace torch_gdn::cpu
