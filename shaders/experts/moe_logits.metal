// Computes logits = x W^T in f32. A threadgroup owns kLogitsExperts rows of W and Most tokens. Its simdgroups divide
// the columns, so that the few rows of a router keep many simdgroups busy. A lane reads Width columns at a time of each
// row and of each token, straight from device memory, because no other lane of the threadgroup needs them. Registers: a
// sum for each row and token. Threadgroup memory: the sums of each simdgroup. The order of a token's sums depends
// neither on Most nor on the other tokens.
// Layout: x [M, K] and W [N, K] with strides; logits [M, N].
#include "core/vectors.h"
#include "experts/few_tokens.h"
#include "experts/parameters.h"
#include "quantized/parameters.h"

template <typename T, int Most, int Width>
[[kernel]] void moe_logits(
    device const T* x [[buffer(0)]],
    device const T* weight [[buffer(1)]],
    device float* logits [[buffer(2)]],
    constant QuantizedLinearParameters& parameters [[buffer(3)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int kSums = kLogitsExperts * Most;
  constexpr int kStep = kLogitsSimdgroups * 32 * Width;
  static_assert(Most <= kLogitsTokens && kSums <= 32, "a lane returns each sum");
  threadgroup float simdgroup_sums[kLogitsSimdgroups * kSums];
  const int first_expert = int(group.x) * kLogitsExperts;
  const int first_token = int(group.y) * Most;
  float sums[kSums];
  UNROLL for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
  for (int column = (int(simdgroup) * 32 + int(lane)) * Width; column < parameters.K; column += kStep) {
    Values<Width> rows[kLogitsExperts];
    UNROLL for (int e = 0; e < kLogitsExperts; ++e) {
      const int64_t row = min(first_expert + e, parameters.N - 1);
      rows[e] = load_values<Width>(weight + row * parameters.weight.row_stride + column);
    }
    UNROLL for (int t = 0; t < Most; ++t) {
      const int64_t token = min(first_token + t, parameters.M - 1);
      const Values<Width> own = load_values<Width>(x + token * parameters.x_stride + column);
      UNROLL for (int e = 0; e < kLogitsExperts; ++e) {
        UNROLL for (int i = 0; i < Width; ++i) sums[e * Most + t] += rows[e].at[i] * own.at[i];
      }
    }
  }
  // Lane e Most + t gets the sum of expert e and token t. Distances of at least kSums come first, so that the order is
  // the same for each Most.
  UNROLL for (ushort distance = 16; distance >= kSums; distance /= 2) {
    UNROLL for (int i = 0; i < kSums; ++i) sums[i] += simd_shuffle_xor(sums[i], distance);
  }
  halve_values<kSums / 2>(sums, lane);
  if (int(lane) < kSums) simdgroup_sums[int(simdgroup) * kSums + int(lane)] = sums[0];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int expert = first_expert + int(lane) / Most;
  const int token = first_token + int(lane) % Most;
  if (simdgroup != 0 || int(lane) >= kSums || expert >= parameters.N || token >= parameters.M) return;
  float sum = 0.0f;
  UNROLL for (int i = 0; i < kLogitsSimdgroups; ++i) sum += simdgroup_sums[i * kSums + int(lane)];
  logits[int64_t(token) * parameters.N + expert] = sum;
}
