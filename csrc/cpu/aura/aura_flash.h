// The two passes of attention to codes.
#pragma once
#include "ops/aura/aura_flash_p1.h"
#include "ops/aura/aura_flash_p2.h"

namespace torch_gdn::cpu {

constexpr int64_t kFlashRows = 32;  // query rows of one KV head that share dequantised keys and values

void flash_p1(const AuraFlashP1<int64_t>& op, const Partials& partials);
void flash_p2(const AuraFlashP2<int64_t>& op, const Tensor& o);

}  // namespace torch_gdn::cpu
