// What the kernels of pages share with the host.
#pragma once
#include "core/parameters.h"

// Strides in elements of pages [blocks, block_size, H, D]; the last is 1.
struct PageStrides {
  int64_t block, token, head;
};

// Strides in elements of packed tokens [T, H, D]; the last is 1.
struct TokenStrides {
  int64_t token, head;
};
