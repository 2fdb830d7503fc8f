#include "ops/attention/compute_slot_mapping.h"

#include "cpu/define.h"

namespace torch_gdn {

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

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<ComputeSlotMapping, &run>(m); }

}  // namespace torch_gdn
