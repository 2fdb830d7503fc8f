// The thread's stack of autorelease pools. As on a Mac, a pool that an exception left open is drained with the next
// outer one, or by the dispatch queue after the block.
#pragma once
#include <objc/objc.h>

namespace simulator {

void autorelease(id object);
id innermost_pool();
void drain_pools_above(id pool);

}  // namespace simulator
