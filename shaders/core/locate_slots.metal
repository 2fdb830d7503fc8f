// Each simdgroup owns one index. It writes the slot, or -1 if there is none, and reports a wrong index. The
// threadgroups of later kernels then need not search all earlier indices for duplicates.
// Layout: indices [N] int32 or int64, any stride; located [N] int32.
#include "core/parameters.h"
#include "core/slots.h"

template <int Simdgroups>
[[kernel]] void locate_slots(
    device const int* indices [[buffer(0)]],
    device int* located [[buffer(1)]],
    device ErrorLog* errors [[buffer(2)]],
    constant LocateSlotsParameters& parameters [[buffer(3)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const int entry = min(int(group.x) * Simdgroups + int(simdgroup), parameters.indices - 1);
  const bool is_own = entry == int(group.x) * Simdgroups + int(simdgroup);
  const Slot slot = locate_entry(indices, parameters.slots, entry, row_of_entry(parameters.slots, entry), lane);
  if (is_own && lane == 0) {
    located[entry] = slot.is_present ? int(slot.index) : -1;
    report_slot(slot, entry, parameters.op, errors);
  }
}
