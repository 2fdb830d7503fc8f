// The recurrence, token by token, for one ISA variant. For each token, the state is read from memory once and written
// once. The first pass computes S^T k. The second pass decays the state, writes it and computes the output, from the
// core's caches. A pass keeps its sums in registers: 8 vectors, or 128 columns of V with 512-bit vectors.

// The scratch memory for one token: rows as f32, zero past V.
struct TokenRows {
  alignas(64) float q[kLargestK], k[kLargestK];
  alignas(64) float base[kLargestK], change[kLargestK], decayed_k[kLargestK];  // used if channels of K have decays
  alignas(64) float v[kLargestV], beta[kLargestV], gv[kLargestV], o[kLargestV];
};

// A decay as two factors: S <- base S + change S. With g = -1e-3, the rounding error of exp(g) is the same for each
// token, and adds up to 1e-6 over a thousand tokens. A weak decay is therefore applied as exp(g) - 1, which leaves an
// error of 2e-7. A strong decay must not be applied that way, because the sum would cancel.
struct Decay {
  float base, change, whole;
};

TORCH_GDN_INLINE Decay decay_from_log(float g) {
  const float whole = __builtin_expf(g);
  return whole > 0.5f ? Decay{1.0f, __builtin_expm1f(g), whole} : Decay{0.0f, whole, whole};
}

// The kind of factors that multiply the state: one pair, as in Decay, or one pair per channel of K.
enum class Factors { kWeak, kStrong, kChannels };

template <Factors kFactors, typename Factor>
TORCH_GDN_INLINE Floats decayed(Floats before, Factor base, Factor change) {
  if constexpr (kFactors == Factors::kWeak) return before + change * before;
  if constexpr (kFactors == Factors::kStrong) return change * before;
  return base * before + change * before;
}

// Computes the factors of a token's channels, including g. S^T k of the decayed state equals S^T k of the old state and
// the decayed k.
TORCH_GDN_INLINE void decay_keys(const RecurrentHead& head, int64_t t, TokenRows& token) {
  upcast_row(head.gk.data + t * head.gk.stride, head.gk.dtype, head.K, token.change);
  const float g = number_at(head.g, t);
  for_each_vector(head.K, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    const auto [base, change] = decay_parts(load(token.change + i, count) + g);
    store(token.base + i, base);
    store(token.change + i, change);
    store(token.decayed_k + i, (base + change) * load(token.k + i, count));
  });
}

TORCH_GDN_INLINE void read_token(const RecurrentHead& head, int64_t t, TokenRows& token) {
  const auto read = [&](const HeadRows& rows, int64_t count, float* out) __attribute__((always_inline)) {
    upcast_row(rows.data + t * rows.stride, rows.dtype, count, out);
  };
  read(head.q, head.K, token.q);
  read(head.k, head.K, token.k);
  read(head.v, head.columns, token.v);
  if (head.has_vector_beta) {
    read(head.beta, head.columns, token.beta);
  } else {
    const float beta = number_at(head.beta, t);
    for (int64_t j = 0; j < head.columns; ++j) token.beta[j] = beta;
  }
  if (head.normalise) {
    normalise_row(token.q, head.K, kNormEps);
    normalise_row(token.k, head.K, kNormEps);
  }
}

template <int64_t kCount>
struct Sums {
  Floats at[kCount];
};

template <int64_t kCount>
TORCH_GDN_INLINE void add_to(Sums<kCount>& total, const Sums<kCount>& part) {
#pragma GCC unroll 8
  for (int64_t c = 0; c < kCount; ++c) total.at[c] += part.at[c];
}

// Sums over K take 32 rows at a time, which halves the rounding error of a sum of K terms.
constexpr int64_t kRowsOfPart = 32;

// Computes S^T k.
template <int64_t kCount>
TORCH_GDN_INLINE Sums<kCount> read_state(const float* state, int64_t stride, const float* k, int64_t K) {
  Sums<kCount> total{};
  for (int64_t first = 0; first < K; first += kRowsOfPart) {
    const int64_t last = first + kRowsOfPart < K ? first + kRowsOfPart : K;
    Sums<kCount> part{};
    for (int64_t i = first; i < last; ++i) {
#pragma GCC unroll 8
      for (int64_t c = 0; c < kCount; ++c) {
        part.at[c] = multiply_add(k[i], load(state + i * stride + c * kLanes), part.at[c]);
      }
    }
    add_to(total, part);
  }
  return total;
}

// Computes S <- decay S + k u^T, in place or to another place, and returns S^T q of the new S. It starts with the last
// rows: after a pass over 64 KB, the last rows are still in the first-level cache. Meanwhile it fetches the next head's
// rows.
template <Factors kFactors, int64_t kCount>
TORCH_GDN_INLINE Sums<kCount> write_state(const StateRows& rows, int64_t column, const Decay& decay,
                                          const TokenRows& token, const Sums<kCount>& u, int64_t K) {
  Sums<kCount> total{};
  for (int64_t end = K; end > 0; end -= kRowsOfPart) {
    Sums<kCount> part{};
    for (int64_t i = end - 1; i >= 0 && i >= end - kRowsOfPart; --i) {
      const float* from = rows.from + i * rows.from_stride + column;
      float* to = rows.to + i * rows.to_stride + column;
      constexpr bool kChannels = kFactors == Factors::kChannels;
      const float base = kChannels ? token.base[i] : decay.base, change = kChannels ? token.change[i] : decay.change;
#pragma GCC unroll 8
      for (int64_t c = 0; c < kCount; ++c) {
        prefetch(from + rows.to_next + c * kLanes);
        const Floats before = load(from + c * kLanes);
        const Floats after = multiply_add(token.k[i], u.at[c], decayed<kFactors>(before, base, change));
        store(to + c * kLanes, after);
        part.at[c] = multiply_add(token.q[i], after, part.at[c]);
      }
    }
    add_to(total, part);
  }
  return total;
}

// Processes kCount vectors of columns of one token.
template <Factors kFactors, int64_t kCount>
TORCH_GDN_INLINE void step_columns(const StateRows& rows, int64_t column, const Decay& decay, TokenRows& token,
                                   int64_t K, float scale) {
  const float* k = kFactors == Factors::kChannels ? token.decayed_k : token.k;
  const Sums<kCount> read = read_state<kCount>(rows.from + column, rows.from_stride, k, K);
  Sums<kCount> u;
#pragma GCC unroll 8
  for (int64_t c = 0; c < kCount; ++c) {
    const int64_t j = column + c * kLanes;
    u.at[c] = load(token.beta + j) * (load(token.v + j) - decay.whole * read.at[c]);
  }
  const Sums<kCount> o = write_state<kFactors>(rows, column, decay, token, u, K);
#pragma GCC unroll 8
  for (int64_t c = 0; c < kCount; ++c) store(token.o + column + c * kLanes, scale * o.at[c]);
}

// Processes the columns of a panel.
TORCH_GDN_INLINE void decay_values(const RecurrentHead& head, int64_t t, const StateRows& rows, TokenRows& token) {
  for (int64_t j = 0; j < kColumns; ++j) token.gv[j] = 0;
  upcast_row(head.gv.data + t * head.gv.stride, head.gv.dtype, head.columns, token.gv);
  alignas(64) float base[kColumns], change[kColumns];
  for (int64_t j = 0; j < kColumns; ++j) {
    const Decay decay = decay_from_log(token.gv[j]);
    base[j] = decay.base;
    change[j] = decay.change;
  }
  for (int64_t i = 0; i < head.K; ++i) {
    float* row = rows.to + i * rows.to_stride;
#pragma omp simd
    for (int64_t j = 0; j < kColumns; ++j) row[j] = base[j] * row[j] + change[j] * row[j];
  }
}

template <Factors kFactors>
TORCH_GDN_INLINE void step_all_columns(const RecurrentHead& head, const StateRows& rows, const Decay& decay,
                                       int64_t columns, TokenRows& token) {
  constexpr int64_t kWide = 8, kNarrow = kColumns / kLanes;
  int64_t column = 0;
  for (; column + kWide * kLanes <= columns; column += kWide * kLanes) {
    step_columns<kFactors, kWide>(rows, column, decay, token, head.K, head.scale);
  }
  for (; column < columns; column += kColumns) {
    step_columns<kFactors, kNarrow>(rows, column, decay, token, head.K, head.scale);
  }
}

// Calls f<Factors>(decay) with the decay of a token.
template <typename F>
TORCH_GDN_INLINE void with_factors(const RecurrentHead& head, int64_t t, TokenRows& token, const F& f) {
  if (head.gk.data) {
    decay_keys(head, t, token);
    return f.template operator()<Factors::kChannels>(Decay{0.0f, 1.0f, 1.0f});
  }
  const Decay decay = decay_from_log(number_at(head.g, t));
  if (decay.base > 0) return f.template operator()<Factors::kWeak>(decay);
  f.template operator()<Factors::kStrong>(decay);
}

// Takes states whose rows are those of K, [K, V].
void run_key_rows(const RecurrentHead& head, const StateRows& state) {
  TokenRows token;
  const int64_t columns = ceil_div(head.columns, kColumns) * kColumns;
  for (int64_t j = head.columns; j < columns; ++j) token.v[j] = token.beta[j] = 0;
  StateRows rows = state;
  for (int64_t t = 0; t < head.tokens; ++t) {
    read_token(head, t, token);
    if (head.gv.data) decay_values(head, t, rows, token);
    with_factors(head, t, token, [&]<Factors kFactors>(const Decay& decay) __attribute__((always_inline)) {
      step_all_columns<kFactors>(head, rows, decay, columns, token);
    });
    downcast_row(token.o, head.columns, head.o.dtype, head.o.data + t * head.o.stride);
    rows.from = rows.to;
    rows.from_stride = rows.to_stride;
  }
}

typedef float Four __attribute__((vector_size(16)));
typedef float FourInMemory __attribute__((vector_size(16), aligned(4), may_alias));

// Returns the sums of four vectors' elements.
TORCH_GDN_INLINE Four sums_of(const Sums<4>& x) {
  Four folded[4];
  for (int64_t i = 0; i < 4; ++i) {
    Four parts[kLanes / 4];
    __builtin_memcpy(parts, &x.at[i], sizeof(Floats));
    if constexpr (kLanes == 16) {
      folded[i] = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    } else if constexpr (kLanes == 8) {
      folded[i] = parts[0] + parts[1];
    } else {
      folded[i] = parts[0];
    }
  }
  const Four low01 = __builtin_shufflevector(folded[0], folded[1], 0, 4, 1, 5);
  const Four high01 = __builtin_shufflevector(folded[0], folded[1], 2, 6, 3, 7);
  const Four low23 = __builtin_shufflevector(folded[2], folded[3], 0, 4, 1, 5);
  const Four high23 = __builtin_shufflevector(folded[2], folded[3], 2, 6, 3, 7);
  const Four pairs01 = low01 + high01, pairs23 = low23 + high23;  // a02 b02 a13 b13
  return __builtin_shufflevector(pairs01, pairs23, 0, 1, 4, 5) + __builtin_shufflevector(pairs01, pairs23, 2, 3, 6, 7);
}

// Processes four rows of a state [V, K]. Each is read and written along K.
template <Factors kFactors>
TORCH_GDN_INLINE void step_rows(const StateRows& rows, int64_t row, const Decay& decay, TokenRows& token, int64_t K,
                                float scale) {
  const float* from = rows.from + row * rows.from_stride;
  float* to = rows.to + row * rows.to_stride;
  constexpr bool kChannels = kFactors == Factors::kChannels;
  Sums<4> read{}, answer{};
  for (int64_t i = 0; i < K; i += kLanes) {
    const Floats k = load((kChannels ? token.decayed_k : token.k) + i);
#pragma GCC unroll 4
    for (int64_t r = 0; r < 4; ++r) {
      prefetch(from + r * rows.from_stride + i + rows.to_next);
      read.at[r] += k * load(from + r * rows.from_stride + i);
    }
  }
  const Four v = *reinterpret_cast<const FourInMemory*>(token.v + row);
  const Four beta = *reinterpret_cast<const FourInMemory*>(token.beta + row);
  const Four u = beta * (v - decay.whole * sums_of(read));
  for (int64_t i = 0; i < K; i += kLanes) {
    const Floats k = load(token.k + i), q = load(token.q + i);
    const Floats base = kChannels ? load(token.base + i) : all_lanes(decay.base);
    const Floats change = kChannels ? load(token.change + i) : all_lanes(decay.change);
#pragma GCC unroll 4
    for (int64_t r = 0; r < 4; ++r) {
      const Floats before = load(from + r * rows.from_stride + i);
      const Floats after = multiply_add(u[r], k, decayed<kFactors>(before, base, change));
      store(to + r * rows.to_stride + i, after);
      answer.at[r] += q * after;
    }
  }
  *reinterpret_cast<FourInMemory*>(token.o + row) = scale * sums_of(answer);
}

// Takes states whose rows are those of V, [V, K]. K is a multiple of 16, and the number of columns is a multiple of 4.
void run_value_rows(const RecurrentHead& head, const StateRows& state) {
  TokenRows token;
  StateRows rows = state;
  for (int64_t t = 0; t < head.tokens; ++t) {
    read_token(head, t, token);
    with_factors(head, t, token, [&]<Factors kFactors>(const Decay& decay) __attribute__((always_inline)) {
      for (int64_t row = 0; row < head.columns; row += 4) {
        step_rows<kFactors>(rows, row, decay, token, head.K, head.scale);
      }
    });
    downcast_row(token.o, head.columns, head.o.dtype, head.o.data + t * head.o.stride);
    rows.from = rows.to;
    rows.from_stride = rows.to_stride;
  }
}

constexpr RecurrentKernels kRecurrentKernels = {&run_key_rows, &run_value_rows};
