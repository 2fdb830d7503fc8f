#include "ops/aura/aura_rotate.h"

#include <cmath>

#include "cpu/aura/rotation.h"
#include "cpu/aura/vectors.h"
#include "cpu/define.h"

namespace torch_gdn {

namespace {

void run(const AuraRotate<int64_t>& op, const Tensor& y_any) {
  const Tensor x = cpu::as_vectors(op.x, "x"), y = cpu::as_vectors(y_any, "y"), signs = op.signs.contiguous();
  const cpu::Rows in(x), out(y);
  const int64_t D = x.size(3);
  const auto factor = static_cast<float>(op.scale / std::sqrt(static_cast<double>(D)));
  cpu::for_each_vector(x, [&](int64_t b, int64_t h, int64_t t) {
    float row[cpu::kLargestD];
    in.read(b, h, t, 0, D, row);
    cpu::rotate(row, signs.const_data_ptr<float>(), D, op.inverse);
    for (int64_t d = 0; d < D; ++d) row[d] *= factor;
    out.write(b, h, t, 0, D, row);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<AuraRotate, &run>(m); }

}  // namespace torch_gdn
