// Copies rows between f32 and pages or packed tokens. The last stride of these is 1; the others are arbitrary.
#pragma once
#include "cpu/common.h"

namespace torch_gdn::cpu {

// [T, H, D].
class Tokens : Rows {
 public:
  explicit Tokens(const Tensor& x) : Rows(x.unsqueeze(0)) {}
  void read(int64_t token, int64_t head, int64_t count, float* out) const { Rows::read(0, token, head, 0, count, out); }
  void write(int64_t token, int64_t head, int64_t count, const float* in) const {
    Rows::write(0, token, head, 0, count, in);
  }
};

// [blocks, block_size, H, D].
class Pages : Rows {
 public:
  explicit Pages(const Tensor& x) : Rows(x) {}
  void read(int64_t block, int64_t offset, int64_t head, int64_t count, float* out) const {
    Rows::read(block, offset, head, 0, count, out);
  }
  void write(int64_t block, int64_t offset, int64_t head, int64_t count, const float* in) const {
    Rows::write(block, offset, head, 0, count, in);
  }
};

}  // namespace torch_gdn::cpu
