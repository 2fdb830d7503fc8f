#pragma once
#include <dispatch/dispatch.h>

#include "simulator/foundation/queue.h"

namespace simulator {

extern bool run_at_commit;  // else commands run when somebody waits for them

}  // namespace simulator
