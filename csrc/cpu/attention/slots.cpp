// Ops that find or write the slots of a server's cache.
#include "cpu/define.h"
#include "cpu/layers/rotated_heads.h"
#include "ops/attention/cache.h"

namespace torch_gdn::cpu {

namespace {

// A batch has at most some thousands of tokens, so one thread writes all slots.
template <typename Slot>
void write_slots(const ComputeSlotMapping<int64_t>& op) {
  const Indices boundary(op.cu_seqlens), position(op.positions), block(op.block_table);
  auto* slot = op.slot_mapping.mutable_data_ptr<Slot>();
  const int64_t stride = op.slot_mapping.stride(0);
  for (int64_t n = 0; n < op.N; ++n) {
    for (int64_t t = boundary[n]; t < boundary[n + 1]; ++t) {
      const int64_t first = block.at(n, position[t] / op.block_size) * op.block_size;
      slot[t * stride] = Slot(first + position[t] % op.block_size);
    }
  }
  for (int64_t t = boundary[op.N]; t < op.slots; ++t) slot[t * stride] = -1;
}

void run(const ComputeSlotMapping<int64_t>& op) {
  if (op.slots == 0) return;
  op.slot_mapping.scalar_type() == at::kInt ? write_slots<int32_t>(op) : write_slots<int64_t>(op);
}

// Pages [blocks, block_size, H, D].
struct Pages {
  explicit Pages(const Tensor& x) : rows(x), block_size(x.size(1)) {}
  void write(int64_t slot, int64_t head, const float* in) const {
    rows.write(slot / block_size, slot % block_size, head, in);
  }
  Rows rows;
  int64_t block_size;
};

// Copies the first tokens of x [B, T, H, D] to their slots in a cache. Negative slots are skipped.
void store(const Tensor& x, const Tensor& cache, const Indices& slots) {
  if (x.numel() == 0) return;
  const int64_t T = x.size(1), H = x.size(2);
  const Rows rows(x, "key or value");
  const Pages pages(cache);
  at::parallel_for(0, slots.size(), 16, [&](int64_t begin, int64_t end) {
    std::vector<float> row(x.size(3));
    for (int64_t token = begin; token < end; ++token) {
      if (slots[token] < 0) continue;
      for (int64_t head = 0; head < H; ++head) {
        rows.read(token / T, token % T, head, row.data());
        pages.write(slots[token], head, row.data());
      }
    }
  });
}

void run(const ReshapeAndCache<int64_t>& op) {
  const Indices slots(op.slot_mapping);
  store(op.key.unsqueeze(0), op.key_cache, slots);
  store(op.value.unsqueeze(0), op.value_cache, slots);
}

void run(const QkNormRopeAndCache<int64_t>& op, const Tensor& q_out) {
  const Indices slots(op.slot_mapping);
  const Pages keys(op.key_cache);
  write_heads(op.heads, op.q, op.q_weight, q_out);
  rotated_heads(op.heads, op.k, op.k_weight, [&](int64_t token, int64_t head, const float* values) {
    if (token < slots.size() && slots[token] >= 0) keys.write(slots[token], head, values);
  });
  store(op.v, op.value_cache, slots);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) {
  define<ComputeSlotMapping, &run>(m);
  define<ReshapeAndCache, &run>(m);
  define<QkNormRopeAndCache, &run>(m);
}

}  // namespace torch_gdn::cpu
