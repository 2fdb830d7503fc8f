// Describes the means that were subtracted from the keys of tiles before the keys were encoded.
#pragma once
#include "ops/pages.h"
#include "shaders/aura/code_sizes.h"

namespace torch_gdn {

// The means are [blocks, tiles of a block, HK, D]. A block has whole tiles, so a tile lies in one block.
template <typename Int>
void check_means_of_pages(const Check<Int>& check, const PagedShape<Int>& s, const char* argument, const Tensor& x) {
  check.is_of_dtype(argument, x, at::kHalf);
  check.value(sym_eq(s.block_size % kTokensOfTile, Int(0)), argument, "blocks of a multiple of 128 tokens",
              s.block_size);
  check.shape(argument, x, "[blocks, block_size / 128, HK, D]", {s.blocks, s.block_size / kTokensOfTile, s.HK, s.D});
  check_unit_stride(check, argument, x);
}

}  // namespace torch_gdn
