// The gradients of a norm for one ISA variant. A row is read twice: for rstd, and for the gradients of the normalised
// row n, which scratch keeps. With s = rstd and the mean over `count`, dx = s (dn - n mean(dn n)).

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

template <typename Element>
DifferentiateRows differentiate_rows_of(at::ScalarType gate) {
  if (gate == at::kFloat) return &differentiate_rows<Element, float>;
  return gate == at::kHalf ? &differentiate_rows<Element, c10::Half> : &differentiate_rows<Element, c10::BFloat16>;
}

DifferentiateRows differentiate_rows_of(at::ScalarType x, at::ScalarType gate) {
  if (x == at::kFloat) return differentiate_rows_of<float>(gate);
  return x == at::kHalf ? differentiate_rows_of<c10::Half>(gate) : differentiate_rows_of<c10::BFloat16>(gate);
}

constexpr NormBwdKernels kNormBwdKernels = {&differentiate_rows_of};
