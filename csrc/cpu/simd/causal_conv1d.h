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
void convolve(const ConvolutionRows& rows) {
  int64_t channel = 0;
  for (; channel + kLanes <= rows.channels; channel += kLanes) {
    convolve_lanes<In, Out, W>(rows, channel, kLanes);
  }
  if (channel < rows.channels) convolve_lanes<In, Out, W>(rows, channel, rows.channels - channel);
}

template <typename In, typename Out>
Convolve convolve_of(int64_t W) {
  return W == 4 ? &convolve<In, Out, 4> : W == 3 ? &convolve<In, Out, 3> : &convolve<In, Out, 2>;
}

Convolve convolve_of(at::ScalarType dtype, bool from_f32, int64_t W) {
  if (dtype == at::kFloat) return convolve_of<float, float>(W);
  if (dtype == at::kHalf) return from_f32 ? convolve_of<float, c10::Half>(W) : convolve_of<c10::Half, c10::Half>(W);
  return from_f32 ? convolve_of<float, c10::BFloat16>(W) : convolve_of<c10::BFloat16, c10::BFloat16>(W);
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

template <typename Element, int S, bool kDenseChannels>
void convolve_step(const ConvolutionStep& step) {
  for_each_vector(step.channels, [&](int64_t channel, int64_t count) __attribute__((always_inline)) {
    if constexpr (kDenseChannels) {
      step_dense_lanes<Element, S>(step, channel, count);
    } else {
      step_lanes<Element, S>(step, channel, count);
    }
  });
}

template <typename Element>
ConvolveStep convolve_step_of(int64_t S, bool dense_channels) {
  if (dense_channels) return S == 4 ? &convolve_step<Element, 4, true> : &convolve_step<Element, 3, true>;
  return S == 4 ? &convolve_step<Element, 4, false> : &convolve_step<Element, 3, false>;
}

ConvolveStep convolve_step_of(at::ScalarType dtype, int64_t S, bool dense_channels) {
  if (dtype == at::kFloat) return convolve_step_of<float>(S, dense_channels);
  return dtype == at::kHalf ? convolve_step_of<c10::Half>(S, dense_channels)
                            : convolve_step_of<c10::BFloat16>(S, dense_channels);
}

// Squares of kLanes channels and kLanes tokens are transposed in registers.
template <typename Element>
void read_transposed(const void* in, int64_t stride, int64_t tokens, int64_t channels, float* out) {
  const auto* from = static_cast<const Element*>(in);
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

ReadTransposed read_transposed_of(at::ScalarType dtype) {
  if (dtype == at::kFloat) return &read_transposed<float>;
  return dtype == at::kHalf ? &read_transposed<c10::Half> : &read_transposed<c10::BFloat16>;
}

// Calls f with a null pointer to the element type, and S as a constant.
template <typename F>
TORCH_GDN_INLINE void with_columns(at::ScalarType dtype, int64_t S, const F& f) {
  const auto with_element = [&](auto* element) __attribute__((always_inline)) {
    if (S == 4) return f(element, std::integral_constant<int, 4>());
    if (S == 3) return f(element, std::integral_constant<int, 3>());
    f(element, std::integral_constant<int, 2>());
  };
  if (dtype == at::kFloat) return with_element(static_cast<float*>(nullptr));
  if (dtype == at::kHalf) return with_element(static_cast<c10::Half*>(nullptr));
  with_element(static_cast<c10::BFloat16*>(nullptr));
}

void read_columns(const void* in, at::ScalarType dtype, int64_t channels, int64_t S, float* out) {
  with_columns(dtype, S,
               [&]<typename Element, int kColumns>(Element*, std::integral_constant<int, kColumns>)
                   __attribute__((always_inline)) {
                     for_each_vector(channels, [&](int64_t channel, int64_t count) __attribute__((always_inline)) {
                       Floats columns[kColumns];
                       load_columns(static_cast<const Element*>(in) + channel * kColumns, count, columns);
#pragma GCC unroll 4
                       for (int i = 0; i < kColumns; ++i) store(out + i * kChannels + channel, columns[i]);
                     });
                   });
}

void write_columns(const float* in, int64_t channels, int64_t S, at::ScalarType dtype, void* out) {
  with_columns(dtype, S,
               [&]<typename Element, int kColumns>(Element*, std::integral_constant<int, kColumns>)
                   __attribute__((always_inline)) {
                     for_each_vector(channels, [&](int64_t channel, int64_t count) __attribute__((always_inline)) {
                       Floats columns[kColumns];
#pragma GCC unroll 4
                       for (int i = 0; i < kColumns; ++i) columns[i] = load(in + i * kChannels + channel);
                       store_columns(static_cast<Element*>(out) + channel * kColumns, count, columns);
                     });
                   });
}

constexpr ConvolutionKernels kConvolutionKernels = {&convolve_of, &convolve_step_of, &read_transposed_of, &read_columns,
                                                    &write_columns};
