#pragma once
#include "attention/paged_attention_prefill.h"

// Strides in elements of norms [blocks, block_size, H]. PagedParameters has the strides of codes.
struct AuraPagedParameters {
  PagedParameters paged;
  PageStrides key_norms, value_norms;
};
