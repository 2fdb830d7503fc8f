#pragma once
#include <dispatch/dispatch.h>

#include <cstdint>
#include <mutex>

namespace simulator {

bool on_queue(dispatch_queue_t queue);          // returns whether this thread runs a block of the queue
uint64_t block_number(dispatch_queue_t queue);  // counts the blocks, so that two can be told apart

// Waits for the queue. The Python bindings replace it with a function that releases the interpreter's lock, which the
// thread in the queue may need.
extern void (*wait_for_turn)(std::mutex& turn);

// The two halves of dispatch_sync_f, for a caller that returns to Python between them.
void enter_queue(dispatch_queue_t queue);
void leave_queue(dispatch_queue_t queue);

}  // namespace simulator
