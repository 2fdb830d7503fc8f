// The two passes of attention to codes: pass 1 over blocks of keys, pass 2 that merges them and rotates back.
#pragma once
#include "cpu/aura/aura_common.h"
#include "cpu/simd/layer_kernels.h"

namespace torch_gdn::cpu {

constexpr int64_t kRows = 32;  // of the query heads of one KV head, that share what was looked up

// Codes whose words have a last stride of 1.
struct Cache {
  Tensor key_codes, key_norms, key_codebook, value_codes, value_norms, value_codebook;
  optional<Tensor> key_means, value_means;
};

struct Visibility {
  optional<Tensor> starts;
  bool causal;
  int64_t window;
};

struct Partials {
  Tensor o, m, l;  // [B, HQ, L, NB, D], [B, HQ, L, NB]
  Tensor mean;     // [B, HQ, L, NB], or empty
};

Partials new_partials(const AuraShape& s, const Tensor& like, bool with_means);

// q_rot [B, HQ, L, D] f32, q_sums [B, HQ, L] f32 where keys have means.
void flash_p1(const AuraShape& s, const Tensor& q_rot, const optional<Tensor>& q_sums, const Cache& cache,
              const Visibility& visibility, const Partials& partials);

void flash_p2(const AuraShape& s, const Partials& partials, const Tensor& value_signs, const optional<Tensor>& sinks,
              const Tensor& o);

}  // namespace torch_gdn::cpu
