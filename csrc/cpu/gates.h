// Log decays and betas as the CPU kernels read them: contiguous f32, made from what the caller has.
#pragma once
#include "cpu/common.h"
#include "cpu/simd/channel_kernels.h"
#include "ops/channel_gate.h"
#include "ops/gates.h"

namespace torch_gdn::cpu {

// [B, T, HV]: g itself, -exp(A_log) softplus(g + dt_bias), or zeros.
Tensor log_decays_of(const ChunkShape<>& s, const optional<Tensor>& g, const GateOptions& options);

// Of beta's shape: beta itself, its sigmoid or twice that; or ones [B, T, HV].
Tensor betas_of(const ChunkShape<>& s, const optional<Tensor>& beta, const GateOptions& options);

// The parameters of a gate of key channels, as the kernels read them.
class ChannelGateValues {
 public:
  ChannelGateValues(int64_t HV, int64_t K, const ChannelGateOptions& options);
  // The gates of one value head without beta; its raw or final g starts at `g`.
  ChannelGates of_head(int64_t head, const HeadRows& g) const;

 private:
  int64_t K_;
  bool use_gate_;
  float lower_bound_;                  // 0: none
  std::vector<float> rates_, biases_;  // one a value head, and rows of padded_channels(K) or none
};

// [B, T, HV, K]: g itself, or the log decays that the gate makes of it. A value does not depend on its position.
Tensor channel_decays_of(const Tensor& g, const ChannelGateOptions& options);
// The gate's log decays of g, rounded to the dtype of `out`, whose last stride is 1.
void write_channel_decays(const Tensor& g, const ChannelGateOptions& options, const Tensor& out);

}  // namespace torch_gdn::cpu
