#pragma once
#include <cstdint>

namespace torch_gdn::cpu {

// x <- sqrt(D) Pi x, Pi = H diag(signs) / sqrt(D), or sqrt(D) Pi^T x (inverse).
void rotate(float* x, const float* signs, int64_t D, bool inverse);

}  // namespace torch_gdn::cpu
