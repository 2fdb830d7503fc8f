#pragma once
#include <dispatch/dispatch.h>

#include <cstdint>
#include <mutex>

namespace simulator {

bool on_queue(dispatch_queue_t queue);          // returns whether this thread runs a block of the queue
uint64_t block_number(dispatch_queue_t queue);  // counts the blocks, to tell two of them apart

// Waits for the queue. The Python bindings replace this function with one that releases the GIL, because the thread in
// the queue may need it.
extern void (*wait_for_turn)(std::mutex& turn);

// The two halves of dispatch_sync_f. They are for a caller that returns to Python in between.
void enter_queue(dispatch_queue_t queue);
void leave_queue(dispatch_queue_t queue);

}  // namespace simulator
