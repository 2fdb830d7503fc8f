// clang's checks of private memory call these functions. Accesses to registers, private arrays and the constants of a
// program never reach the watch. The compiler puts the comparisons into the kernel's own code (compile/compiler.cpp has
// the flags).
#include "private_memory.h"

#include <signal.h>
#include <ucontext.h>

#include <cstdint>
#include <mutex>
#include <string>

#include "mps_simulator/engine/engine.h"
#include "mps_simulator/engine/kernel_abi.h"
#include "mps_simulator/engine/run/worker.h"

namespace simulator {
namespace {

// These are the layouts that clang passes to the handlers of -fsanitize=undefined.
struct SourceLocation {
  const char* file;
  uint32_t line, column;
};
struct TypeDescriptor {
  uint16_t kind, info;  // info of an integer: bit 0 says whether it is signed, the rest is log2 of its number of bits
  char name[1];
};
struct OutOfBounds {
  SourceLocation at;
  const TypeDescriptor* array;
  const TypeDescriptor* index;
};
struct TypeMismatch {
  SourceLocation at;
  const TypeDescriptor* type;
  uint8_t alignment_log2, kind;
};

[[noreturn]] void fail(const std::string& what) {
  if (current_worker) current_worker->fail_in_kernel(what);
  throw Fault("a constant of the program: " + what);
}

std::string place_of(const SourceLocation& at) {
  return std::string(at.file ? at.file : "program_source") + ":" + std::to_string(at.line) + ":" +
         std::to_string(at.column);
}

// For 'const __global float[4]', returns float[4].
std::string name_of(const TypeDescriptor& type) {
  std::string name = type.name;
  for (const char* word :
       {"'", "__private ", "__global_device ", "__global ", "__local ", "__generic ", "const ", "metal::"}) {
    const std::string left_out = word;
    for (size_t at = 0; (at = name.find(left_out, at)) != std::string::npos;) name.erase(at, left_out.size());
  }
  return name;
}

// The source transformation makes a type for each such declaration.
bool is_threadgroup_array(const TypeDescriptor& type) {
  return std::string(type.name).find("simulator_type_") != std::string::npos;
}

int64_t value_of(const TypeDescriptor& type, uint64_t bits) {
  const unsigned unused = 64 - (1u << (type.info >> 1));
  return type.info & 1 ? int64_t(bits << unused) >> unused : int64_t(bits);
}

[[noreturn]] void fail_at_trap() { fail("out of bounds access to a private variable or to a constant of the program"); }

// A check at run time that finds an access out of bounds executes an illegal instruction in the kernel. The kernel then
// continues in fail_at_trap(), as if it had called that function.
void handle_trap(int signal, siginfo_t*, void* context) {
  if (!current_worker) {
    ::signal(signal, SIG_DFL);  // not an instruction of a kernel; it traps again, and ends the process
    return;
  }
  mcontext_t& registers = static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  constexpr greg_t kRedZone = 128;
  registers.gregs[REG_RSP] = (registers.gregs[REG_RSP] - kRedZone) / 16 * 16 - 8;
  registers.gregs[REG_RIP] = reinterpret_cast<greg_t>(&fail_at_trap);
#elif defined(__aarch64__)
  registers.pc = reinterpret_cast<uintptr_t>(&fail_at_trap);
#else
#error "kernels' traps are not handled for this processor"
#endif
}

}  // namespace

void handle_traps_of_kernels() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action{};
    action.sa_sigaction = handle_trap;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGILL, &action, nullptr);
    sigaction(SIGTRAP, &action, nullptr);  // arm64 raises this for llvm.trap
  });
}

}  // namespace simulator

extern "C" {

// Returns if the array is in threadgroup memory, because the watch sees and names the access. Does not return for a row
// of such an array, because the watch does not know rows.
void __ubsan_handle_out_of_bounds(const simulator::OutOfBounds* data, uint64_t index) {
  if (simulator::is_threadgroup_array(*data->array)) return;
  simulator::fail("index " + std::to_string(simulator::value_of(*data->index, index)) + " is out of bounds of " +
                  simulator::name_of(*data->array) + " at " + simulator::place_of(data->at));
}

void __ubsan_handle_type_mismatch_v1(const simulator::TypeMismatch* data, uint64_t) {
  constexpr uint8_t kLoad = 0, kStore = 1;
  const char* action = data->kind == kLoad ? "read" : data->kind == kStore ? "write" : "use";
  simulator::fail(std::string("out of bounds ") + action + " of a " + simulator::name_of(*data->type) +
                  " in a private variable or a constant of the program at " + simulator::place_of(data->at));
}

void simulator_vector_index(int index, uint32_t count) {
  simulator::fail("index " + std::to_string(index) + " is out of bounds of a vector of " + std::to_string(count));
}

void simulator_unwritten(void) { simulator::fail("minimum or maximum of a private variable that nothing has written"); }

}  // extern "C"
