#pragma once
#include "core/parameters.h"

// Describes the contents of g. A final g holds log decays. A raw g gives the log decay
//     -exp(A_log) softplus(g + dt_bias)  or  lower_bound sigmoid(exp(A_log) (g + dt_bias)).
enum ChannelGateKind { kFinalGate = 0, kSoftplusGate = 1, kBoundedGate = 2 };

// g [B, T, HV, K] has any float dtype. Its last stride is 1.
struct ChannelGateParameters {
  RowStrides g;
  int32_t g_type;
  int32_t kind;                      // ChannelGateKind
  int32_t A_log_type, dt_bias_type;  // [HV] and [HV, K]; zeros if absent
  float lower_bound;
};
