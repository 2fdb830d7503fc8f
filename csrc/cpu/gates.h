// Converts log decays and betas to contiguous f32, the form that the CPU kernels read.
#pragma once
#include "cpu/common.h"
#include "ops/gates.h"

namespace torch_gdn::cpu {

// Returns the log decays [B, T, HV]: g itself, -exp(A_log) softplus(g + dt_bias), or zeros.
Tensor log_decays_of(const ChunkShape<>& s, const optional<Tensor>& g, const GateOptions& options);

// Returns beta, its sigmoid or twice its sigmoid, with beta's shape. Without beta, returns ones [B, T, HV].
Tensor betas_of(const ChunkShape<>& s, const optional<Tensor>& beta, const GateOptions& options);

// The parameters of a gate of key channels, in the form that the kernels read.
class ChannelGateValues {
 public:
  ChannelGateValues(int64_t HV, int64_t K, const ChannelGateOptions& options);
  // Returns the gates of one value head, without beta. `g` points to the head's raw or final g.
  Gates for_head(int64_t head, const HeadRows& g) const;

 private:
  int64_t K_;
  bool use_gate_;
  float lower_bound_;                  // 0 if there is no lower bound
  std::vector<float> rates_, biases_;  // one rate per value head; rows of padded_channels(K), or empty
};

// Returns [B, T, HV, K]: g itself, or the log decays that the gate computes from g. A value does not depend on its
// position.
Tensor channel_decays_of(const Tensor& g, const ChannelGateOptions& options);
// Writes the log decays that the gate computes from g. They are rounded to the dtype of `out`, whose last stride is 1.
void write_channel_decays(const Tensor& g, const ChannelGateOptions& options, const Tensor& out);

}  // namespace torch_gdn::cpu
