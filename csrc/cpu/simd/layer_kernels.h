// The inner loops of the layers' ops. They work on raw memory, in the best ISA variant for this machine.
#pragma once
#include <c10/core/ScalarType.h>

#include <cstdint>

namespace torch_gdn::cpu {

constexpr int64_t kChannels = 512;            // per work item of a convolution, and per row of its weights and history
constexpr int64_t kTransposedChannels = 128;  // per work item if the tokens of x are neighbours
constexpr int64_t kTransposedTokens = 64;     // tokens transposed at once: 32 KB with 128 channels
constexpr int64_t kLargestW = 4;

// Some tokens and channels. Strides are elements between tokens.
struct ConvolutionRows {
  at::ScalarType dtype;
  bool from_f32;  // whether `in` is f32, whatever the dtype
  int64_t W;
  const void* in;
  int64_t in_stride;
  void* out;
  int64_t out_stride;
  const void* residual;  // added last, with the dtype of `out`; nullptr without a residual
  int64_t residual_stride;
  int64_t tokens, channels;
  bool silu;
  const float *weight, *bias;  // [W, kChannels], [kChannels]
  float* before;  // [W - 1, kChannels]: the tokens before the first; after the call, those before the next one
};

// One token of some channels. x, states and y have one dtype, and W is 4. The state moves by one column, in registers.
struct ConvolutionStep {
  at::ScalarType dtype;
  int64_t S;            // 3 or 4
  bool dense_channels;  // whether the channels of each column of the states are dense, or else its columns
  const void* x;
  const float *weight, *bias;  // [W, kChannels], [kChannels]
  const void* before;          // [channels, S], or nullptr for zeros
  const void* residual;        // as in ConvolutionRows
  void *after, *y;             // `after` may be `before`
  int64_t column_stride;       // of the states: elements between columns if channels are dense; 1 if columns are
  int64_t channels;
  bool silu;
};

// Rows of x, of the residual or the gate, and of the outputs. All but the gate have one dtype.
struct NormRows {
  at::ScalarType dtype, gate_dtype;
  const void *x, *residual, *gate;                 // the last two may be nullptr, and one is
  void *out, *sum;                                 // contiguous; sum = x + residual
  int64_t x_stride, residual_stride, gate_stride;  // elements between rows
  int64_t rows, D;
  const float* weight;  // [D], or nullptr for ones
  float weight_offset;  // added to the weight
  float eps;
  bool round_norm, round_product, sigmoid;  // the last two are the gate's
};

// Contiguous rows of one dtype, and of the gate.
struct NormBwdRows {
  at::ScalarType dtype, gate_dtype;
  const void *dy, *x, *gate, *dh;  // the last two may be nullptr
  void *dx, *dgate;
  int64_t rows, D;
  const float* weight;  // [D], with what is added to it; nullptr for ones
  float eps, count;     // rstd is 1 / sqrt(sum x^2 / count + eps)
  bool sigmoid;
  float* dnormed;  // [D], scratch
  float* dweight;  // [D], to which the rows' gradients are added; may be nullptr
};

// Some tokens of one sequence, and some channels. Rows are `stride` elements apart.
struct ConvolveBwdRows {
  at::ScalarType dtype;
  int64_t W;
  const void *dy, *x;  // of the first token
  void* dx;
  int64_t stride;
  int64_t tokens, after;  // `after` counts tokens of the sequence beyond these
  int64_t channels;
  const float *weight, *bias;  // [W, kChannels], [kChannels]
  const float* before;         // [W - 1, kChannels]: the tokens before the first
  float* dbefore;              // their gradients; nullptr unless they are the state's
  const uint8_t* taps;         // per token, also of `after`: bit `tap` for each tap that it reads; nullptr for all
  const float* dfinal;         // rows of `dfinal_stride` floats, added to the gradients of the tokens from `kept` on
  int64_t dfinal_stride, kept;
  bool silu;
  float *dweight, *dbias;  // [W, kChannels], [kChannels], which are added to
};

struct ConvolutionKernels {
  void (*convolve)(const ConvolutionRows& rows);
  void (*convolve_step)(const ConvolutionStep& step);
  // Reads an x whose tokens are neighbours and whose channels are `stride` elements apart. Writes rows of
  // kTransposedChannels floats.
  void (*read_transposed)(const void* in, at::ScalarType dtype, int64_t stride, int64_t tokens, int64_t channels,
                          float* out);
  // Reads a dense [channels, S], with S from 2 to 4, as S rows of kChannels floats. The other function writes it back.
  void (*read_columns)(const void* in, at::ScalarType dtype, int64_t channels, int64_t S, float* out);
  void (*write_columns)(const float* in, int64_t channels, int64_t S, at::ScalarType dtype, void* out);
  void (*convolve_bwd)(const ConvolveBwdRows& rows);
};
const ConvolutionKernels& convolution_kernels();

struct NormKernels {
  void (*normalise)(const NormRows& rows);
  void (*differentiate)(const NormBwdRows& rows);
};
const NormKernels& norm_kernels();

// One token of a gate whose log decay is -rate softplus(g + bias), or lower_bound sigmoid(rate (g + bias)) with a
// lower_bound below 0.
struct GateBwdRow {
  const float *dy, *g, *rate, *bias;
  float lower_bound;
  int64_t count;
  float *dg, *dA_log, *dbias;  // the last two are added to
};

// The first two functions work in place.
struct GatingKernels {
  // Computes factor softplus(a + bias) for rows [tokens, HV], where factor is -exp(A_log).
  void (*log_decays)(float* a, const float* factor, const float* bias, int64_t tokens, int64_t HV);
  // Computes scale sigmoid(b).
  void (*betas)(float* b, int64_t count, float scale);
  void (*differentiate)(const GateBwdRow& row);
};
const GatingKernels& gating_kernels();

}  // namespace torch_gdn::cpu
