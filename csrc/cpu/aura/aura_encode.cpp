#include "ops/aura/aura_encode.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/aura/codes.h"
#include "cpu/aura/rotation.h"
#include "cpu/aura/vectors.h"
#include "cpu/define.h"
#include "cpu/simd/trellis_kernels.h"

namespace torch_gdn {

namespace {

struct Encoder {
  Tensor signs, boundaries, codebook;  // boundaries are undefined for a trellis code
  int64_t D;
  Code code;

  explicit Encoder(const AuraEncoder<int64_t>& op)
      : signs(op.signs.contiguous()),
        boundaries(op.boundaries.has_value() ? op.boundaries->contiguous() : Tensor()),
        codebook(op.codebook.contiguous()),
        D(op.D),
        code(op.code) {}

  // Makes x the coordinates of its direction. Returns its norm.
  double rotate_direction(float* x) const {
    double square = 0;
    for (int64_t d = 0; d < D; ++d) square += static_cast<double>(x[d]) * x[d];
    const double norm = std::sqrt(square);
    const double factor = norm > 0 ? 1 / (norm * std::sqrt(static_cast<double>(D))) : 0;
    // If the norm's power of two is too small or too large for one factor in f32, two factors apply it.
    int exponent = 0;
    if (norm > 0 && std::isfinite(norm)) std::frexp(norm, &exponent);
    const auto first = static_cast<float>(std::ldexp(1.0, -exponent / 2));
    const auto second = static_cast<float>(std::ldexp(1.0, -(exponent - exponent / 2)));
    for (int64_t d = 0; d < D; ++d) x[d] = x[d] * first * second;
    cpu::rotate(x, signs.const_data_ptr<float>(), D, false);
    const auto rest = static_cast<float>(std::ldexp(factor, exponent));
    for (int64_t d = 0; d < D; ++d) x[d] *= rest;
    return norm;
  }

  void quantise(const float* y, int32_t* codes) const {
    cpu::aura_kernels().quantise(y, boundaries.const_data_ptr<float>(), D, code.bits, codes);
  }

  // Packs codes, which are entries of the codebook. Returns the norm, which multiplies the centroids.
  float pack(int32_t* codes, double norm, int32_t* words) const {
    const auto* centroids = codebook.const_data_ptr<float>();
    double kept = 0;
    for (int64_t d = 0; d < D; ++d) kept += static_cast<double>(centroids[codes[d]]) * centroids[codes[d]];
    for (int64_t d = 0; d < D; ++d) codes[d] &= (1 << code.bits) - 1;
    cpu::pack_codes(codes, D, code, words);
    return static_cast<float>(norm / std::sqrt(kept));
  }
};

int64_t slot_of(const Tensor& slots, int64_t b, int64_t t) {
  const int64_t at = slots.dim() == 1 ? t * slots.stride(0) : b * slots.stride(0) + t * slots.stride(1);
  return slots.scalar_type() == at::kInt ? slots.const_data_ptr<int32_t>()[at] : slots.const_data_ptr<int64_t>()[at];
}

// Vectors [B, H, T, D] and where their codes go. Without slots, token t goes to slot t.
struct Vectors {
  Tensor x;
  const optional<Tensor>& slots;
  const EncodedVectors& encoded;
  Tensor tile_means;  // in float32; undefined without

  int64_t slot(int64_t b, int64_t t) const { return slots.has_value() ? slot_of(*slots, b, t) : t; }

  void read(const cpu::Rows& in, int64_t b, int64_t h, int64_t t, int64_t D, float* row) const {
    in.read(b, h, t, 0, D, row);
    if (tile_means.defined()) {
      const float* mean =
          tile_means.const_data_ptr<float>() + cpu::offset_of(tile_means, b, h, slot(b, t) / kTokensOfTile);
      for (int64_t d = 0; d < D; ++d) row[d] -= mean[d];
    }
  }

  int32_t* words(int64_t b, int64_t h, int64_t t) const {
    return encoded.codes.mutable_data_ptr<int32_t>() + cpu::offset_of(encoded.codes, b, h, slot(b, t));
  }
};

void encode_each(const Encoder& encoder, const Vectors& vectors) {
  const cpu::Rows in(vectors.x);
  cpu::for_each_vector(vectors.x, [&](int64_t b, int64_t h, int64_t t) {
    if (vectors.slot(b, t) < 0) return;
    alignas(64) float row[cpu::kLargestD];
    alignas(64) int32_t codes[cpu::kLargestD];
    vectors.read(in, b, h, t, encoder.D, row);
    const double norm = encoder.rotate_direction(row);
    encoder.quantise(row, codes);
    cpu::set_norm(vectors.encoded.norms, b, h, vectors.slot(b, t), encoder.pack(codes, norm, vectors.words(b, h, t)));
  });
}

// A vector that is not finite gets codes of 0, like one of no length.
void encode_trellis(const Encoder& encoder, const Vectors& vectors) {
  const cpu::Rows in(vectors.x);
  const auto& kernels = cpu::trellis_kernels();
  const int64_t rows = kernels.rows, D = encoder.D, heads = vectors.x.size(1), tokens = vectors.x.size(2);
  const auto* labels = encoder.codebook.const_data_ptr<float>();
  at::parallel_for(0, ceil_div(vectors.x.size(0) * heads * tokens, rows), 1, [&](int64_t begin, int64_t end) {
    std::vector<float> x(D * rows);
    std::vector<uint32_t> choices(D / kHeldChoices * cpu::kMostStates * rows);
    std::vector<uint8_t> windows(D * rows);
    for (int64_t batch = begin; batch < end; ++batch) {
      const int64_t first = batch * rows, count = std::min(rows, vectors.x.size(0) * heads * tokens - first);
      double norms[cpu::kMostRows] = {};
      std::fill(x.begin(), x.end(), 0.0f);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t b = (first + r) / tokens / heads, h = (first + r) / tokens % heads, t = (first + r) % tokens;
        if (vectors.slot(b, t) < 0) continue;
        float row[cpu::kLargestD];
        vectors.read(in, b, h, t, D, row);
        norms[r] = encoder.rotate_direction(row);
        for (int64_t d = 0; d < D && std::isfinite(norms[r]); ++d) x[d * rows + r] = row[d];
      }
      kernels.nearest_windows({x.data(), labels, D, encoder.code.bits, choices.data(), windows.data()});
      for (int64_t r = 0; r < count; ++r) {
        const int64_t b = (first + r) / tokens / heads, h = (first + r) / tokens % heads, t = (first + r) % tokens;
        if (vectors.slot(b, t) < 0) continue;
        int32_t codes[cpu::kLargestD];
        for (int64_t d = 0; d < D; ++d) codes[d] = std::isfinite(norms[r]) ? windows[d * rows + r] : 0;
        const float norm = encoder.pack(codes, norms[r], vectors.words(b, h, t));
        cpu::set_norm(vectors.encoded.norms, b, h, vectors.slot(b, t), norm);
      }
    }
  });
}

void encode(const AuraEncoder<int64_t>& op, const optional<Tensor>& slots, const EncodedVectors& encoded,
            const optional<Tensor>& tile_means) {
  const Encoder encoder(op);
  const Vectors vectors{cpu::as_vectors(op.x, "x"), slots, encoded,
                        tile_means.has_value() ? tile_means->to(at::kFloat).contiguous() : Tensor()};
  if (op.code.is_trellis()) return encode_trellis(encoder, vectors);
  encode_each(encoder, vectors);
}

void run(const AuraEncode<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [codes, norms] = outputs;
  encode(op, std::nullopt, {cpu::as_vectors(codes, "codes"), cpu::as_values(norms)}, std::nullopt);
}

void run_in_place(const AuraEncodeInPlace<int64_t>& op) { encode(op, op.slots, op.cache, op.tile_means); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) {
  cpu::define<AuraEncode, &run>(m);
  cpu::define<AuraEncodeInPlace, &run_in_place>(m);
}

}  // namespace torch_gdn
