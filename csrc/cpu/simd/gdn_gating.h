// The gates for one ISA variant, which are computed in place, and their gradients.

TORCH_GDN_INLINE void log_decay_lanes(float* a, const float* factor, const float* bias, int64_t count) {
  store(a, load(factor, count) * softplus(load(a, count) + load(bias, count)), count);
}

void log_decays(float* a, const float* factor, const float* bias, int64_t tokens, int64_t HV) {
  const int64_t whole = HV / kLanes * kLanes;
  for (int64_t token = 0; token < tokens; ++token, a += HV) {
    for (int64_t head = 0; head < whole; head += kLanes) log_decay_lanes(a + head, factor + head, bias + head, kLanes);
    if (whole < HV) log_decay_lanes(a + whole, factor + whole, bias + whole, HV - whole);
  }
}

TORCH_GDN_INLINE void beta_lanes(float* b, float scale, int64_t count) {
  store(b, scale * sigmoid(load(b, count)), count);
}

void betas(float* b, int64_t count, float scale) {
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) beta_lanes(b + i, scale, kLanes);
  if (whole < count) beta_lanes(b + whole, scale, count - whole);
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
