#pragma once
#include "core/parameters.h"

// What g holds: log decays, or the raw g of -exp(A_log) softplus(g + dt_bias) or of
// lower_bound sigmoid(exp(A_log) (g + dt_bias)).
enum ChannelGateKind { kFinalGate = 0, kSoftplusGate = 1, kBoundedGate = 2 };

// g [B, T, HV, K] of any float dtype, the last stride 1.
struct ChannelGateParameters {
  RowStrides g;
  int32_t g_type;
  int32_t kind;                      // ChannelGateKind
  int32_t A_log_type, dt_bias_type;  // [HV] and [HV, K]; zeros if absent
  float lower_bound;
};
