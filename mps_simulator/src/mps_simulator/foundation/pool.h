// The thread's stack of autorelease pools. If an exception leaves a pool open, the next outer pool drains it, or the
// dispatch queue does after the block, as on a Mac.
#pragma once
#include <objc/objc.h>

namespace simulator {

void autorelease(id object);
id innermost_pool();
void drain_pools_above(id pool);

}  // namespace simulator
