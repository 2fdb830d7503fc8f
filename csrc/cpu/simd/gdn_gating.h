// The gates for one ISA variant, which are computed in place, and their gradients.

void log_decays(float* a, const float* factor, const float* bias, int64_t tokens, int64_t HV) {
  for (int64_t token = 0; token < tokens; ++token, a += HV) {
    for_each_vector(HV, [&](int64_t head, int64_t count) __attribute__((always_inline)) {
      const Floats x = load(a + head, count) + load(bias + head, count);
      store(a + head, load(factor + head, count) * softplus(x), count);
    });
  }
}

void betas(float* b, int64_t total, float scale) {
  for_each_vector(total, [&](int64_t first, int64_t count) __attribute__((always_inline)) {
    store(b + first, scale * sigmoid(load(b + first, count)), count);
  });
}

void differentiate_gates(const GateBwdRow& row) {
  for_each_vector(row.count, [&](int64_t first, int64_t count) __attribute__((always_inline)) {
    const Floats dy = load(row.dy + first, count), rate = load(row.rate + first, count);
    const Floats x = load(row.g + first, count) + load(row.bias + first, count);
    Floats dx, dA_log;
    if (row.lower_bound < 0) {
      const Floats logit = rate * x, magnitude = logit < 0.0f ? -logit : logit;
      const Floats small = sigmoid(-magnitude), slope = small * (1.0f - small);
      dx = dy * row.lower_bound * slope * rate;
      dA_log = dx * x;
    } else {
      dx = -dy * rate * sigmoid(x);
      dA_log = -dy * rate * softplus(x);
    }
    store(row.dg + first, dx, count);
    store(row.dA_log + first, load(row.dA_log + first, count) + dA_log, count);
    store(row.dbias + first, load(row.dbias + first, count) + dx, count);
  });
}

constexpr GatingKernels kGatingKernels = {&log_decays, &betas, &differentiate_gates};
