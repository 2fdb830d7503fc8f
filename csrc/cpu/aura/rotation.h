#pragma once
#include <cstdint>

namespace torch_gdn::cpu {

// Computes x <- sqrt(D) Pi x, or sqrt(D) Pi^T x if `inverse`, with Pi = H diag(signs) / sqrt(D).
void rotate(float* x, const float* signs, int64_t D, bool inverse);

}  // namespace torch_gdn::cpu
