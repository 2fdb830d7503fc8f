#pragma once
#include "gdn/fused_recurrent_gated_delta_rule.h"

// A threadgroup takes all columns of V. Each 32 columns have as many threads as in the recurrent kernel.
constexpr int decode_threads(int K, int V) { return (V + kStateColumns - 1) / kStateColumns * recurrent_threads(K); }

// Value heads of a key head are neighbours, `head` apart; key heads are `group` apart. In elements.
struct GroupedStrides {
  int64_t batch, token, group, head;
};

struct GdnDecodeParameters {
  SequenceParameters sequence;
  SlotParameters slots;
  GateParameters gates;  // the stride of a head is that within a group
  StateStrides states;
  RowStrides o;
  GroupedStrides z;
  int64_t g_group, beta_group;
  int32_t key_heads, value_heads, group_heads;  // H, HV, HV / H
  int32_t has_state_vectors;                    // 1: 4 of the inner dimension a load or store
  int32_t z_type, weight_type;                  // ElementType
  int32_t has_sigmoid;                          // else silu
  int32_t round_norm, round_product;            // to o's type, before and after the product with the weight
  float scale, eps;
};
