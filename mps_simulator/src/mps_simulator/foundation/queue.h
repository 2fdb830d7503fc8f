#pragma once
#include <dispatch/dispatch.h>

#include <cstdint>
#include <mutex>

namespace simulator {

bool on_queue(dispatch_queue_t queue);          // does this thread run a block of the queue now?
uint64_t block_number(dispatch_queue_t queue);  // counts the blocks, so that two can be told apart

// How a thread waits for the queue. The Python bindings replace it by one that releases the interpreter's lock, which
// the thread in the queue may need.
extern void (*wait_for_turn)(std::mutex& turn);

// dispatch_sync_f in two halves, for a caller that returns to Python between them.
void enter_queue(dispatch_queue_t queue);
void leave_queue(dispatch_queue_t queue);

}  // namespace simulator
