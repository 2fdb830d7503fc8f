// The stacks on which Metal threads run, one pool per worker, and the switch between them. A kernel owns only its
// stack, so the stacks are reused after a fault without unwinding.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#if !defined(__x86_64__)
#include <boost/context/detail/fcontext.hpp>
#endif

namespace simulator {

struct Fiber {
  void* context = nullptr;
  std::byte* top = nullptr;
};

#if defined(__x86_64__)

// Saves the callee-saved registers, and returns on the other stack. Boost's switch ends in a jump, after which the
// processor mispredicts returns. With it, a rendezvous of 32 lanes takes 630 ns instead of 240 ns.
extern "C" void simulator_switch_stacks(void** from, void* to);

// Continues in `to`. Returns when another fiber switches back to `from`.
inline void switch_fiber(Fiber& from, Fiber& to) { simulator_switch_stacks(&from.context, to.context); }

#else

inline void arrive(boost::context::detail::transfer_t arrival) { *static_cast<void**>(arrival.data) = arrival.fctx; }

inline void switch_fiber(Fiber& from, Fiber& to) {
  arrive(boost::context::detail::jump_fcontext(to.context, &from.context));
}

#endif

// Each new or renewed fiber runs this function (worker.cpp).
[[noreturn]] void fiber_entry();

class FiberPool {
 public:
  FiberPool();
  ~FiberPool();
  FiberPool(const FiberPool&) = delete;
  FiberPool& operator=(const FiberPool&) = delete;

  // Makes fibers until there are at least `count`, so that take() cannot fail.
  void reserve(size_t count);

  Fiber* take() {
    Fiber* fiber = free_.back();
    free_.pop_back();
    return fiber;
  }
  void give_back(Fiber* fiber) { free_.push_back(fiber); }

  void renew();

  // Kernels use this memory for their stacks and scratch, in addition to their arguments.
  uintptr_t start() const { return reinterpret_cast<uintptr_t>(mapping_); }
  size_t length() const;
  std::byte* scratch() const { return mapping_; }
  static constexpr size_t kScratchSize = 65536;

 private:
  void create();
  void prepare(Fiber& fiber);

  std::byte* mapping_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> free_;
};

}  // namespace simulator
