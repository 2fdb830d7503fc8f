// The ops that store new tokens in the pages of a cache.
#pragma once
#include "ops/indices.h"
#include "ops/layers/rows.h"
#include "ops/op.h"
#include "ops/pages.h"

namespace torch_gdn {

// Computes the slots of a cache of pages that the keys and values of a batch's tokens go to. Token t of sequence n, at
// position p of its sequence, has the slot block_table[n, p / block_size] * block_size + p % block_size. Entries at and
// after cu_seqlens[N] become -1, which means no slot.
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
    check.is_index_array("cu_seqlens", cu_seqlens);
    check.value(cu_seqlens.dim() == 1 && holds(sym_ge(size_of<Int>(cu_seqlens, 0), Int(1))), "cu_seqlens",
                "shape [N + 1]", sizes_of<Int>(cu_seqlens));
    N = size_of<Int>(cu_seqlens, 0) - 1;
    check.is_index_array("block_table", block_table);
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
    check_ascending(check.op(), at);
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

// The keys and values of new tokens go to these slots of a cache. A slot is block * block_size + offset. Tokens with a
// negative slot are skipped. Keys and values may be two views of one page.
template <typename Int>
struct CacheSlots {
  Tensor key_cache, value_cache;  // [blocks, block_size, HK, D] and [.., DV]
  Tensor slot_mapping;            // slots of the first tokens
  Int blocks = 0, block_size = 0;
  Int tokens = 0;  // length of slot_mapping

  // `T` is the number of new tokens.
  void check(const Check<Int>& check, const Int& T, const Int& HK, const Int& D, const Int& DV) {
    check.is_activation("key_cache", key_cache).dimensions(4, "[blocks, block_size, H, D]");
    blocks = size_of<Int>(key_cache, 0), block_size = size_of<Int>(key_cache, 1);
    check.shape("key_cache", key_cache, "[blocks, block_size, H, D]", {blocks, block_size, HK, D});
    check.same_dtype("value_cache", value_cache, "key_cache", key_cache)
        .shape("[blocks, block_size, H, DV]", {blocks, block_size, HK, DV});
    check_unit_stride(check, "key_cache", key_cache);
    check_unit_stride(check, "value_cache", value_cache);
    check.is_index("slot_mapping", slot_mapping).dimensions(1, "[N]");
    tokens = size_of<Int>(slot_mapping, 0);
    check.value(sym_le(tokens, T), "slot_mapping", "at most a slot for each token", tokens, " for ", T, " tokens");
    if constexpr (is_run<Int>) check_cpu_slots(check);
  }

 private:
  // If slots are on the device, the kernel checks them.
  void check_cpu_slots(const Check<Int>& check) const {
    if (!slot_mapping.is_cpu()) return;
    const Indices at(slot_mapping);
    const int64_t capacity = blocks * block_size;
    for (int64_t i = 0; i < tokens; ++i) {
      check.value(at[i] < capacity, "slot_mapping", "slots below the cache's size", at[i], " for a size of ", capacity);
    }
  }
};

// Copies the keys and values of new tokens into the pages of a cache.
template <typename Int>
struct ReshapeAndCache {
  static constexpr const char* kSchema =
      "reshape_and_cache_(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor slot_mapping) -> ()";

  Tensor key, value, key_cache, value_cache, slot_mapping;

  Int HK = 0, D = 0, DV = 0;
  CacheSlots<Int> slots;

  auto arguments() { return std::tie(key, value, key_cache, value_cache, slot_mapping); }

  void check(const char* op) {
    const Check<Int> check(op, "key", key);
    check.is_activation("key", key).dimensions(3, "[T, H, D]");
    const Int T = size_of<Int>(key, 0);
    HK = size_of<Int>(key, 1), D = size_of<Int>(key, 2);
    check.same_dtype("value", value, "key", key).dimensions(3, "[T, H, DV]");
    DV = size_of<Int>(value, 2);
    check.shape("value", value, "[T, H, DV]", {T, HK, DV});
    slots = {key_cache, value_cache, slot_mapping};
    slots.check(check, T, HK, D, DV);
  }

  void outputs() const {}
};

// Prepares the heads of q and k as `qk_norm_rope` does, and stores k and v in the pages of a cache.
template <typename Int>
struct QkNormRopeAndCache {
  static constexpr const char* kSchema =
      "qk_norm_rope_and_cache_(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) key_cache, "
      "Tensor(b!) value_cache, Tensor slot_mapping, Tensor? q_weight=None, Tensor? k_weight=None, float eps=1e-6, "
      "bool zero_centered=False) -> Tensor q_out";

  Tensor q, k, v, cos, sin, key_cache, value_cache, slot_mapping;
  optional<Tensor> q_weight, k_weight;
  double eps;
  bool zero_centered;

  QkNormRope<Int> heads;
  CacheSlots<Int> slots;
  Int HK = 0, DV = 0;

  auto arguments() {
    return std::tie(q, k, v, cos, sin, key_cache, value_cache, slot_mapping, q_weight, k_weight, eps, zero_centered);
  }

  void check(const char* op) {
    heads = {q, k, cos, sin, q_weight, k_weight, eps, zero_centered, false};
    heads.check(op);
    const Check<Int> check(op, "q", q);
    HK = size_of<Int>(k, 2);
    check.same_dtype("v", v, "q", q).dimensions(4, "[B, T, HK, DV]");
    DV = size_of<Int>(v, 3);
    check.shape("v", v, "[B, T, HK, DV]", {heads.B, heads.T, HK, DV});
    slots = {key_cache, value_cache, slot_mapping};
    slots.check(check, heads.B * heads.T, HK, heads.D, DV);
  }

  Tensor outputs() const { return empty({heads.B, heads.T, size_of<Int>(q, 2), heads.D}, q.options()); }
};

}  // namespace torch_gdn
