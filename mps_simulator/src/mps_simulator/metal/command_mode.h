#pragma once

namespace simulator {

extern bool run_at_commit;  // otherwise commands run when the host waits for them
extern bool is_concurrent;  // PyTorch's stream encodes with MTLDispatchTypeConcurrent, as a later PyTorch may do

}  // namespace simulator
