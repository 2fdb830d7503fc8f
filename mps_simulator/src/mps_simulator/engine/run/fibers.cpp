#include "fibers.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "mps_simulator/engine/engine.h"

namespace simulator {
namespace {

constexpr size_t kGuardSize = 4096;
constexpr size_t kStackSize = 131072;
constexpr size_t kSlotSize = kGuardSize + kStackSize;

// Spreads the stack tops over one page. Tops at the same offset in their pages would share a few sets of the
// first-level cache.
constexpr size_t kColours = 12;
constexpr size_t kColourStride = 320;

}  // namespace

FiberPool::FiberPool() {
  void* mapping = mmap(nullptr, length(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<std::byte*>(mapping);
  if (mprotect(mapping_, kScratchSize, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  fibers_.reserve(kMaxThreads);
  free_.reserve(kMaxThreads);
}

FiberPool::~FiberPool() { munmap(mapping_, length()); }

size_t FiberPool::length() const { return kScratchSize + kMaxThreads * kSlotSize; }

void FiberPool::reserve(size_t count) {
  while (fibers_.size() < count) create();
}

void FiberPool::create() {
  std::byte* stack = mapping_ + kScratchSize + fibers_.size() * kSlotSize + kGuardSize;
  if (mprotect(stack, kStackSize, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  auto fiber = std::make_unique<Fiber>();
  fiber->top = stack + kStackSize - fibers_.size() % kColours * kColourStride;
  prepare(*fiber);
  free_.push_back(fiber.get());
  fibers_.push_back(std::move(fiber));
}

#if defined(__x86_64__)

asm(R"(
.text
.globl simulator_switch_stacks
.hidden simulator_switch_stacks
.type simulator_switch_stacks, @function
simulator_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simulator_switch_stacks, . - simulator_switch_stacks
)");

// Lays out the values that the switch pops: six registers, the return address, and a null return address for the
// function there. At a function's entry, the stack pointer is 8 bytes below a multiple of 16.
void FiberPool::prepare(Fiber& fiber) {
  constexpr size_t kSavedRegisters = 6;
  auto** frame = reinterpret_cast<void**>(fiber.top) - (kSavedRegisters + 2);
  std::fill_n(frame, kSavedRegisters + 2, nullptr);
  frame[kSavedRegisters] = reinterpret_cast<void*>(fiber_entry);
  fiber.context = frame;
}

#else

void FiberPool::prepare(Fiber& fiber) {
  const auto begin = [](boost::context::detail::transfer_t arrival) {
    arrive(arrival);
    fiber_entry();
  };
  fiber.context = boost::context::detail::make_fcontext(fiber.top, kStackSize - kColours * kColourStride, begin);
}

#endif

void FiberPool::renew() {
  free_.clear();
  for (auto fiber = fibers_.rbegin(); fiber != fibers_.rend(); ++fiber) {
    prepare(**fiber);
    free_.push_back(fiber->get());
  }
}

}  // namespace simulator
