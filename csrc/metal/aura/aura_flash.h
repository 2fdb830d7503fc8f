// The launches of attention to codes: pass 1 over blocks of keys, pass 2 that merges them and rotates back.
#pragma once
#include "metal/aura/vectors.h"

namespace torch_gdn {

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

Partials new_partials(const AuraShape& shape, const Tensor& like, bool with_means);

// Pass 1 multiplies 8x8 blocks from this many rows of one KV head's query heads on; with fewer, a key at a time.
constexpr int64_t kMatrixRows = 17;

// Rows that a threadgroup of pass 1 takes: 32 in matrix form, else 1, 2, 4 or 8.
int64_t rows_together(const AuraShape& shape);

// q_rot [B, HQ, L, D] f32 with strides; q_sums [B, HQ, L] f32, read where keys have means.
Launch launch_aura_flash_p1(const AuraShape& shape, const Tensor& q_rot, const optional<Tensor>& q_sums,
                            const Cache& cache, const Visibility& visibility, const Partials& partials);
Launch launch_aura_flash_p2(const AuraShape& shape, const Partials& partials, const Tensor& value_signs,
                            const optional<Tensor>& sinks, const Tensor& o);

}  // namespace torch_gdn
