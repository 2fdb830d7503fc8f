#pragma once
#include "core/parameters.h"

struct MoeRouterParameters {
  int64_t logits_stride;  // elements between tokens
  int32_t tokens, experts, top_k;
  int32_t groups, open_groups, group_size;
  int32_t bias_type;    // ElementType; absent if there is no bias
  int32_t has_sigmoid;  // if 0, scores are a softmax
  int32_t renormalize;
  float scale;
};
