// Computes the slots of a cache of pages that the keys and values of a batch's tokens go to.
#pragma once
#include "ops/indices.h"
#include "ops/op.h"
#include "ops/pages.h"

namespace torch_gdn {

// Token t of sequence n, at position p of its sequence, has the slot block_table[n, p / block_size] * block_size + p %
// block_size. Entries at and after cu_seqlens[N] become -1, which means no slot.
template <typename Int>
struct ComputeSlotMapping {
  static constexpr const char* kSchema =
      "compute_slot_mapping_(Tensor positions, Tensor cu_seqlens, Tensor block_table, int block_size, "
      "Tensor(a!) slot_mapping) -> ()";

  Tensor positions, cu_seqlens, block_table;
  Int block_size;
  Tensor slot_mapping;

  Int T, N, table_blocks, slots;

  auto arguments() { return std::tie(positions, cu_seqlens, block_table, block_size, slot_mapping); }

  void check(const char* op) {
    const Check<Int> check(op, "positions", positions);
    check.is_index("positions", positions).dimensions(1, "[T]");
    T = size_of<Int>(positions, 0);
    check.is_index("cu_seqlens", cu_seqlens);
    check.on_device_or_cpu("cu_seqlens", cu_seqlens);
    check.value(cu_seqlens.dim() == 1 && holds(sym_ge(size_of<Int>(cu_seqlens, 0), Int(1))), "cu_seqlens",
                "shape [N + 1]", sizes_of<Int>(cu_seqlens));
    N = size_of<Int>(cu_seqlens, 0) - 1;
    check.is_index("block_table", block_table);
    check.on_device_or_cpu("block_table", block_table);
    check.value(block_table.dim() == 2 && holds(sym_eq(size_of<Int>(block_table, 0), N)), "block_table",
                "shape [N, blocks of a sequence]", sizes_of<Int>(block_table), " for ", N, " sequences");
    table_blocks = size_of<Int>(block_table, 1);
    check.in_range("block_size", "blocks of 1 to 2^30 tokens", block_size, 1, kMostKeys);
    check.value(sym_le(table_blocks * block_size, Int(INT32_MAX)), "block_table",
                "fewer than 2^31 tokens in the blocks of a sequence", table_blocks * block_size);
    check.is_index("slot_mapping", slot_mapping).dimensions(1, "[slots]");
    slots = size_of<Int>(slot_mapping, 0);
    check.value(sym_ge(slots, T), "slot_mapping", "at least an entry for each position", slots, " for ", T,
                " positions");
    if constexpr (is_run<Int>) check_contents_on_cpu(check);
  }

  void outputs() const {}

  // Returns the largest block whose slots slot_mapping can hold.
  int64_t last_block() const {
    const int64_t most = slot_mapping.scalar_type() == at::kInt ? INT32_MAX : INT64_MAX;
    return (most - block_size) / block_size;
  }

 private:
  // If the tensors are on the device, the kernel checks them.
  void check_contents_on_cpu(const Check<Int>& check) const {
    if (!positions.is_cpu() || !cu_seqlens.is_cpu() || !block_table.is_cpu()) return;
    const Indices at(cu_seqlens), position(positions), block(block_table);
    check.value(at[0] == 0, "cu_seqlens", "the first boundary to be 0", at[0]);
    for (int64_t n = 0; n < N; ++n) {
      check.value(at[n] <= at[n + 1], "cu_seqlens", "ascending boundaries", at[n], " before ", at[n + 1], " at index ",
                  n);
    }
    check.value(at[N] <= T, "cu_seqlens", "boundaries up to the number of positions", at[N], " for ", T, " positions");
    for (int64_t n = 0; n < N; ++n) {
      for (int64_t t = at[n]; t < at[n + 1]; ++t) {
        check.value(position[t] >= 0 && position[t] / block_size < table_blocks, "positions",
                    "positions within the blocks of block_table", position[t], " at ", t);
        const int64_t block_id = block.at(n, position[t] / block_size);
        check.value(block_id >= 0 && block_id <= last_block(), "block_table",
                    "blocks whose slots slot_mapping can hold", block_id, " at ", position[t] / block_size,
                    " of sequence ", n);
      }
    }
  }
};

}  // namespace torch_gdn
