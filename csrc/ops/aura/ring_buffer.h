// Describes keys and values of a paged cache that are stored as the model computed them, not as codes.
#pragma once
#include "ops/indices.h"
#include "ops/pages.h"

namespace torch_gdn {

// A slot has `sinks` rows for the first tokens of a sequence, and a ring for later ones. Sequence n finds its first
// tokens in slot sink_slots[n]. The `tail` tokens before the queries, from starts[n] on, are in slot slots[n], where
// token p has row
//     sinks + p % (rows - sinks)
// A negative slot has no rows. The queries' own tokens are rows of new_keys and new_values.
template <typename Int>
struct PagedExactRows {
  optional<Tensor> keys, values;          // [slots, rows, HK, D]
  optional<Tensor> slots, starts;         // [N], int32 or int64
  optional<Tensor> sink_slots;            // [N], int32 or int64
  optional<Tensor> new_keys, new_values;  // [T, HK, D], packed like q
  Int sinks = 0, tail = 0;

  bool present() const { return keys.has_value(); }
};

// Checks the slots of sequences with queries. If the slots are on the device, the kernel checks them.
template <typename Int>
void check_cpu_slots(const Check<Int>& check, const char* argument, const Tensor& slots, const Tensor& cu_seqlens,
                     int64_t count) {
  if (!slots.is_cpu() || !cu_seqlens.is_cpu()) return;
  const Indices at(slots), boundaries(cu_seqlens);
  for (int64_t n = 0; n < slots.size(0); ++n) {
    if (boundaries[n] == boundaries[n + 1]) continue;
    check.value(at[n] < count, argument, "slots of exact_keys", at[n], " for ", count, " slots");
  }
}

template <typename Int>
void check_exact_cache(const Check<Int>& check, const PagedShape<Int>& s, const char* argument, const Tensor& x,
                       const Int& count, const Int& rows, const char* like, const Tensor& other) {
  check.same_dtype(argument, x, like, other).shape("[slots, rows, HK, D]", {count, rows, s.HK, s.D});
  check_unit_stride(check, argument, x);
}

// Checks a tensor with one number per sequence.
template <typename Int>
void check_numbers(const Check<Int>& check, const PagedShape<Int>& s, const char* argument, const Tensor& x) {
  check.is_index(argument, x);
  check.on_device_or_cpu(argument, x);
  check.value(x.dim() == 1 && holds(sym_eq(size_of<Int>(x, 0), s.N)), argument, "shape [N]", sizes_of<Int>(x), " for ",
              s.N, " sequences");
}

template <typename Int>
void check_rows_of_slot(const Check<Int>& check, const Int& rows, const Int& sinks, const Int& tail) {
  check.in_range("exact_keys", "slots of at most 2^30 rows", rows, 0, kMostKeys);
  check.value(sym_ge(sinks, Int(0)), "exact_sinks", "at least 0", sinks);
  check.value(sym_le(sinks, rows), "exact_sinks", "at most the rows of a slot", sinks, " for ", rows);
  check.value(sym_ge(tail, Int(0)), "tail", "at least 0", tail);
  check.value(sym_le(tail, rows - sinks), "tail", "at most the rows of a slot after the sinks", tail, " for ",
              rows - sinks);
}

template <typename Int>
void check_exact_rows(const Check<Int>& check, const PagedShape<Int>& s, const Tensor& q, const Tensor& cu_seqlens,
                      const PagedExactRows<Int>& exact) {
  const auto& [keys, values, slots, starts, sink_slots, new_keys, new_values, sinks, tail] = exact;
  const auto together = [&](const char* argument, const optional<Tensor>& x) {
    check.value(x.has_value() == keys.has_value(), argument, "a tensor if exact_keys is one, else None",
                x.has_value() ? "a tensor" : "None");
  };
  together("exact_values", values), together("exact_slots", slots), together("exact_starts", starts);
  together("exact_sink_slots", sink_slots);
  together("new_keys", new_keys), together("new_values", new_values);
  if (!exact.present()) {
    check.value(sym_eq(sinks, Int(0)), "exact_sinks", "0 without exact_keys", sinks);
    check.value(sym_eq(tail, Int(0)), "tail", "0 without exact_keys", tail);
    return;
  }
  check.dimensions("exact_keys", *keys, 4, "[slots, rows, HK, D]");
  const Int count = size_of<Int>(*keys, 0), rows = size_of<Int>(*keys, 1);
  const auto check_new = [&](const char* argument, const Tensor& x) {
    check.same_dtype(argument, x, "q", q).shape("[T, HK, D]", {s.T, s.HK, s.D});
    check_unit_stride(check, argument, x);
  };
  check_exact_cache(check, s, "exact_keys", *keys, count, rows, "q", q);
  check_exact_cache(check, s, "exact_values", *values, count, rows, "q", q);
  check_numbers(check, s, "exact_slots", *slots);
  check_numbers(check, s, "exact_starts", *starts);
  check_numbers(check, s, "exact_sink_slots", *sink_slots);
  check_new("new_keys", *new_keys), check_new("new_values", *new_values);
  check_rows_of_slot(check, rows, sinks, tail);
  if constexpr (is_run<Int>) {
    check_cpu_slots(check, "exact_slots", *slots, cu_seqlens, count);
    check_cpu_slots(check, "exact_sink_slots", *sink_slots, cu_seqlens, count);
  }
}

}  // namespace torch_gdn
