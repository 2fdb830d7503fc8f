#include <array>

#include "cpu/common.h"
#include "cpu/define.h"
#include "cpu/simd/layer_kernels.h"
#include "ops/layers/rows.h"

namespace torch_gdn::cpu {
namespace {

constexpr int64_t kBlock = 1024;  // elements computed at a time

struct Block {
  std::array<float, kBlock> factor, logit, result;
};

// Computes result * silu(logit), or result * sigmoid(logit).
void multiply(Block& block, int64_t count, bool has_sigmoid) {
  std::copy_n(block.logit.begin(), count, block.factor.begin());
  gating_kernels().betas(block.factor.data(), count, 1.0f);
  if (has_sigmoid) {
    for (int64_t i = 0; i < count; ++i) block.result[i] *= block.factor[i];
  } else {
    for (int64_t i = 0; i < count; ++i) block.result[i] *= block.logit[i] * block.factor[i];
  }
}

void run(const ActAndMul<int64_t>& op, const Tensor& y) {
  if (y.numel() == 0) return;
  const Rows gates = rows_of(op.gate, "gate"), factors = rows_of(op.up, "up");
  const int64_t D = y.size(-1), item_size = y.element_size();
  const auto dtype = y.scalar_type();
  auto* const out = static_cast<char*>(y.mutable_data_ptr());
  const auto& rows = row_kernels();
  at::parallel_for(0, y.numel() / D, ceil_div(kElementsPerCore, D), [&](int64_t begin, int64_t end) {
    Block block;
    for (int64_t row = begin; row < end; ++row) {
      const char *logits = gates.row(row), *values = factors.row(row);
      for (int64_t first = 0; first < D; first += kBlock) {
        const int64_t count = std::min(kBlock, D - first);
        rows.upcast(logits + first * item_size, dtype, count, block.logit.data());
        rows.upcast(values + first * item_size, dtype, count, block.result.data());
        multiply(block, count, op.has_sigmoid());
        rows.downcast(block.result.data(), count, dtype, out + (row * D + first) * item_size);
      }
    }
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { define<ActAndMul, &run>(m); }

}  // namespace torch_gdn::cpu
