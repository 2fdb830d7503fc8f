// The gates for one ISA variant. They are computed in place.

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

constexpr GatingKernels kGatingKernels = {&log_decays, &betas};
