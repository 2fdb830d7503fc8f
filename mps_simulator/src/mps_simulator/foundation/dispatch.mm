// Serial queues. dispatch_sync runs the block on the caller's thread, one block at a time.
#import <Foundation/Foundation.h>

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "mps_simulator/foundation/fault.h"
#include "pool.h"
#include "queue.h"

struct dispatch_queue_s {
  std::string label;
  std::mutex mutex;
  std::atomic<std::thread::id> owner{};
  std::atomic<uint64_t> blocks{0};
};

namespace simulator {

void (*wait_for_turn)(std::mutex& turn) = [](std::mutex& turn) { turn.lock(); };

bool on_queue(dispatch_queue_t queue) { return queue->owner.load() == std::this_thread::get_id(); }

uint64_t block_number(dispatch_queue_t queue) { return queue->blocks.load(); }

void enter_queue(dispatch_queue_t queue) {
  if (on_queue(queue))
    fault("dispatch_sync on queue '" + queue->label + "' from a block of the same queue: a deadlock on a Mac");
  if (!queue->mutex.try_lock()) wait_for_turn(queue->mutex);
  queue->owner = std::this_thread::get_id();
  queue->blocks++;
}

void leave_queue(dispatch_queue_t queue) {
  queue->owner = std::thread::id();
  queue->mutex.unlock();
}

}  // namespace simulator

extern "C" {

dispatch_queue_t dispatch_queue_create(const char* label, dispatch_queue_attr_t) {
  auto* queue = new dispatch_queue_s;
  queue->label = label ? label : "";
  return queue;
}

const char* dispatch_queue_get_label(dispatch_queue_t queue) { return queue->label.c_str(); }

void dispatch_assert_queue(dispatch_queue_t queue) {
  if (!simulator::on_queue(queue)) simulator::fault("not on queue '" + queue->label + "'");
}

void dispatch_sync_f(dispatch_queue_t queue, void* context, dispatch_function_t work) {
  struct Turn {
    dispatch_queue_t queue;
    id pool;
    explicit Turn(dispatch_queue_t queue) : queue(queue) {
      simulator::enter_queue(queue);
      pool = simulator::innermost_pool();
    }
    ~Turn() { simulator::leave_queue(queue); }
  } turn(queue);
  try {
    work(context);
  } catch (...) {
    simulator::drain_pools_above(turn.pool);
    throw;
  }
}

void dispatch_sync(dispatch_queue_t queue, dispatch_block_t block) {
  dispatch_sync_f(queue, static_cast<void*>(&block), [](void* context) {
    try {
      (*static_cast<dispatch_block_t*>(context))();
    } catch (...) {
      simulator::rethrow_as_fault("an exception left a block given to dispatch_sync, which ends the process on a Mac "
                                  "(use dispatch_sync_with_rethrow): ");
    }
  });
}
}
