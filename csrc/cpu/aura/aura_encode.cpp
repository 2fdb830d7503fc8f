#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/aura/codes.h"
#include "cpu/aura/vectors.h"
#include "cpu/define.h"
#include "cpu/simd/aura_kernels.h"
#include "ops/aura/codes.h"
#include "ops/indices.h"

namespace torch_gdn::cpu {

namespace {

// Encodes vectors [B, H, T, D]. Without slots, the codes of token t go to slot t.
class Encoder {
 public:
  Encoder(const AuraEncoder<int64_t>& op, const optional<Tensor>& slots, const EncodedVectors& encoded,
          const optional<Tensor>& tile_means)
      : x_(as_vectors(op.x, "x")),
        in_(x_),
        encoded_(encoded),
        tile_means_(tile_means.has_value() ? tile_means->to(at::kFloat).contiguous() : Tensor()),
        signs_(op.signs.contiguous()),
        boundaries_(op.boundaries.has_value() ? op.boundaries->contiguous() : Tensor()),
        codebook_(op.codebook.contiguous()),
        D_(op.D),
        code_(op.code),
        has_row_of_slots_(slots.has_value() && slots->dim() == 1) {
    if (slots.has_value()) slots_.emplace(*slots);
  }

  void run() const {
    if (code_.is_trellis()) return encode_trellis();
    for_each_vector(x_, [&](int64_t b, int64_t h, int64_t t) {
      const Vector vector = vector_at(b, h, t);
      if (vector.slot < 0) return;
      alignas(64) float row[kLargestD];
      alignas(64) int32_t codes[kLargestD];
      const double norm = read_direction(vector, row);
      aura_kernels().quantise(row, boundaries_.const_data_ptr<float>(), D_, code_.bits, codes);
      write(vector, codes, norm);
    });
  }

 private:
  struct Vector {
    int64_t b, h, t, slot;
  };

  Vector vector_at(int64_t b, int64_t h, int64_t t) const {
    return {b, h, t, !slots_ ? t : has_row_of_slots_ ? (*slots_)[t] : slots_->at(b, t)};
  }

  // Reads the coordinates of a vector's direction. Returns its norm.
  double read_direction(const Vector& vector, float* x) const {
    const auto [b, h, t, slot] = vector;
    in_.read(b, h, t, x);
    if (tile_means_.defined()) {
      const float* mean = tile_means_.const_data_ptr<float>() + offset_of(tile_means_, b, h, slot / kTokensOfTile);
      for (int64_t d = 0; d < D_; ++d) x[d] -= mean[d];
    }
    double square = 0;
    for (int64_t d = 0; d < D_; ++d) square += static_cast<double>(x[d]) * x[d];
    const double norm = std::sqrt(square);
    const double factor = norm > 0 ? 1 / (norm * std::sqrt(static_cast<double>(D_))) : 0;
    // If the norm's power of two is too small or too large for one factor in f32, two factors apply it.
    int exponent = 0;
    if (norm > 0 && std::isfinite(norm)) std::frexp(norm, &exponent);
    const auto first = static_cast<float>(std::ldexp(1.0, -exponent / 2));
    const auto second = static_cast<float>(std::ldexp(1.0, -(exponent - exponent / 2)));
    for (int64_t d = 0; d < D_; ++d) x[d] = x[d] * first * second;
    rotate(x, signs_, false, static_cast<float>(std::ldexp(factor, exponent)));
    return norm;
  }

  // Packs codes, which are entries of the codebook, and writes the norm that multiplies their centroids.
  void write(const Vector& vector, int32_t* codes, double norm) const {
    const auto [b, h, t, slot] = vector;
    const auto* centroids = codebook_.const_data_ptr<float>();
    double kept = 0;
    for (int64_t d = 0; d < D_; ++d) kept += static_cast<double>(centroids[codes[d]]) * centroids[codes[d]];
    for (int64_t d = 0; d < D_; ++d) codes[d] &= (1 << code_.bits) - 1;
    pack_codes(codes, D_, code_, encoded_.codes.mutable_data_ptr<int32_t>() + offset_of(encoded_.codes, b, h, slot));
    set_norm(encoded_.norms, b, h, slot, static_cast<float>(norm / std::sqrt(kept)));
  }

  // A vector that is not finite gets codes of 0, like one of no length.
  void encode_trellis() const {
    const auto& kernels = aura_kernels();
    const int64_t rows = kernels.trellis_rows, heads = x_.size(1), tokens = x_.size(2),
                  all = x_.size(0) * heads * tokens;
    at::parallel_for(0, ceil_div(all, rows), 1, [&](int64_t begin, int64_t end) {
      std::vector<float> x(D_ * rows);
      std::vector<uint32_t> choices(D_ / kHeldChoices * kMostStates * rows);
      std::vector<uint8_t> windows(D_ * rows);
      for (int64_t first = begin * rows; first < std::min(end * rows, all); first += rows) {
        const int64_t count = std::min(rows, all - first);
        double norms[kMostRows] = {};
        std::fill(x.begin(), x.end(), 0.0f);
        const auto vector_of = [&](int64_t r) {
          return vector_at((first + r) / tokens / heads, (first + r) / tokens % heads, (first + r) % tokens);
        };
        for (int64_t r = 0; r < count; ++r) {
          if (vector_of(r).slot < 0) continue;
          float row[kLargestD];
          norms[r] = read_direction(vector_of(r), row);
          for (int64_t d = 0; d < D_ && std::isfinite(norms[r]); ++d) x[d * rows + r] = row[d];
        }
        kernels.nearest_windows(
            {x.data(), codebook_.const_data_ptr<float>(), D_, code_.bits, choices.data(), windows.data()});
        for (int64_t r = 0; r < count; ++r) {
          if (vector_of(r).slot < 0) continue;
          int32_t codes[kLargestD];
          for (int64_t d = 0; d < D_; ++d) codes[d] = std::isfinite(norms[r]) ? windows[d * rows + r] : 0;
          write(vector_of(r), codes, norms[r]);
        }
      }
    });
  }

  Tensor x_;
  Rows in_;
  const EncodedVectors& encoded_;
  Tensor tile_means_;                     // in float32; undefined without
  Tensor signs_, boundaries_, codebook_;  // boundaries are undefined for a trellis code
  int64_t D_;
  Code code_;
  bool has_row_of_slots_;  // the same for each batch row
  optional<Indices> slots_;
};

void run(const AuraEncode<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [codes, norms] = outputs;
  Encoder(op, std::nullopt, {as_vectors(codes, "codes"), as_values(norms)}, std::nullopt).run();
}

void run_in_place(const AuraEncodeInPlace<int64_t>& op) { Encoder(op, op.slots, op.cache, op.tile_means).run(); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) {
  define<AuraEncode, &run>(m);
  define<AuraEncodeInPlace, &run_in_place>(m);
}

}  // namespace torch_gdn::cpu
