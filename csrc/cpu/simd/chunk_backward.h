// The kernels of BackwardKernels for one ISA variant.
#include "cpu/simd/chunk.h"

enum class Into { kSet, kSubtract };
enum class Zeros { kNone, kAbove, kBelow };  // of a, apart from the blocks on its diagonal

// Stores combine(row of the tile, offset, element of `from`, sum) for each vector of a tile.
template <typename Combine>
TORCH_GDN_INLINE void store_sums(const Tile& sums, const float* from, float* out, int64_t row, const Combine& combine) {
  for_each_in_tile([&](int64_t r, int64_t c) {
    const int64_t at = r * row + c * kLanes;
    store(out + at, combine(r, at, load(from + at), sums.at[r][c]));
  });
}

// Calls f(i, j) for the first row and column of each tile. `rows` is a multiple of 8 and `columns` of 32.
template <typename F>
TORCH_GDN_INLINE void for_each_tile(int64_t rows, int64_t columns, const F& f) {
  for (int64_t j = 0; j < columns; j += kTileColumns) {
    for (int64_t i = 0; i < rows; i += kRows) f(i, j);
  }
}

// Computes out = a b or out -= a b.
template <Into into, Zeros zeros = Zeros::kNone>
void multiply(int64_t rows, int64_t columns, int64_t count, const float* a, int64_t row, int64_t step, const float* b,
              int64_t b_row, float* out, int64_t out_row) {
  for_each_tile(rows, columns, [&](int64_t i, int64_t j) {
    Tile sums{};
    const int64_t first = zeros == Zeros::kBelow ? i : 0, last = zeros == Zeros::kAbove ? i + kRows : count;
    accumulate(sums, a + i * row + first * step, row, step, b + j + first * b_row, last - first, b_row);
    float* to = out + i * out_row + j;
    store_sums(sums, to, to, out_row,
               [](int64_t, int64_t, Floats before, Floats sum) { return into == Into::kSet ? sum : before - sum; });
  });
}

// The offset of a column in a state, whose panels are [K, 32].
TORCH_GDN_INLINE int64_t in_panel(int64_t column, int64_t K) {
  return column / kColumns * kColumns * K + column % kColumns;
}

// Transposes [rows, columns] to [columns, rows]. Both are multiples of the vectors' lanes.
TORCH_GDN_INLINE void transpose_matrix(const float* in, int64_t rows, int64_t columns, float* out) {
  for (int64_t i = 0; i < rows; i += kLanes) {
    for (int64_t j = 0; j < columns; j += kLanes) {
      Floats block[kLanes];
#pragma GCC unroll 16
      for (int64_t r = 0; r < kLanes; ++r) block[r] = load(in + (i + r) * columns + j);
      transpose<kLaneBits>(block);
#pragma GCC unroll 16
      for (int64_t r = 0; r < kLanes; ++r) store(out + (j + r) * rows + i, block[r]);
    }
  }
}

TORCH_GDN_INLINE float dot(const float* a, const float* b, int64_t count) {
  Floats sum{};
  for (int64_t i = 0; i < count; i += kLanes) sum += load(a + i) * load(b + i);
  return sum_of_lanes(sum);
}

TORCH_GDN_INLINE void scale_row(const float* x, float factor, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += kLanes) store(out + i, factor * load(x + i));
}

void read_keys_backward(const HeadRows& x, int64_t tokens, int64_t width, bool normalise, float scale, int64_t K,
                        float* out, float* factors) {
  upcast_rows(x, tokens, ceil_div(tokens, kTokens) * kTokens, width, out, K);
  for (int64_t i = 0; i < tokens; ++i, out += K) {
    factors[i] = normalise ? normalise_row(out, K, kNormEps) : 1.0f;
    scale_row(out, scale, K, out);
  }
}

// decays[j] = exp(c_i - c_j) for j <= i, else 0.
TORCH_GDN_INLINE void decays_to(int64_t i, const double* sums, float* decays) {
  alignas(64) float passed[kTokens];
  for (int64_t j = 0; j < kTokens; ++j) passed[j] = static_cast<float>(sums[i] - sums[j]);
  for (int64_t j = i; j < kTokens; ++j) passed[j] = 0.0f;
  for (int64_t j = 0; j < kTokens; j += kLanes) store(decays + j, exponential(load(passed + j)));
  for (int64_t j = i + 1; j < kTokens; ++j) decays[j] = 0.0f;
}

// The decays from the start of the chunk to each token, and from each token to the end.
TORCH_GDN_INLINE void decays_of_tokens(const double* sums, float* read, float* write) {
  alignas(64) float passed[kTokens], left[kTokens];
  for (int64_t i = 0; i < kTokens; ++i) {
    passed[i] = static_cast<float>(sums[i]);
    left[i] = static_cast<float>(sums[kTokens - 1] - sums[i]);
  }
  for (int64_t i = 0; i < kTokens; i += kLanes) {
    store(read + i, exponential(load(passed + i)));
    store(write + i, exponential(load(left + i)));
  }
}

// The cumulative sum is in f64, as in the forward kernel.
void decay_head(const HeadRows& g, int64_t, BackwardTiles& tiles, ChunkRecord* record) {
  const int64_t K = tiles.K;
  double sum = 0;
  for (int64_t i = 0; i < kTokens; ++i) {
    if (i < tiles.tokens) sum += clamped_log_decay(number_at(g, i));
    tiles.sums[i] = sum;
  }
  alignas(64) float read[kTokens], write[kTokens];
  decays_of_tokens(tiles.sums, read, write);
  for (int64_t i = 0; i < kTokens; ++i) {
    scale_row(tiles.q + i * K, read[i], K, tiles.q_read + i * K);
    scale_row(tiles.k + i * K, read[i], K, tiles.k_read + i * K);
    scale_row(tiles.k + i * K, write[i], K, tiles.k_write + i * K);
  }
  for (int64_t d = 0; d < K; ++d) tiles.last[d] = read[kTokens - 1];
  if (record == nullptr) return;
  transpose_matrix(tiles.k, kTokens, K, tiles.across);
  multiply<Into::kSet>(kTokens, kTokens, K, tiles.k, K, 1, tiles.across, kTokens, record->L, kTokens);
  multiply<Into::kSet>(kTokens, kTokens, K, tiles.q, K, 1, tiles.across, kTokens, record->P, kTokens);
  for (int64_t i = 0; i < kTokens; ++i) {
    alignas(64) float decays[kTokens];
    decays_to(i, tiles.sums, decays);
    for (int64_t j = 0; j < kTokens; ++j) record->L[i * kTokens + j] *= decays[j];
    for (int64_t j = 0; j < kTokens; ++j) record->P[i * kTokens + j] *= decays[j];
    record->L[i * kTokens + i] = 0.0f;
  }
}

// Multiplies the decay from each earlier token by that of token i, so that no exp of -c is taken.
TORCH_GDN_INLINE void pass_token(int64_t i, BackwardTiles& tiles, ChunkRecord* record) {
  const int64_t K = tiles.K;
  const float *q = tiles.q + i * K, *k = tiles.k + i * K, *decays = tiles.decays + i * K;
  for (int64_t j = 0; j < i; ++j) {
    float* left = tiles.left + j * K;
    const float* key = tiles.k + j * K;
    Floats k_sum{}, q_sum{};
    for (int64_t d = 0; d < K; d += kLanes) {
      const Floats passed = load(left + d) * load(decays + d), decayed = load(key + d) * passed;
      store(left + d, passed);
      k_sum += load(k + d) * decayed;
      q_sum += load(q + d) * decayed;
    }
    if (record == nullptr) continue;
    record->L[i * kTokens + j] = sum_of_lanes(k_sum);
    record->P[i * kTokens + j] = sum_of_lanes(q_sum);
  }
  for (int64_t d = 0; d < K; d += kLanes) store(tiles.left + i * K + d, all_lanes(1.0f));
}

void decay_channels(const HeadRows& g, int64_t width, BackwardTiles& tiles, ChunkRecord* record) {
  const int64_t K = tiles.K;
  upcast_rows(g, tiles.tokens, kTokens, width, tiles.decays, K);
  for (int64_t d = 0; d < K; d += kLanes) {
    Floats passed = all_lanes(1.0f);
    for (int64_t i = 0; i < kTokens; ++i) {
      const int64_t at = i * K + d;
      const Floats log_decay = load(tiles.decays + at);
      const Floats decay = exponential(log_decay < kLowestLogDecay ? all_lanes(kLowestLogDecay) : log_decay);
      passed *= decay;
      store(tiles.decays + at, decay);
      store(tiles.q_read + at, load(tiles.q + at) * passed);
      store(tiles.k_read + at, load(tiles.k + at) * passed);
    }
    store(tiles.last + d, passed);
  }
  for (int64_t i = 0; i < kTokens; ++i) {
    pass_token(i, tiles, record);
    if (record == nullptr) continue;
    for (int64_t j = i; j < kTokens; ++j) record->L[i * kTokens + j] = record->P[i * kTokens + j] = 0.0f;
    record->P[i * kTokens + i] = dot(tiles.q + i * K, tiles.k + i * K, K);
  }
  for (int64_t i = 0; i < kTokens * K; i += kLanes) {
    store(tiles.k_write + i, load(tiles.k + i) * load(tiles.left + i));
  }
}

void solve(const HeadRows& v, int64_t columns, const ChunkRecord& record, const float* state, float* r,
           BackwardTiles& tiles) {
  const int64_t K = tiles.K, V = tiles.V;
  prefetch_rows(v, kTokens, tiles.tokens, columns);
  upcast_rows(v, tiles.tokens, kTokens, columns, r, V);
  for (int64_t j = 0; j < V; j += kColumns) {
    multiply<Into::kSubtract>(kTokens, kColumns, K, tiles.k_read, K, 1, state + j * K, kColumns, r + j, V);
  }
  for (int64_t i = 0; i < kTokens; ++i) scale_row(r + i * V, tiles.beta[i], V, tiles.work + i * V);
  multiply<Into::kSet, Zeros::kAbove>(kTokens, V, kTokens, record.inverse, kTokens, 1, tiles.work, V, tiles.u, V);
  multiply<Into::kSubtract, Zeros::kAbove>(kTokens, V, kTokens, record.L, kTokens, 1, tiles.u, V, r, V);
}

void advance_state(const float* r, const float* from, float* to, BackwardTiles& tiles) {
  const int64_t K = tiles.K, V = tiles.V;
  for (int64_t i = 0; i < kTokens; ++i) scale_row(r + i * V, tiles.beta[i], V, tiles.u + i * V);
  for_each_tile(K, V, [&](int64_t i, int64_t j) {
    Tile sums{};
    accumulate(sums, tiles.k_write + i, 1, K, tiles.u + j, kTokens, V);
    const int64_t first = in_panel(j, K) + i * kColumns;
    const auto decay = [&](int64_t row, int64_t, Floats before, Floats sum) {
      return tiles.last[i + row] * before + sum;
    };
    store_sums(sums, from + first, to + first, kColumns, decay);
  });
}

// Computes a gradient [32, K] = x S^T as the transpose of S x^T, because the state's rows are along V.
TORCH_GDN_INLINE void multiply_by_state(const float* state, const float* x_across, BackwardTiles& tiles, float* out) {
  const int64_t K = tiles.K;
  for_each_tile(K, kTokens, [&](int64_t i, int64_t j) {
    Tile sums{};
    for (int64_t column = 0; column < tiles.V; column += kColumns) {
      const float* b = x_across + column * kTokens + j;
      accumulate(sums, state + column * K + i * kColumns, kColumns, 1, b, kColumns, kTokens);
    }
    store_tile(sums, tiles.across + i * kTokens + j);
  });
  transpose_matrix(tiles.across, K, kTokens, out);
}

// Computes the gradients of u, r and beta. dr is left in `work`.
TORCH_GDN_INLINE void retreat_values(const ChunkRecord& record, const float* r, const float* dstate,
                                     BackwardTiles& tiles) {
  const int64_t K = tiles.K, V = tiles.V;
  for_each_tile(kTokens, V, [&](int64_t i, int64_t j) {
    Tile sums{};
    accumulate(sums, record.P + i * kTokens + i, 1, kTokens, tiles.d_o + i * V + j, kTokens - i, V);
    accumulate(sums, tiles.k_write + i * K, K, 1, dstate + in_panel(j, K), K);
    float* to = tiles.work + i * V + j;
    store_sums(sums, to, to, V, [](int64_t, int64_t, Floats, Floats sum) { return sum; });
  });
  multiply<Into::kSet, Zeros::kBelow>(kTokens, V, kTokens, record.inverse, 1, kTokens, tiles.work, V, tiles.du, V);
  for (int64_t i = 0; i < kTokens; ++i) {
    tiles.dbeta[i] = dot(tiles.du + i * V, r + i * V, V);
    scale_row(r + i * V, tiles.beta[i], V, tiles.u + i * V);
    scale_row(tiles.du + i * V, tiles.beta[i], V, tiles.work + i * V);
  }
}

TORCH_GDN_INLINE void retreat_state(const float* state, float* dstate, BackwardTiles& tiles) {
  const int64_t K = tiles.K, V = tiles.V;
  Floats products[kLargestK]{};
  for_each_tile(K, V, [&](int64_t i, int64_t j) {
    Tile sums{};
    accumulate(sums, tiles.k_read + i, 1, K, tiles.work + j, kTokens, V);
    for (auto& row : sums.at) {
      for (Floats& sum : row) sum = -sum;
    }
    accumulate(sums, tiles.q_read + i, 1, K, tiles.d_o + j, kTokens, V);
    const int64_t first = in_panel(j, K) + i * kColumns;
    const auto decay = [&](int64_t row, int64_t at, Floats before, Floats sum) {
      products[i + row] += load(state + first + at) * before;
      return tiles.last[i + row] * before + sum;
    };
    store_sums(sums, dstate + first, dstate + first, kColumns, decay);
  });
  for (int64_t d = 0; d < K; ++d) tiles.dlast[d] = tiles.last[d] * sum_of_lanes(products[d]);
}

void retreat(const HeadRows& d_o, const HeadRows& dv, int64_t columns, const ChunkRecord& record, const float* r,
             const float* state, float* dstate, BackwardTiles& tiles) {
  const int64_t V = tiles.V;
  prefetch_rows(d_o, -kTokens, kTokens, columns);
  prefetch_rows(dv, 0, tiles.tokens, columns);
  upcast_rows(d_o, tiles.tokens, kTokens, columns, tiles.d_o, V);
  retreat_values(record, r, dstate, tiles);
  const float* dr = tiles.work;
  downcast_rows(dr, V, tiles.tokens, columns, dv);
  transpose_matrix(tiles.d_o, kTokens, V, tiles.o_across);
  transpose_matrix(tiles.u, kTokens, V, tiles.u_across);
  transpose_matrix(dr, kTokens, V, tiles.r_across);
  multiply<Into::kSet>(kTokens, kTokens, V, tiles.d_o, V, 1, tiles.u_across, kTokens, tiles.dP, kTokens);
  multiply<Into::kSet>(kTokens, kTokens, V, dr, V, 1, tiles.u_across, kTokens, tiles.dL, kTokens);
  multiply_by_state(state, tiles.o_across, tiles, tiles.dq_read);
  multiply_by_state(state, tiles.r_across, tiles, tiles.dk_read);
  multiply_by_state(dstate, tiles.u_across, tiles, tiles.dk_write);
  for (int64_t i = 0; i < kTokens * tiles.K; i += kLanes) store(tiles.dk_read + i, -load(tiles.dk_read + i));
  for (int64_t i = 0; i < kTokens; ++i) {
    for (int64_t j = 0; j < kTokens; ++j) {
      const int64_t at = i * kTokens + j;
      tiles.dP[at] = j <= i ? tiles.dP[at] : 0.0f;
      tiles.dL[at] = j < i ? -tiles.dL[at] : 0.0f;
    }
  }
  retreat_state(state, dstate, tiles);
}

// dg of a token is the sum of everything that its decay multiplies: later reads of the state, earlier writes to the
// state after the chunk, that state itself, and products of a later token with an earlier one. No sum has a term that
// another one cancels.
void leave_head(const ChunkRecord& record, BackwardTiles& tiles) {
  const int64_t K = tiles.K;
  alignas(64) float read[kTokens], write[kTokens], sum = 0;
  decays_of_tokens(tiles.sums, read, write);
  for (int64_t d = 0; d < K; ++d) sum += tiles.dlast[d];
  float reads[kTokens], writes[kTokens];
  for (int64_t i = 0; i < kTokens; ++i) {
    const int64_t at = i * K;
    reads[i] = dot(tiles.q_read + at, tiles.dq_read + at, K) + dot(tiles.k_read + at, tiles.dk_read + at, K);
    writes[i] = dot(tiles.k_write + at, tiles.dk_write + at, K);
  }
  float later = 0, earlier = 0;
  for (int64_t i = 0; i < kTokens; ++i) {
    tiles.dg[i] = sum + earlier;
    earlier += writes[i];
  }
  for (int64_t i = kTokens - 1; i >= 0; --i) tiles.dg[i] += later += reads[i];
  for (int64_t i = 0; i < kTokens; ++i) {
    float products = 0;
    for (int64_t j = 0; j < i; ++j) {
      const int64_t at = i * kTokens + j;
      products += record.P[at] * tiles.dP[at] + record.L[at] * tiles.dL[at];
      tiles.dg[j + 1] += products;
    }
    alignas(64) float decays[kTokens];
    decays_to(i, tiles.sums, decays);
    for (int64_t j = 0; j < kTokens; ++j) tiles.dP[i * kTokens + j] *= decays[j];
    for (int64_t j = 0; j < kTokens; ++j) tiles.dL[i * kTokens + j] *= decays[j];
  }
  for_each_tile(kTokens, K, [&](int64_t i, int64_t j) {
    const int64_t row = i * kTokens, diagonal = row + i, first = i * K + j;
    Tile q_sums{}, k_sums{};
    accumulate(q_sums, tiles.dP + row, kTokens, 1, tiles.k + j, i + kRows, K);
    const auto read_q = [&](int64_t token, int64_t, Floats from_state, Floats sum) {
      return read[i + token] * from_state + sum;
    };
    store_sums(q_sums, tiles.dq_read + first, tiles.dq + first, K, read_q);
    accumulate(k_sums, tiles.dP + diagonal, 1, kTokens, tiles.q + first, kTokens - i, K);
    accumulate(k_sums, tiles.dL + diagonal, 1, kTokens, tiles.k + first, kTokens - i, K);
    accumulate(k_sums, tiles.dL + row, kTokens, 1, tiles.k + j, i + kRows, K);
    const auto read_and_write = [&](int64_t token, int64_t at, Floats from_state, Floats sum) {
      return read[i + token] * from_state + (write[i + token] * load(tiles.dk_write + first + at) + sum);
    };
    store_sums(k_sums, tiles.dk_read + first, tiles.dk + first, K, read_and_write);
  });
}

// The products of one vector of channels with those of earlier tokens.
TORCH_GDN_INLINE void leave_pairs(int64_t d, BackwardTiles& tiles) {
  const int64_t K = tiles.K;
  Floats left[kTokens];
  for (int64_t i = 0; i < kTokens; ++i) {
    const Floats q = load(tiles.q + i * K + d), k = load(tiles.k + i * K + d), decay = load(tiles.decays + i * K + d);
    const float *dP = tiles.dP + i * kTokens, *dL = tiles.dL + i * kTokens;
    Floats products{}, dq = dP[i] * k, dk = dP[i] * q;
    for (int64_t j = 0; j < i; ++j) {
      const int64_t at = j * K + d;
      left[j] *= decay;
      const Floats key = load(tiles.k + at), decayed = key * left[j];
      const Floats dk_j = (dL[j] * k + dP[j] * q) * left[j];
      dq += dP[j] * decayed;
      dk += dL[j] * decayed;
      products += dk_j * key;
      store(tiles.dk + at, load(tiles.dk + at) + dk_j);
      store(tiles.dg + at + K, load(tiles.dg + at + K) + products);
    }
    left[i] = all_lanes(1.0f);
    store(tiles.dq + i * K + d, load(tiles.dq + i * K + d) + dq);
    store(tiles.dk + i * K + d, load(tiles.dk + i * K + d) + dk);
  }
}

// The same as leave_head, channel by channel.
void leave_channels(const ChunkRecord&, BackwardTiles& tiles) {
  const int64_t K = tiles.K;
  for (int64_t d = 0; d < K; d += kLanes) {
    Floats passed = all_lanes(1.0f), earlier = load(tiles.dlast + d), later{};
    for (int64_t i = 0; i < kTokens; ++i) {
      const int64_t at = i * K + d;
      passed *= load(tiles.decays + at);
      const Floats dk_write = load(tiles.dk_write + at);
      store(tiles.dq + at, passed * load(tiles.dq_read + at));
      store(tiles.dk + at, passed * load(tiles.dk_read + at) + load(tiles.left + at) * dk_write);
      store(tiles.dg + at, earlier);
      earlier += load(tiles.k_write + at) * dk_write;
    }
    for (int64_t i = kTokens - 1; i >= 0; --i) {
      const int64_t at = i * K + d;
      later += load(tiles.q_read + at) * load(tiles.dq_read + at) + load(tiles.k_read + at) * load(tiles.dk_read + at);
      store(tiles.dg + at, load(tiles.dg + at) + later);
    }
    leave_pairs(d, tiles);
  }
}

// With n = x / scale the normalised row, the gradient of what was normalised is factor (dn - n (n dn)).
void write_keys(const float* x, const float* factors, int64_t rows, int64_t width, bool normalised, float scale,
                float* gradients, int64_t K, const HeadRows& out) {
  prefetch_rows(out, -kTokens, kTokens, width);  // of the chunk before, which is the next to be written
  for (int64_t i = 0; i < rows; ++i, x += K, gradients += K) {
    const float along = normalised && scale != 0.0f ? dot(x, gradients, K) / scale : 0.0f;
    for (int64_t d = 0; d < K; d += kLanes) {
      store(gradients + d, factors[i] * (scale * load(gradients + d) - along * load(x + d)));
    }
    downcast_row(gradients, width, out.dtype, out.data + i * out.stride);
  }
}

constexpr BackwardKernels kBackwardKernels = {&read_keys_backward, &decay_head, &decay_channels, &solve,
                                              &advance_state,      &retreat,    &leave_head,     &leave_channels,
                                              &write_keys};
