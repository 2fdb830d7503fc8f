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
using Convolve = void (*)(const ConvolutionRows&);

// One token of some channels. x, states and y have one dtype, and W is 4. The state moves by one column, in registers.
struct ConvolutionStep {
  const void* x;
  const float *weight, *bias;  // [W, kChannels], [kChannels]
  const void* before;          // [channels, S], or nullptr for zeros
  const void* residual;        // as in ConvolutionRows
  void *after, *y;             // `after` may be `before`
  int64_t column_stride;       // of the states: elements between columns if channels are dense; 1 if columns are
  int64_t channels;
  bool silu;
};
using ConvolveStep = void (*)(const ConvolutionStep&);

// Reads an x whose tokens are neighbours and whose channels are `stride` elements apart. Writes rows of
// kTransposedChannels floats.
using ReadTransposed = void (*)(const void* in, int64_t stride, int64_t tokens, int64_t channels, float* out);

// Rows of x, of the residual, and of the outputs. All have one dtype.
struct NormRows {
  const void *x, *residual;           // residual may be nullptr
  void *out, *sum;                    // contiguous; sum = x + residual
  int64_t x_stride, residual_stride;  // elements between rows
  int64_t rows, D;
  const float* weight;  // [D], or nullptr for ones
  float weight_offset;  // added to the weight
  float eps;
  bool round_norm;
};
using NormaliseRows = void (*)(const NormRows&);

// Rows of x, of the gate and of the output.
struct GatedNormRows {
  const void *x, *gate;
  void* out;
  int64_t x_stride, gate_stride;  // elements between rows; `out` is contiguous
  int64_t rows, D;
  const float* weight;  // [D], or nullptr for ones
  float eps;
  bool sigmoid, round_norm, round_product;
};
using NormaliseGatedRows = void (*)(const GatedNormRows&);

// Contiguous rows of one dtype, and of the gate.
struct NormBwdRows {
  const void *dy, *x, *gate, *dh;  // the last two may be nullptr
  void *dx, *dgate;
  int64_t rows, D;
  const float* weight;  // [D], with what is added to it; nullptr for ones
  float eps, count;     // rstd is 1 / sqrt(sum x^2 / count + eps)
  bool sigmoid;
  float* dnormed;  // [D], scratch
  float* dweight;  // [D], to which the rows' gradients are added; may be nullptr
};
using DifferentiateRows = void (*)(const NormBwdRows&);

// Some tokens of one sequence, and some channels. Rows are `stride` elements apart.
struct ConvolveBwdRows {
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
using ConvolveBwd = void (*)(const ConvolveBwdRows&);

struct ConvolutionKernels {
  // Converts rows of x, or of floats, to rows of x's dtype.
  Convolve (*convolve)(at::ScalarType dtype, bool from_f32, int64_t W);
  // S is 3 or 4. Set `dense_channels` if the channels of each column of the states are dense.
  ConvolveStep (*convolve_step)(at::ScalarType dtype, int64_t S, bool dense_channels);
  ReadTransposed (*read_transposed)(at::ScalarType dtype);
  // Reads a dense [channels, S], with S from 2 to 4, as S rows of kChannels floats. The other function writes it back.
  void (*read_columns)(const void* in, at::ScalarType dtype, int64_t channels, int64_t S, float* out);
  void (*write_columns)(const float* in, int64_t channels, int64_t S, at::ScalarType dtype, void* out);
};
const ConvolutionKernels& convolution_kernels();

struct NormKernels {
  NormaliseRows (*normalise_rows)(at::ScalarType dtype, bool has_residual);
};
const NormKernels& norm_kernels();

struct GatedNormKernels {
  NormaliseGatedRows (*normalise_rows)(at::ScalarType x, at::ScalarType gate);
};
const GatedNormKernels& gated_norm_kernels();

struct NormBwdKernels {
  DifferentiateRows (*differentiate_rows)(at::ScalarType x, at::ScalarType gate);
};
const NormBwdKernels& norm_bwd_kernels();

struct ConvolveBwdKernels {
  ConvolveBwd (*convolve_bwd)(at::ScalarType dtype, int64_t W);
};
const ConvolveBwdKernels& convolve_bwd_kernels();

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
