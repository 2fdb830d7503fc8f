// The gradients of the causal convolution for one ISA variant. Each group of kLanes channels walks over the tokens
// once, with the last W tokens and the gradients dz of the last W sums in registers. When dz of token t is known, token
// t - (W - 1) has all of its gradient.

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
void convolve_bwd(const ConvolveBwdRows& rows) {
  for_each_vector(rows.channels, [&](int64_t channel, int64_t count) __attribute__((always_inline)) {
    convolve_bwd_lanes<Element, W>(rows, channel, count);
  });
}

template <typename Element>
ConvolveBwd convolve_bwd_of(int64_t W) {
  return W == 4 ? &convolve_bwd<Element, 4> : W == 3 ? &convolve_bwd<Element, 3> : &convolve_bwd<Element, 2>;
}

ConvolveBwd convolve_bwd_of(at::ScalarType dtype, int64_t W) {
  if (dtype == at::kFloat) return convolve_bwd_of<float>(W);
  return dtype == at::kHalf ? convolve_bwd_of<c10::Half>(W) : convolve_bwd_of<c10::BFloat16>(W);
}

constexpr ConvolveBwdKernels kConvolveBwdKernels = {&convolve_bwd_of};
