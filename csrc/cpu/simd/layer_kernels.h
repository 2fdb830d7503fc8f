// The inner loops of the ops beside the delta rule, on raw memory, as compiled for this machine's instruction set
// (sets/, module_kernels.cpp).
#pragma once
#include <c10/core/ScalarType.h>

#include <cstdint>

namespace torch_gdn::cpu {

constexpr int64_t kChannels = 512;        // of a work_item of a convolution: rows of weights and history are so long
constexpr int64_t kTransposedChannels = 128;  // of a work_item whose tokens lie next to each other in memory
constexpr int64_t kTransposedTokens = 64;     // that are transposed at once: with as many channels 32 KB
constexpr int64_t kLargestW = 4;

// Some tokens of a work_item. Strides are elements from token to token.
struct ConvolutionRows {
  const void* in;
  int64_t in_stride;
  void* out;
  int64_t out_stride;
  int64_t tokens, channels;
  const float *weight, *bias;  // [W, kChannels], [kChannels]
  float* before;               // [W - 1, kChannels]: the tokens before the first; after the call, before the next one
};
using Convolve = void (*)(const ConvolutionRows&);

// One token of some channels, everything of one dtype; W is 4. The state's columns move on by one, in registers.
struct ConvolutionStep {
  const void *x, *weight, *bias;  // [channels], [channels, 4], [channels] or nullptr
  const void* before;             // [channels, S], or nullptr: zeros
  void *after, *y;                // `after` may be `before`
  int64_t channels;
};
using ConvolveStep = void (*)(const ConvolutionStep&);

// Channels whose tokens lie next to each other, `stride` elements from channel to channel, as rows of kTransposedChannels.
using ReadTransposed = void (*)(const void* in, int64_t stride, int64_t tokens, int64_t channels, float* out);

// Rows of x, as many of the gate and of the output.
struct NormRows {
  const void *x, *gate;
  void* out;
  int64_t x_stride, gate_stride;  // elements from row to row; those of `out` follow each other
  int64_t rows, D;
  const float* weight;  // [D], or nullptr: ones
  float eps;
  bool sigmoid, round_norm, round_product;
};
using NormaliseRows = void (*)(const NormRows&);

// From rows of x, or (staged) of floats, to rows of x's dtype.
Convolve convolve_kernel(at::ScalarType dtype, bool staged, int64_t W, bool silu);
// S is 3 or 4.
ConvolveStep convolve_step_kernel(at::ScalarType dtype, int64_t S, bool silu);
ReadTransposed read_transposed_kernel(at::ScalarType dtype);
NormaliseRows normalise_rows_kernel(at::ScalarType x, at::ScalarType gate);

}  // namespace torch_gdn::cpu
