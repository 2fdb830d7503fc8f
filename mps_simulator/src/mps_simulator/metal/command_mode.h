#pragma once

namespace simulator {

extern bool run_at_commit;  // else commands run when the host waits for them

}  // namespace simulator
