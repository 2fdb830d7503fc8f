#include "metal/gdn/choose_prefill.h"

#include <algorithm>

#include "launch/launch.h"

namespace torch_gdn {

PrefillChoice choose_prefill(const ChunkedRule<int64_t>& op) {
  if (op.return_intermediate_states) return {PrefillAlgorithm::kChunked};  // the others keep states in registers
  const auto& s = op.shape;
  const int64_t sequences = std::max<int64_t>(s.N, 1);
  const int64_t tokens = s.packed ? ceil_div(s.T, sequences) : s.T;
  const auto& device = launcher().device();
  return prefill_algorithm({tokens, sequences * s.HV, s.K, s.V, op.channels.gk.has_value()}, device.name,
                           int64_t(device.core_count));
}

}  // namespace torch_gdn
