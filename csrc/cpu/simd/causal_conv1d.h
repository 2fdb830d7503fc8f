// The causal convolution for one ISA variant. It takes each group of kLanes channels over all tokens. The last W tokens
// and the weights stay in registers, so each element is read and written once.

template <typename In, typename Out, int W>
TORCH_GDN_INLINE void convolve_lanes(const ConvolutionRows& rows, int64_t channel, int64_t count) {
  const auto* in = static_cast<const In*>(rows.in) + channel;
  auto* out = static_cast<Out*>(rows.out) + channel;
  const auto* residual = rows.residual != nullptr ? static_cast<const Out*>(rows.residual) + channel : nullptr;
  Floats window[W], weight[W];
#pragma GCC unroll 4
  for (int tap = 0; tap < W; ++tap) weight[tap] = load(rows.weight + tap * kChannels + channel);
#pragma GCC unroll 4
  for (int tap = 0; tap + 1 < W; ++tap) window[tap] = load(rows.before + tap * kChannels + channel);
  const Floats bias = load(rows.bias + channel);
#pragma GCC unroll 4
  for (int64_t t = 0; t < rows.tokens; ++t, in += rows.in_stride, out += rows.out_stride) {
    window[W - 1] = load(in, count);
    Floats sum = bias;
#pragma GCC unroll 4
    for (int tap = 0; tap < W; ++tap) sum += weight[tap] * window[tap];
    if (rows.silu) sum = silu<Out>(sum);
    if (residual != nullptr) sum += load(residual + t * rows.residual_stride, count);
    store(out, sum, count);
#pragma GCC unroll 4
    for (int tap = 0; tap + 1 < W; ++tap) window[tap] = window[tap + 1];
  }
#pragma GCC unroll 4
  for (int tap = 0; tap + 1 < W; ++tap) store(rows.before + tap * kChannels + channel, window[tap]);
}

template <typename In, typename Out, int W>
void convolve_rows(const ConvolutionRows& rows) {
  for_each_vector(rows.channels, [&](int64_t channel, int64_t count) __attribute__((always_inline)) {
    convolve_lanes<In, Out, W>(rows, channel, count);
  });
}

// Calls f<W>() for a W from 2 to 4.
template <typename F>
TORCH_GDN_INLINE void with_width(int64_t W, const F& f) {
  if (W == 4) return f.template operator()<4>();
  if (W == 3) return f.template operator()<3>();
  f.template operator()<2>();
}

void convolve(const ConvolutionRows& rows) {
  with_element(rows.dtype, [&]<typename Element>(Element*) {
    with_width(rows.W, [&]<int W>() {
      rows.from_f32 ? convolve_rows<float, Element, W>(rows) : convolve_rows<Element, Element, W>(rows);
    });
  });
}

TORCH_GDN_INLINE int64_t lanes_of(int64_t left) { return left > kLanes ? kLanes : left > 0 ? left : 0; }

// Transposes `count` rows of kColumns elements into columns, and back.
template <int kColumns, typename Element>
TORCH_GDN_INLINE void load_columns(const Element* from, int64_t count, Floats (&columns)[kColumns]) {
#pragma GCC unroll 4
  for (int i = 0; i < kColumns; ++i) {
    const int64_t left = count * kColumns - i * kLanes;
    columns[i] = count == kLanes ? load(from + i * kLanes) : load(from + i * kLanes, lanes_of(left));
  }
  split_columns(columns);
}

template <int kColumns, typename Element>
TORCH_GDN_INLINE void store_columns(Element* to, int64_t count, Floats (&columns)[kColumns]) {
  join_columns(columns);
#pragma GCC unroll 4
  for (int i = 0; i < kColumns; ++i) {
    const int64_t left = count * kColumns - i * kLanes;
    if (count == kLanes) store(to + i * kLanes, columns[i]);
    if (count != kLanes) store(to + i * kLanes, columns[i], lanes_of(left));
  }
}

template <typename Element, int S>
TORCH_GDN_INLINE Floats step_output(const ConvolutionStep& step, int64_t channel, int64_t count, Floats x,
                                    const Floats (&state)[S]) {
  Floats sum = load(step.bias + channel);
#pragma GCC unroll 4
  for (int tap = 0; tap < 3; ++tap) sum += load(step.weight + tap * kChannels + channel) * state[S - 3 + tap];
  sum += load(step.weight + 3 * kChannels + channel) * x;
  if (step.silu) sum = silu<Element>(sum);
  if (step.residual != nullptr) sum += load(static_cast<const Element*>(step.residual) + channel, count);
  return sum;
}

// The kernel for states in which the columns of a channel are neighbours.
template <typename Element, int S>
TORCH_GDN_INLINE void step_lanes(const ConvolutionStep& step, int64_t channel, int64_t count) {
  Floats state[S] = {};
  if (step.before != nullptr) load_columns(static_cast<const Element*>(step.before) + channel * S, count, state);
  const Floats x = load(static_cast<const Element*>(step.x) + channel, count);
  store(static_cast<Element*>(step.y) + channel, step_output<Element, S>(step, channel, count, x, state), count);
#pragma GCC unroll 4
  for (int column = 0; column + 1 < S; ++column) state[column] = state[column + 1];
  state[S - 1] = x;
  store_columns(static_cast<Element*>(step.after) + channel * S, count, state);
}

// The kernel for states in which the channels of a column are neighbours. Elements move without a transposition.
template <typename Element, int S>
TORCH_GDN_INLINE void step_dense_lanes(const ConvolutionStep& step, int64_t channel, int64_t count) {
  using Lanes = typename Memory<Element>::Lanes;
  Lanes elements[S + 1] = {};
  const auto size = count * sizeof(Element);
  const auto* before = static_cast<const Element*>(step.before) + channel;
  if (step.before != nullptr) {
#pragma GCC unroll 4
    for (int column = 0; column < S; ++column) {
      __builtin_memcpy(&elements[column], before + column * step.column_stride, size);
    }
  }
  __builtin_memcpy(&elements[S], static_cast<const Element*>(step.x) + channel, size);
  Floats state[S];
#pragma GCC unroll 4
  for (int column = 0; column < S; ++column) state[column] = Memory<Element>::upcast(elements[column]);
  const Floats x = Memory<Element>::upcast(elements[S]);
  store(static_cast<Element*>(step.y) + channel, step_output<Element, S>(step, channel, count, x, state), count);
  auto* after = static_cast<Element*>(step.after) + channel;
#pragma GCC unroll 4
  for (int column = 0; column < S; ++column) {
    __builtin_memcpy(after + column * step.column_stride, &elements[column + 1], size);
  }
}

template <typename Element, int S>
void step_channels(const ConvolutionStep& step) {
  for_each_vector(step.channels, [&](int64_t channel, int64_t count) __attribute__((always_inline)) {
    if (step.dense_channels) {
      step_dense_lanes<Element, S>(step, channel, count);
    } else {
      step_lanes<Element, S>(step, channel, count);
    }
  });
}

void convolve_step(const ConvolutionStep& step) {
  with_element(step.dtype, [&]<typename Element>(Element*) {
    step.S == 4 ? step_channels<Element, 4>(step) : step_channels<Element, 3>(step);
  });
}

// Squares of kLanes channels and kLanes tokens are transposed in registers.
template <typename Element>
void read_transposed_elements(const Element* from, int64_t stride, int64_t tokens, int64_t channels, float* out) {
  for (int64_t channel = 0; channel < channels; channel += kLanes) {
    const int64_t width = channels - channel < kLanes ? channels - channel : kLanes;
    for (int64_t t = 0; t < tokens; t += kLanes) {
      const int64_t height = tokens - t < kLanes ? tokens - t : kLanes;
      Floats square[kLanes] = {};
      if (width == kLanes && height == kLanes) {
#pragma GCC unroll 16
        for (int64_t i = 0; i < kLanes; ++i) square[i] = load(from + (channel + i) * stride + t);
      } else {
        for (int64_t i = 0; i < width; ++i) square[i] = load(from + (channel + i) * stride + t, height);
      }
      transpose<kLaneBits>(square);
      for (int64_t i = 0; i < height; ++i) store(out + (t + i) * kTransposedChannels + channel, square[i]);
    }
  }
}

void read_transposed(const void* in, at::ScalarType dtype, int64_t stride, int64_t tokens, int64_t channels,
                     float* out) {
  with_element(dtype, [&]<typename Element>(Element*) {
    read_transposed_elements(static_cast<const Element*>(in), stride, tokens, channels, out);
  });
}

void read_columns(const void* in, at::ScalarType dtype, int64_t channels, int64_t S, float* out) {
  with_element(dtype, [&]<typename Element>(Element*) {
    with_width(S, [&]<int kColumns>() {
      for_each_vector(channels, [&](int64_t channel, int64_t count) __attribute__((always_inline)) {
        Floats columns[kColumns];
        load_columns(static_cast<const Element*>(in) + channel * kColumns, count, columns);
#pragma GCC unroll 4
        for (int i = 0; i < kColumns; ++i) store(out + i * kChannels + channel, columns[i]);
      });
    });
  });
}

void write_columns(const float* in, int64_t channels, int64_t S, at::ScalarType dtype, void* out) {
  with_element(dtype, [&]<typename Element>(Element*) {
    with_width(S, [&]<int kColumns>() {
      for_each_vector(channels, [&](int64_t channel, int64_t count) __attribute__((always_inline)) {
        Floats columns[kColumns];
#pragma GCC unroll 4
        for (int i = 0; i < kColumns; ++i) columns[i] = load(in + i * kChannels + channel);
        store_columns(static_cast<Element*>(out) + channel * kColumns, count, columns);
      });
    });
  });
}

// The gradients. Each group of kLanes channels walks over the tokens once, with the last W tokens and the gradients dz
// of the last W sums in registers. When dz of token t is known, token t - (W - 1) has all of its gradient.

// Adds weight[tap] dz of the W sums that read a token: the sum of the next token but j reads it with tap W - 1 - j.
template <int W>
TORCH_GDN_INLINE Floats gradient_of_token(const Floats (&weight)[W], const Floats (&dz)[W], const uint8_t (&taps)[W]) {
  Floats sum = {};
#pragma GCC unroll 4
  for (int j = 0; j < W; ++j) {
    if (taps[j] >> (W - 1 - j) & 1) sum += weight[W - 1 - j] * dz[j];
  }
  return sum;
}

template <typename Element, int W>
TORCH_GDN_INLINE void convolve_bwd_lanes(const ConvolveBwdRows& rows, int64_t channel, int64_t lanes) {
  const auto *dy = static_cast<const Element*>(rows.dy) + channel, *x = static_cast<const Element*>(rows.x) + channel;
  auto* dx = static_cast<Element*>(rows.dx) + channel;
  Floats weight[W], dweight[W], window[W], dz[W] = {};
  uint8_t taps[W] = {};
  const Floats bias = load(rows.bias + channel);
  Floats dbias = load(rows.dbias + channel);
#pragma GCC unroll 4
  for (int tap = 0; tap < W; ++tap) {
    weight[tap] = load(rows.weight + tap * kChannels + channel);
    dweight[tap] = load(rows.dweight + tap * kChannels + channel);
    window[tap] = tap + 1 < W ? load(rows.before + tap * kChannels + channel) : Floats{};
  }
  for (int64_t t = 0; t < rows.tokens + W - 1; ++t) {
    Floats next = {};
    uint8_t read = 0;
    if (t < rows.tokens + rows.after) {
      read = rows.taps != nullptr ? rows.taps[t] : 0xFF;
      window[W - 1] = load(x + t * rows.stride, lanes);
      next = read != 0 ? load(dy + t * rows.stride, lanes) : Floats{};
      if (rows.silu) {
        Floats z = bias;
#pragma GCC unroll 4
        for (int tap = 0; tap < W; ++tap) {
          if (read >> tap & 1) z += weight[tap] * window[tap];
        }
        next *= sigmoid(z) * (1.0f + z * sigmoid(-z));
      }
      if (t < rows.tokens) {
        dbias += next;
#pragma GCC unroll 4
        for (int tap = 0; tap < W; ++tap) {
          if (read >> tap & 1) dweight[tap] += next * window[tap];
        }
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j + 1 < W; ++j) window[j] = window[j + 1], dz[j] = dz[j + 1], taps[j] = taps[j + 1];
    dz[W - 1] = next, taps[W - 1] = read;
    const int64_t token = t - (W - 1);
    if (token < 0 && rows.dbefore == nullptr) continue;
    Floats result = gradient_of_token<W>(weight, dz, taps);
    if (token < 0) {
      store(rows.dbefore + (token + W - 1) * kChannels + channel, result, lanes);
      continue;
    }
    if (rows.dfinal != nullptr && token >= rows.kept) {
      result += load(rows.dfinal + (token - rows.kept) * rows.dfinal_stride + channel, lanes);
    }
    store(dx + token * rows.stride, result, lanes);
  }
#pragma GCC unroll 4
  for (int tap = 0; tap < W; ++tap) store(rows.dweight + tap * kChannels + channel, dweight[tap], lanes);
  store(rows.dbias + channel, dbias, lanes);
}

template <typename Element, int W>
void convolve_bwd_rows(const ConvolveBwdRows& rows) {
  for_each_vector(rows.channels, [&](int64_t channel, int64_t count) __attribute__((always_inline)) {
    convolve_bwd_lanes<Element, W>(rows, channel, count);
  });
}

void convolve_bwd(const ConvolveBwdRows& rows) {
  with_element(rows.dtype, [&]<typename Element>(Element*) {
    with_width(rows.W, [&]<int W>() { convolve_bwd_rows<Element, W>(rows); });
  });
}

constexpr ConvolutionKernels kConvolutionKernels = {&convolve,     &convolve_step, &read_transposed,
                                                    &read_columns, &write_columns, &convolve_bwd};
