#include <algorithm>
#include <string>

#include "mps_simulator/engine/engine.h"
#include "mps_simulator/engine/kernel_abi.h"

namespace simulator {
namespace {

class Validation {
 public:
  explicit Validation(const Dispatch& dispatch) : dispatch_(dispatch), kernel_(*dispatch.function->kernel) {}

  void run() const {
    check_grid();
    size_t threadgroup_memory = 0;
    for (uint32_t i = 0; i < kernel_.parameter_count; ++i) {
      const simulator_parameter& parameter = kernel_.parameters[i];
      if (parameter.kind == simulator_buffer) check_buffer(parameter);
      if (parameter.kind == simulator_threadgroup_memory) check_threadgroup_memory(parameter);
    }
    for (const size_t length : dispatch_.threadgroup_lengths) {
      if (length % 16 != 0) fail("threadgroup memory length must be a multiple of 16, got " + std::to_string(length));
      threadgroup_memory += length;
    }
    if (threadgroup_memory > kMaxThreadgroupMemory) {
      fail("threadgroup memory must be at most " + std::to_string(kMaxThreadgroupMemory) + " bytes, got " +
           std::to_string(threadgroup_memory));
    }
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Fault("kernel '" + std::string(kernel_.name) + "': " + what);
  }

  static std::string text(const Size& size) {
    return "(" + std::to_string(size.width) + ", " + std::to_string(size.height) + ", " + std::to_string(size.depth) +
           ")";
  }
  static std::string name(const simulator_parameter& parameter, const char* space) {
    return "argument '" + std::string(parameter.name) + "' (" + space + " " + std::to_string(parameter.index) + ")";
  }

  static double product(const Size& size) { return double(size.width) * double(size.height) * double(size.depth); }

  void check_grid() const {
    const Size& group = dispatch_.threads_per_threadgroup;
    const Size& grid = dispatch_.threadgroups;
    if (product(group) == 0) fail("threads per threadgroup must not be zero, got " + text(group));
    const size_t limit =
        kernel_.max_total_threads > 0 ? std::min<size_t>(kernel_.max_total_threads, kMaxThreads) : kMaxThreads;
    if (product(group) > double(limit)) {
      fail("threads per threadgroup must be at most " + std::to_string(limit) + " in all, got " + text(group));
    }
    if (product(grid) == 0) fail("the grid must not be empty, got " + text(grid) + " threadgroups");
    if (product(grid) >= 1u << 31) fail("the grid must have fewer than 2^31 threadgroups, got " + text(grid));
  }

  void check_buffer(const simulator_parameter& parameter) const {
    const std::string argument = name(parameter, "buffer");
    const BoundArgument& bound = dispatch_.buffers[parameter.index];
    if (bound.kind == BoundArgument::absent) {
      if (parameter.is_present) fail(argument + " is not set: expected a buffer or bytes");
      return;
    }
    if (bound.kind == BoundArgument::bytes && !parameter.is_const) {
      fail(argument + ": setBytes gives read-only bytes, and the shader may write this argument");
    }
    if (bound.kind == BoundArgument::buffer) {
      if (bound.length == 0) fail(argument + ": offset " + std::to_string(bound.offset) + " is not inside its buffer");
      // Apple GPUs require an alignment of 4 in constant space, even if the argument's type is smaller.
      const size_t alignment = std::max<size_t>(parameter.value_alignment, parameter.is_constant_space ? 4 : 1);
      if (bound.offset % alignment != 0) {
        fail(argument + ": offset must be a multiple of " + std::to_string(alignment) + ", got " +
             std::to_string(bound.offset));
      }
    }
    if (parameter.is_reference && bound.length < parameter.value_size) {
      fail(argument + ": expected at least " + std::to_string(parameter.value_size) + " bytes, got " +
           std::to_string(bound.length));
    }
  }

  void check_threadgroup_memory(const simulator_parameter& parameter) const {
    if (parameter.is_present && dispatch_.threadgroup_lengths[parameter.index] == 0) {
      fail(name(parameter, "threadgroup") + " is not set: expected a threadgroup memory length");
    }
  }

  const Dispatch& dispatch_;
  const simulator_kernel& kernel_;
};

}  // namespace

void validate(const Dispatch& dispatch) { Validation(dispatch).run(); }

}  // namespace simulator
