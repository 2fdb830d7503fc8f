// The thread's stack of autorelease pools. An exception that leaves an @autoreleasepool leaves the pool on the stack,
// as on a Mac, where the next pool out drains it; a dispatch queue does that after each block.
#pragma once
#include <objc/objc.h>

namespace simulator {

void autorelease(id object);
id innermost_pool();
void drain_pools_above(id pool);

}  // namespace simulator
