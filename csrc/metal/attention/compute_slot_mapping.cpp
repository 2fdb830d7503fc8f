#include "ops/attention/compute_slot_mapping.h"

#include "metal/implement.h"
#include "metal/parameters.h"
#include "shaders/attention/compute_slot_mapping.h"

namespace torch_gdn {

namespace {

void run(const ComputeSlotMapping<int64_t>& op) {
  const char* slots = "compute_slot_mapping_: slot_mapping";
  const auto device = op.positions.device();
  const Tensor cu_seqlens = index_array(device, op.cu_seqlens), block_table = index_array(device, op.block_table);
  SlotMappingParameters parameters{};
  parameters.table_sequence = block_table.stride(0);
  parameters.table_block = block_table.stride(1);
  parameters.position = op.positions.stride(0);
  parameters.boundary = cu_seqlens.stride(0);
  parameters.slot = op.slot_mapping.stride(0);
  parameters.table_bytes = int32_t(block_table.element_size());
  parameters.position_bytes = int32_t(op.positions.element_size());
  parameters.boundary_bytes = int32_t(cu_seqlens.element_size());
  parameters.slot_bytes = int32_t(op.slot_mapping.element_size());
  parameters.tokens = int32_t(op.T);
  parameters.slots = int32_count(op.slots, slots, "entries");
  parameters.sequences = int32_count(op.N, "compute_slot_mapping_: cu_seqlens", "sequences");
  parameters.table_tokens = int32_t(op.table_blocks * op.block_size);
  parameters.last_block = op.last_block();
  parameters.block_size = int32_t(op.block_size);
  parameters.op = op_name();
  const int64_t items = std::max(op.slots, op.N + 1);  // each thread also checks one boundary
  launcher().run({{"attention/compute_slot_mapping",
                   {kSlotThreads},
                   {op.positions, cu_seqlens, block_table, op.slot_mapping, Binding::error_log(), parameters},
                   {ceil_div(items, kSlotThreads), 1, 1},
                   kSlotThreads}});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<ComputeSlotMapping, &run>(m); }

}  // namespace torch_gdn
