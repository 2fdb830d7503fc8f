// The thread's stack of autorelease pools. If an exception left a pool open, it is drained with the next outer pool, or
// by the dispatch queue after the block, as on a Mac.
#pragma once
#include <objc/objc.h>

namespace simulator {

void autorelease(id object);
id innermost_pool();
void drain_pools_above(id pool);

}  // namespace simulator
