// Norms and their gradients for one ISA variant. A row is read twice, once for the sum of squares and once for the
// values. The second time, the row is in the first-level cache.

template <typename Element, bool kResidual>
TORCH_GDN_INLINE Floats row_values(const Element* x, const Element* residual, int64_t first, int64_t count) {
  Floats values = load(x + first, count);
  if constexpr (kResidual) values += load(residual + first, count);
  return values;
}

// Gate is void without a gate.
template <typename Element, bool kResidual, typename Gate>
void normalise_rows(const NormRows& rows) {
  constexpr bool kGate = !std::is_void_v<Gate>;
  const auto* x = static_cast<const Element*>(rows.x);
  const auto* residual = static_cast<const Element*>(rows.residual);
  const auto* gate = static_cast<const Gate*>(rows.gate);
  auto *out = static_cast<Element*>(rows.out), *sum = static_cast<Element*>(rows.sum);
  const int64_t D = rows.D;
  for (int64_t row = 0; row < rows.rows; ++row) {
    Floats squares = {};
    for_each_vector(D, [&](int64_t first, int64_t count) __attribute__((always_inline)) {
      const Floats values = row_values<Element, kResidual>(x, residual, first, count);
      squares += values * values;
      if constexpr (kResidual) store(sum + first, values, count);
    });
    const Floats factor = all_lanes(1.0f / __builtin_sqrtf(sum_of_lanes(squares) / static_cast<float>(D) + rows.eps));
    for_each_vector(D, [&](int64_t first, int64_t count) __attribute__((always_inline)) {
      Floats values = row_values<Element, kResidual>(x, residual, first, count) * factor;
      if (rows.round_norm) values = Memory<Element>::rounded(values);
      if (rows.weight != nullptr) values *= load(rows.weight + first, count) + rows.weight_offset;
      if constexpr (kGate) {
        if (rows.round_product) values = Memory<Element>::rounded(values);
        const Floats logit = load(gate + first, count);
        values *= sigmoid(logit);
        if (!rows.sigmoid) values *= logit;
      }
      store(out + first, values, count);
    });
    x += rows.x_stride;
    out += D;
    if constexpr (kResidual) residual += rows.residual_stride, sum += D;
    if constexpr (kGate) gate += rows.gate_stride;
  }
}

void normalise(const NormRows& rows) {
  with_element(rows.dtype, [&]<typename Element>(Element*) {
    if (rows.residual != nullptr) return normalise_rows<Element, true, void>(rows);
    if (rows.gate == nullptr) return normalise_rows<Element, false, void>(rows);
    with_element(rows.gate_dtype, [&]<typename Gate>(Gate*) { normalise_rows<Element, false, Gate>(rows); });
  });
}

// The normalised row is n. With s = rstd and the mean over `count`, dx = s (dn - n mean(dn n)). Scratch keeps dn.
template <typename Element, typename Gate>
void differentiate_rows(const NormBwdRows& rows) {
  const int64_t D = rows.D;
  const auto *dy = static_cast<const Element*>(rows.dy), *x = static_cast<const Element*>(rows.x);
  const auto* dh = static_cast<const Element*>(rows.dh);
  const auto* gate = static_cast<const Gate*>(rows.gate);
  auto* dx = static_cast<Element*>(rows.dx);
  auto* dgate = static_cast<Gate*>(rows.dgate);
  for (int64_t row = 0; row < rows.rows; ++row, dy += D, x += D, dx += D) {
    Floats squares = {}, products = {};
    for_each_vector(D, [&](int64_t first, int64_t count) __attribute__((always_inline)) {
      const Floats values = load(x + first, count);
      squares += values * values;
    });
    const Floats rstd = all_lanes(1.0f / __builtin_sqrtf(sum_of_lanes(squares) / rows.count + rows.eps));
    for_each_vector(D, [&](int64_t first, int64_t count) __attribute__((always_inline)) {
      const Floats normed = load(x + first, count) * rstd;
      const Floats weight = rows.weight != nullptr ? load(rows.weight + first, count) : all_lanes(1.0f);
      Floats dproduct = load(dy + first, count);  // the gradient of n weight
      if (gate != nullptr) {
        const Floats logit = load(gate + first, count), opened = sigmoid(logit), closed = sigmoid(-logit);
        const Floats slope = rows.sigmoid ? opened * closed : opened * (1.0f + logit * closed);
        store(dgate + first, dproduct * normed * weight * slope, count);
        dproduct *= rows.sigmoid ? opened : opened * logit;
      }
      if (rows.dweight != nullptr) {
        store(rows.dweight + first, load(rows.dweight + first, count) + dproduct * normed, count);
      }
      const Floats dnormed = dproduct * weight;
      store(rows.dnormed + first, dnormed, count);
      products += dnormed * normed;
    });
    const Floats mean = all_lanes(sum_of_lanes(products) / rows.count);
    for_each_vector(D, [&](int64_t first, int64_t count) __attribute__((always_inline)) {
      const Floats normed = load(x + first, count) * rstd;
      Floats result = rstd * (load(rows.dnormed + first, count) - normed * mean);
      if (dh != nullptr) result += load(dh + first, count);
      store(dx + first, result, count);
    });
    if (gate != nullptr) gate += D, dgate += D;
    if (dh != nullptr) dh += D;
  }
}

void differentiate(const NormBwdRows& rows) {
  with_element(rows.dtype, [&]<typename Element>(Element*) {
    with_element(rows.gate_dtype, [&]<typename Gate>(Gate*) { differentiate_rows<Element, Gate>(rows); });
  });
}

constexpr NormKernels kNormKernels = {&normalise, &differentiate};
