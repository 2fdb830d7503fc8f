#pragma once
#include "gdn/fused_recurrent_gated_delta_rule.h"

// A threadgroup owns all columns of V. Each group of 32 columns has as many threads as in the recurrent kernel.
constexpr int decode_threads(int K, int V) { return (V + kStateColumns - 1) / kStateColumns * recurrent_threads(K); }

// The value heads of a key head are neighbours, `head` elements apart. Key heads are `group` elements apart.
struct GroupedStrides {
  int64_t batch, token, group, head;
};

struct GdnDecodeParameters {
  SequenceParameters sequence;
  SlotParameters slots;
  GateParameters gates;  // the head stride applies within a group
  StateStrides states;
  RowStrides o;
  GroupedStrides z;
  int64_t g_group, beta_group;
  int32_t key_heads, value_heads, group_heads;  // H, HV, HV / H
  int32_t has_state_vectors;                    // if 1, a load or store takes 4 elements of the inner dimension
  int32_t z_type, weight_type;                  // ElementType
  int32_t has_sigmoid;                          // if 0, the gate is silu
  int32_t round_norm, round_product;            // 1 to round to o's type before and after the product with the weight
  float scale, eps;
};
