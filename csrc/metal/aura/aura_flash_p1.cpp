#include "shaders/aura/aura_flash_p1.h"

#include "metal/aura/launches.h"
#include "metal/aura/vectors.h"
#include "metal/implement.h"
#include "shaders/aura/aura_flash_p1_eight.h"
#include "shaders/aura/aura_flash_p1_matrix.h"

namespace torch_gdn {

namespace {
// From this many query rows of a KV head on, the simdgroups of a threadgroup have different rows and share decoded
// keys.
constexpr int64_t kFewestMatrixRows = 17;
}  // namespace

int64_t rows_of_threadgroup(const AuraShape<>& shape) {
  const int64_t rows = shape.L * (shape.HQ / shape.HK);
  if (rows >= kFewestMatrixRows) return kMatrixRows;
  if (rows > flash_most_rows(int(shape.D))) return kEightRows;
  return rows == 3 ? 4 : std::max<int64_t>(1, rows);
}

namespace {

FlashParameters flash_parameters(const AuraFlashP1<int64_t>& op) {
  const auto& s = op.shape;
  const auto& [starts, causal, q_offset, window] = op.visibility;
  const int64_t rows = s.L * (s.HQ / s.HK);
  TORCH_CHECK_VALUE(rows <= kLargestPosition,
                    "aura_flash_p1: q_rot: expected fewer than 2^30 query rows of a KV head (L * HQ / HK), got ", rows);
  FlashParameters parameters{};
  parameters.key_norms = vector_strides(op.key.norms);
  parameters.value_norms = vector_strides(op.value.norms);
  parameters.kv_heads = int32_t(s.HK);
  parameters.ratio = int32_t(s.HQ / s.HK);
  parameters.queries = int32_t(s.L);
  parameters.keys = int32_t(s.T);
  parameters.rows = int32_t(rows);
  parameters.block_size = int32_t(std::min<int64_t>(op.block_size, INT32_MAX / 2));
  parameters.blocks = int32_t(s.NB + s.NX);
  parameters.first_position = int32_t(s.S);
  parameters.q_offset = int32_t(s.q_offset);
  parameters.causal = causal ? 1 : 0;
  parameters.window = int32_t(window);
  if (op.tile_scores.has_value()) parameters.tiles = int32_t(tiles_of(s.T));
  if (starts.has_value()) parameters.start_words = starts->scalar_type() == at::kLong ? 2 : 1;
  return parameters;
}

struct Form {
  const char* kernel;
  int64_t columns;  // of o for a threadgroup
};

Form form_of(const AuraShape<>& shape, int64_t rows) {
  if (rows == kMatrixRows) return {"aura/aura_flash_p1_matrix", kMatrixColumns};
  if (rows == kEightRows) return {"aura/aura_flash_p1_eight", kEightColumns};
  return {"aura/aura_flash_p1", shape.D};
}

// Copies codes whose tokens lie so far apart that the kernels' 32-bit strides cannot hold the distance.
Tensor near_tokens(const Tensor& codes) { return codes.stride(2) <= INT32_MAX ? codes : codes.contiguous(); }

}  // namespace

Launch launch_aura_flash_p1(const AuraFlashP1<int64_t>& op, const Partials& partials) {
  const auto& s = op.shape;
  const auto& [o, m, l] = partials;
  const Tensor q_rot = unit_last_stride(op.q_rot, "q_rot");
  const Tensor key_codes = near_tokens(unit_last_stride(op.key.codes, "key_codes"));
  const Tensor value_codes = near_tokens(unit_last_stride(op.value.codes, "value_codes"));

  FlashParameters parameters = flash_parameters(op);
  parameters.q = vector_strides(q_rot);
  parameters.key_codes = vector_strides(key_codes);
  parameters.value_codes = vector_strides(value_codes);

  const int64_t rows = rows_of_threadgroup(s), row_tiles = ceil_div(int64_t(parameters.rows), rows);
  const auto [kernel, columns] = form_of(s, rows);
  TemplateArguments arguments = {number_of(s.key_code), number_of(s.value_code), s.D};
  if (rows < kEightRows) arguments[3] = rows;
  return {kernel,
          arguments,
          {q_rot, key_codes, op.key.norms, op.key.codebook.contiguous(), value_codes, op.value.norms,
           op.value.codebook.contiguous(), contiguous(op.visibility.starts), o, m, l, contiguous(op.tile_scores),
           parameters},
          {s.NB * ceil_div(s.D, columns), s.HK * row_tiles, s.B},
          kAuraThreads};
}

namespace {

void run(const AuraFlashP1<int64_t>& op, const Partials& partials) {
  launcher().run({launch_aura_flash_p1(op, partials)});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<AuraFlashP1, &run>(m); }

}  // namespace torch_gdn
