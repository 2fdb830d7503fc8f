// Makes log decays and betas in the form that the CPU kernels read: contiguous f32.
#pragma once
#include "cpu/common.h"
#include "cpu/simd/channel_kernels.h"
#include "ops/channel_gate.h"
#include "ops/gates.h"

namespace torch_gdn::cpu {

// Returns [B, T, HV]: g itself, -exp(A_log) softplus(g + dt_bias), or zeros.
Tensor log_decays_of(const ChunkShape<>& s, const optional<Tensor>& g, const GateOptions& options);

// Returns beta, its sigmoid or twice that, in beta's shape; or ones [B, T, HV].
Tensor betas_of(const ChunkShape<>& s, const optional<Tensor>& beta, const GateOptions& options);

// The parameters of a gate of key channels, as the kernels read them.
class ChannelGateValues {
 public:
  ChannelGateValues(int64_t HV, int64_t K, const ChannelGateOptions& options);
  // Returns the gates of one value head without beta. Its raw or final g starts at `g`.
  ChannelGates of_head(int64_t head, const HeadRows& g) const;

 private:
  int64_t K_;
  bool use_gate_;
  float lower_bound_;                  // 0 if there is none
  std::vector<float> rates_, biases_;  // one per value head; rows of padded_channels(K), or empty
};

// Returns [B, T, HV, K]: g itself, or the log decays that the gate makes of it. A value does not depend on its
// position.
Tensor channel_decays_of(const Tensor& g, const ChannelGateOptions& options);
// Writes the gate's log decays of g, rounded to the dtype of `out`, whose last stride is 1.
void write_channel_decays(const Tensor& g, const ChannelGateOptions& options, const Tensor& out);

}  // namespace torch_gdn::cpu
