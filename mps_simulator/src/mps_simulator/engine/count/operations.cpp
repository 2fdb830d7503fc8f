#include "operations.h"

#include <algorithm>

namespace simulator {

void OperationCounts::begin_dispatch(std::span<const BlockOperations> blocks) {
  blocks_ = blocks;
  entries_.assign(blocks.size(), {});
  for (Simdgroup& simdgroup : simdgroups_) simdgroup.blocks.assign(blocks.size(), {});
}

void OperationCounts::enter(uint32_t thread, uint32_t number) {
  Simdgroup& simdgroup = simdgroups_[thread / 32];
  simdgroup.turns.run(thread % 32);
  Block& block = simdgroup.blocks[number];
  if (block.interval != simdgroup.turns.interval) {
    block = {simdgroup.turns.interval};
    simdgroup.entered.push_back(number);
  }
  if (block.turn != simdgroup.turns.turn) {
    block.turn = simdgroup.turns.turn;
    block.count = 0;
  }
  block.most = std::max(block.most, ++block.count);
  ++block.sum;
}

void OperationCounts::settle(uint32_t index) {
  Simdgroup& simdgroup = simdgroups_[index];
  for (const uint32_t number : simdgroup.entered) {
    entries_[number].by_lanes += simdgroup.blocks[number].sum;
    entries_[number].by_simdgroups += simdgroup.blocks[number].most;
  }
  simdgroup.entered.clear();
  simdgroup.turns.end_interval();
}

void OperationCounts::settle_all() {
  for (uint32_t i = 0; i < simdgroups_.size(); ++i) settle(i);
}

void OperationCounts::add_to(KernelFigures& figures) const {
  for (size_t block = 0; block < entries_.size(); ++block) {
    for (size_t kind = 0; kind < kOperationKinds; ++kind) {
      figures.operations[kind] += entries_[block].by_lanes * blocks_[block][kind];
      figures.operations_issued[kind] += entries_[block].by_simdgroups * 32 * blocks_[block][kind];
    }
  }
}

}  // namespace simulator
