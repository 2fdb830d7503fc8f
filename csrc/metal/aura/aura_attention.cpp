// Attention to codes: its passes, most of which are ops too, and the whole.
#include "metal/aura/vectors.h"
#include "metal/implement.h"
#include "ops/aura/attention.h"
#include "ops/aura/codes.h"
#include "shaders/aura/parameters.h"

namespace torch_gdn {

namespace {

// Sets what shaders/aura/visibility.h's row_place reads, and the number of a KV head's query rows.
template <typename Parameters>
void set_query_rows(Parameters& parameters, const AuraShape<>& s) {
  const int64_t ratio = s.HQ / s.HK;
  parameters.kv_heads = int32_t(s.HK);
  parameters.ratio = int32_t(ratio);
  parameters.queries = int32_t(s.L);
  parameters.rows = int32_count(s.L * ratio, "aura_attention: q", "query rows of a KV head");
}

// Sets what decides which keys a query row sees, and the sizes of blocks.
template <typename Parameters>
void set_visibility(Parameters& parameters, const Visibility<int64_t>& visibility, const AuraShape<>& s,
                    int64_t block_size) {
  const auto& [starts, causal, q_offset, window] = visibility;
  if (starts.has_value()) parameters.start_words = starts->scalar_type() == at::kLong ? 2 : 1;
  parameters.causal = causal ? 1 : 0;
  parameters.q_offset = int32_t(s.q_offset);
  parameters.window = int32_t(window);
  parameters.block_size = int32_t(std::min<int64_t>(block_size, INT32_MAX / 2));
  parameters.blocks = int32_t(s.NB + s.NX);
}

Launch launch_aura_rotate(const AuraRotate<int64_t>& op, const Tensor& y) {
  const Tensor x = as_vectors(op.x, "x");
  const RotateParameters parameters{vector_parameters(x), vector_strides(x), float(op.scale)};
  return {"aura/aura_rotate",
          {x.scalar_type(), x.size(3), op.inverse},
          {x, op.signs.contiguous(), y, parameters},
          {rotation_groups(parameters.vectors.count, x.size(3)), 1, 1},
          kAuraThreads};
}

void run(const AuraRotate<int64_t>& op, const Tensor& y) { launcher().run({launch_aura_rotate(op, y)}); }

// scores [B, HQ, L, tiles] float32 are the products of op.q with the means of tiles, scaled.
Launch launch_aura_tile_scores(const AuraAttention<int64_t>& op, const Tensor& scores) {
  const auto& s = op.shape;
  const Tensor q = unit_last_stride(op.q, "q"), means = unit_last_stride(*op.key.tile_means, "key_tile_means");
  const int64_t tiles = scores.size(3);
  TileScoreParameters parameters{};
  parameters.q = vector_strides(q);
  parameters.means = vector_strides(means);
  set_query_rows(parameters, s);
  parameters.tiles = int32_t(tiles);
  parameters.scale = float(scale_or_default(op.scale, s.D));
  return {"aura/aura_tile_scores",
          {q.scalar_type(), s.D},
          {q, means, scores, parameters},
          {ceil_div(tiles, kAuraThreads / 32), s.HK * ceil_div(parameters.rows, kTileScoreRows), s.B},
          kAuraThreads};
}

// From this many query rows of a KV head on, the simdgroups of a threadgroup have different rows and share decoded
// keys.
constexpr int64_t kFewestMatrixRows = 17;

// Returns the query rows of a threadgroup of pass 1: 1, 2, 4, 8 or 32.
int64_t rows_of_threadgroup(const AuraShape<>& shape) {
  const int64_t rows = shape.L * (shape.HQ / shape.HK);
  if (rows >= kFewestMatrixRows) return kMatrixRows;
  if (rows > flash_most_rows(int(shape.D))) return kEightRows;
  return rows == 3 ? 4 : std::max<int64_t>(1, rows);
}

FlashParameters flash_parameters(const AuraFlashP1<int64_t>& op) {
  const auto& s = op.shape;
  const int64_t rows = s.L * (s.HQ / s.HK);
  TORCH_CHECK_VALUE(rows <= kLargestPosition,
                    "aura_flash_p1: q_rot: expected fewer than 2^30 query rows of a KV head (L * HQ / HK), got ", rows);
  FlashParameters parameters{};
  parameters.key_norms = vector_strides(op.key.norms);
  parameters.value_norms = vector_strides(op.value.norms);
  set_query_rows(parameters, s);
  parameters.keys = int32_t(s.T);
  parameters.first_position = int32_t(s.S);
  set_visibility(parameters, op.visibility, s, op.block_size);
  if (op.tile_scores.has_value()) parameters.tiles = int32_t(tiles_of(s.T));
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

void run(const AuraFlashP1<int64_t>& op, const Partials& partials) {
  launcher().run({launch_aura_flash_p1(op, partials)});
}

// Writes the last blocks of the partials, of which `s` has NX.
Launch launch_aura_flash_exact(const AuraAttention<int64_t>& op, const AuraShape<>& s, int64_t block_size,
                               const Partials& partials) {
  const auto& [o, m, l] = partials;
  const Tensor q = unit_last_stride(op.q, "q"), keys = unit_last_stride(*op.exact.keys, "exact_keys");
  const Tensor values = unit_last_stride(*op.exact.values, "exact_values");
  ExactParameters parameters{};
  parameters.q = vector_strides(q);
  parameters.keys = vector_strides(keys);
  parameters.values = vector_strides(values);
  set_query_rows(parameters, s);
  parameters.exact = int32_t(s.E);
  parameters.sinks = int32_t(s.S);
  parameters.coded = int32_t(s.T);
  parameters.first_block = int32_t(s.NB);
  set_visibility(parameters, op.visibility, s, block_size);
  parameters.has_vectors = vector_width({keys, values}) == 4 ? 1 : 0;
  parameters.scale = float(scale_or_default(op.scale, s.D));
  const int64_t column_groups = ceil_div(s.D, kExactColumns);
  return {"aura/aura_flash_exact",
          {q.scalar_type(), s.D},
          {q, keys, values, contiguous(op.visibility.starts), o, m, l, parameters},
          {s.NX * column_groups, s.HK * ceil_div(parameters.rows, kExactQueryRows), s.B},
          kAuraThreads};
}

// With at least this many blocks, the simdgroups of a threadgroup share its rows.
constexpr int64_t kFewestSharedBlocks = 8;

Launch launch_aura_flash_p2(const AuraFlashP2<int64_t>& op, const Tensor& o) {
  const auto& s = op.shape;
  const int32_t together = s.NB >= kFewestSharedBlocks ? kAuraThreads / 32 : 1;
  const MergeParameters parameters{vector_parameters(o), int32_t(s.NB + s.NX), int32_t(s.NX),
                                   op.sinks.has_value() ? 1 : 0, together};
  return {"aura/aura_flash_p2",
          {o.scalar_type(), s.D},
          {op.o_partials.contiguous(), op.m_partials.contiguous(), op.l_partials.contiguous(), contiguous(op.sinks),
           op.value_signs.contiguous(), o, parameters},
          {rotation_groups(int64_t(parameters.vectors.count) * together, s.D), 1, 1},
          kAuraThreads};
}

void run(const AuraFlashP2<int64_t>& op, const Tensor& o) {
  if (op.shape.NB == 0) {
    o.zero_();
    return;
  }
  launcher().run({launch_aura_flash_p2(op, o)});
}

void run(const AuraAttention<int64_t>& op, const Tensor& o) {
  const auto& s = op.shape;
  if (s.T + s.E == 0) {
    o.zero_();
    return;
  }
  const auto f32 = op.q.options().dtype(at::kFloat);
  const bool has_codes = s.T > 0;
  const Tensor q = unit_last_stride(op.q, "q"), q_rot = has_codes ? at::empty(q.sizes(), f32) : Tensor();
  optional<Tensor> tile_scores;
  if (has_codes && op.key.tile_means.has_value()) tile_scores = at::empty({s.B, s.HQ, s.L, tiles_of(s.T)}, f32);
  const int64_t row_tiles = ceil_div(s.L * s.HQ / s.HK, rows_of_threadgroup(s));
  const int64_t block_size =
      op.block_size.value_or(default_block_size(s.T, kFlashKeys, s.B * s.HK * row_tiles, busy_threadgroups()));
  const int64_t exact_tiles = s.B * s.HK * ceil_div(s.L * s.HQ / s.HK, kExactQueryRows);
  const int64_t exact_rows = default_block_size(s.E, kExactKeys, exact_tiles, busy_threadgroups());
  const auto pass_1 = op.pass_1(q_rot, tile_scores, block_size, exact_rows);
  const auto partials = pass_1.partials(f32);
  c10::SmallVector<Launch, 5> launches;
  if (has_codes) {
    launches.push_back(launch_aura_rotate({q, op.key_signs, scale_or_default(op.scale, s.D), false}, q_rot));
    if (tile_scores.has_value()) launches.push_back(launch_aura_tile_scores(op, *tile_scores));
    launches.push_back(launch_aura_flash_p1(pass_1, partials));
  }
  if (s.E > 0) launches.push_back(launch_aura_flash_exact(op, pass_1.shape, exact_rows, partials));
  launches.push_back(launch_aura_flash_p2(op.pass_2(pass_1, partials), o));
  launcher().run(launches);
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) {
  metal::implement<AuraRotate, &run>(m);
  metal::implement<AuraFlashP1, &run>(m);
  metal::implement<AuraFlashP2, &run>(m);
  metal::implement<AuraAttention, &run>(m);
}

}  // namespace torch_gdn
