// Attention to codes takes two passes. Attention to exact rows runs between them.
#pragma once
#include "ops/aura/aura_attention.h"

namespace torch_gdn::cpu {

constexpr int64_t kFlashRows = 32;  // query rows of one KV head that share keys and values in f32

void flash_p1(const AuraFlashP1<int64_t>& op, const Partials& partials);
// Writes the last `shape.NX` blocks of the partials.
void attend_to_exact_rows(const AuraAttention<int64_t>& op, const AuraShape<>& shape, int64_t block_size,
                          const Partials& partials);
void flash_p2(const AuraFlashP2<int64_t>& op, const Tensor& o);

}  // namespace torch_gdn::cpu
