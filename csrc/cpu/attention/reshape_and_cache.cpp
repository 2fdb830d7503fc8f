#include "ops/attention/reshape_and_cache.h"

#include "cpu/attention/pages.h"
#include "cpu/define.h"

namespace torch_gdn {

namespace {

void run(const ReshapeAndCache<int64_t>& op) {
  const Indices slots(op.slot_mapping);
  cpu::store(op.key.unsqueeze(0), op.key_cache, slots);
  cpu::store(op.value.unsqueeze(0), op.value_cache, slots);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<ReshapeAndCache, &run>(m); }

}  // namespace torch_gdn
