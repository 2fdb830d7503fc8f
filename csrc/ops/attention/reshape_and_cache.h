// Copies the keys and values of new tokens into the pages of a cache.
#pragma once
#include "ops/indices.h"
#include "ops/op.h"
#include "ops/pages.h"

namespace torch_gdn {

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

}  // namespace torch_gdn
