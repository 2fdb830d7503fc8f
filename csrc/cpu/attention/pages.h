// Copies rows between f32 and pages or packed tokens. The last stride of these tensors is 1. The others are arbitrary.
#pragma once
#include "cpu/common.h"
#include "ops/indices.h"

namespace torch_gdn::cpu {

// Packed tokens [T, H, D].
class Tokens : Rows {
 public:
  explicit Tokens(const Tensor& x) : Rows(x.unsqueeze(0)) {}
  void read(int64_t token, int64_t head, int64_t count, float* out) const { Rows::read(0, token, head, 0, count, out); }
  void write(int64_t token, int64_t head, int64_t count, const float* in) const {
    Rows::write(0, token, head, 0, count, in);
  }
};

// Pages [blocks, block_size, H, D].
class Pages : Rows {
 public:
  explicit Pages(const Tensor& x) : Rows(x), block_size_(x.size(1)) {}
  void read(int64_t block, int64_t offset, int64_t head, int64_t count, float* out) const {
    Rows::read(block, offset, head, 0, count, out);
  }
  void write(int64_t block, int64_t offset, int64_t head, int64_t count, const float* in) const {
    Rows::write(block, offset, head, 0, count, in);
  }
  void write_slot(int64_t slot, int64_t head, int64_t count, const float* in) const {
    write(slot / block_size_, slot % block_size_, head, count, in);
  }

 private:
  int64_t block_size_;
};

// Copies the first tokens of x [B, T, H, D] to their slots in a cache. Negative slots are skipped.
inline void store(const Tensor& x_any, const Tensor& cache, const Indices& slots) {
  const Tensor x = unit_last_stride(x_any, "key or value");
  if (x.numel() == 0) return;
  const int64_t T = x.size(1), H = x.size(2), D = x.size(3);
  const Rows rows(x);
  const Pages pages(cache);
  at::parallel_for(0, slots.size(), 16, [&](int64_t begin, int64_t end) {
    std::vector<float> row(D);
    for (int64_t token = begin; token < end; ++token) {
      if (slots[token] < 0) continue;
      for (int64_t head = 0; head < H; ++head) {
        rows.read(token / T, token % T, head, 0, D, row.data());
        pages.write_slot(slots[token], head, D, row.data());
      }
    }
  });
}

}  // namespace torch_gdn::cpu
