// Turns vectors into codes, and codes into vectors.
#include "ops/aura/codes.h"

#include "metal/aura/vectors.h"
#include "metal/implement.h"
#include "shaders/aura/parameters.h"

namespace torch_gdn {

namespace {

// Encodes x [B, H, T, D] into codes [B, H, S, words] and norms [B, H, S]. Without slots, token t goes to slot t.
void encode(const AuraEncoder<int64_t>& op, const optional<Tensor>& slots, const EncodedVectors& encoded,
            optional<Tensor> tile_means) {
  const auto& [codes, norms] = encoded;
  const Tensor x = as_vectors(op.x, "x");
  EncodeParameters parameters{};
  parameters.vectors = vector_parameters(x);
  parameters.x = vector_strides(x);
  parameters.codes = vector_strides(codes);
  parameters.norms = vector_strides(norms);
  if (tile_means.has_value()) {
    tile_means = unit_last_stride(*tile_means, "tile_means");
    parameters.tile_means = vector_strides(tile_means);
    parameters.has_tile_means = 1;
  }
  if (slots.has_value()) {
    parameters.slot_bytes = int32_t(slots->element_size());
    parameters.slot_token = slots->stride(-1);
    parameters.slot_batch = slots->dim() == 2 ? slots->stride(0) : 0;
  }
  parameters.capacity = int32_t(std::min<int64_t>(codes.size(2), INT32_MAX));
  parameters.op = op_name();
  if (op.code.is_trellis()) {
    const int64_t vectors = trellis_vectors(int(op.code.bits));
    launcher().run({{"aura/aura_encode_trellis",
                     {x.scalar_type(), op.code.bits, op.D},
                     {x, slots, op.signs.contiguous(), op.codebook.contiguous(), codes, norms, tile_means,
                      Binding::error_log(), parameters},
                     {ceil_div(int64_t(parameters.vectors.count), vectors), 1, 1},
                     32}});
    return;
  }
  launcher().run({{"aura/aura_encode",
                   {x.scalar_type(), op.code.bits, op.D},
                   {x, slots, op.signs.contiguous(), op.boundaries->contiguous(), op.codebook.contiguous(), codes,
                    norms, tile_means, Binding::error_log(), parameters},
                   {rotation_groups(parameters.vectors.count, op.D), 1, 1},
                   kAuraThreads}});
}

void run(const AuraEncode<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [codes, norms] = outputs;
  encode(op, std::nullopt, {as_vectors(codes, "codes"), as_values(norms, "norms")}, std::nullopt);
}

void run_in_place(const AuraEncodeInPlace<int64_t>& op) { encode(op, op.slots, op.cache, op.tile_means); }

void run(const AuraDecode<int64_t>& op, const Tensor& x) {
  const auto codes = as_vectors(op.vectors.codes, "codes"), norms = as_values(op.vectors.norms, "norms");
  auto tile_means = op.vectors.tile_means;
  if (tile_means.has_value()) tile_means = unit_last_stride(*tile_means, "tile_means");
  const DecodeParameters parameters{vector_parameters(codes), vector_strides(codes), vector_strides(norms),
                                    vector_strides(tile_means), tile_means.has_value() ? 1 : 0};
  launcher().run({{"aura/aura_decode",
                   {x.scalar_type(), number_of(op.code), op.D, op.rotated},
                   {codes, norms, op.vectors.codebook.contiguous(), op.signs.contiguous(), tile_means, x, parameters},
                   {rotation_groups(parameters.vectors.count, op.D), 1, 1},
                   kAuraThreads}});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) {
  metal::implement<AuraEncode, &run>(m);
  metal::implement<AuraEncodeInPlace, &run_in_place>(m);
  metal::implement<AuraDecode, &run>(m);
}

}  // namespace torch_gdn
