// Copies the keys and values of new tokens into the pages of a cache.
#pragma once
#include "ops/indices.h"
#include "ops/op.h"
#include "ops/pages.h"

namespace torch_gdn {

// Skips tokens with a negative slot. Keys and values may be two views of one page.
template <typename Int>
struct ReshapeAndCache {
  static constexpr const char* kSchema =
      "reshape_and_cache_(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor slot_mapping) -> ()";

  Tensor key, value, key_cache, value_cache, slot_mapping;

  PagedShape<Int> shape;
  Int DV;
  Int tokens;  // of slot_mapping: the first tokens of key and value

  auto arguments() { return std::tie(key, value, key_cache, value_cache, slot_mapping); }

  void check() {
    const Check<Int> check("reshape_and_cache_", "key", key);
    check.is_activation("key", key);
    check.dimensions("key", key, 3, "[T, H, D]");
    auto& s = shape;
    s.T = size_of<Int>(key, 0), s.HK = size_of<Int>(key, 1), s.D = size_of<Int>(key, 2);
    check.same_dtype("value", value, "key", key);
    check.dimensions("value", value, 3, "[T, H, DV]");
    DV = size_of<Int>(value, 2);
    check.shape("value", value, "[T, H, DV]", {s.T, s.HK, DV});
    check.is_activation("key_cache", key_cache);
    check.dimensions("key_cache", key_cache, 4, "[blocks, block_size, H, D]");
    s.blocks = size_of<Int>(key_cache, 0), s.block_size = size_of<Int>(key_cache, 1);
    check.shape("key_cache", key_cache, "[blocks, block_size, H, D]", {s.blocks, s.block_size, s.HK, s.D});
    check.same_dtype("value_cache", value_cache, "key_cache", key_cache);
    check.shape("value_cache", value_cache, "[blocks, block_size, H, DV]", {s.blocks, s.block_size, s.HK, DV});
    check_unit_stride(check, "key_cache", key_cache);
    check_unit_stride(check, "value_cache", value_cache);
    check.is_index("slot_mapping", slot_mapping);
    check.dimensions("slot_mapping", slot_mapping, 1, "[N]");
    tokens = size_of<Int>(slot_mapping, 0);
    check.value(sym_le(tokens, s.T), "slot_mapping", "at most a slot for each token", tokens, " for ", s.T, " tokens");
    if constexpr (is_run<Int>) check_cpu_slots(check);
  }

  void outputs() const {}

 private:
  // If slots are on the device, the kernel checks them.
  void check_cpu_slots(const Check<Int>& check) const {
    if (!slot_mapping.is_cpu()) return;
    const Indices at(slot_mapping);
    const int64_t capacity = shape.blocks * shape.block_size;
    for (int64_t i = 0; i < tokens; ++i) {
      check.value(at[i] < capacity, "slot_mapping", "slots below the cache's size", at[i], " for a size of ", capacity);
    }
  }
};

}  // namespace torch_gdn
