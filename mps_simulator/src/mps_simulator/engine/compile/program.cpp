#include "program.h"

#include <dlfcn.h>

#include <cstring>
#include <deque>
#include <mutex>
#include <stdexcept>

#include "mps_simulator/engine/kernel_abi.h"

namespace simulator {
namespace {

// Kernels call functions simulator_* and __tsan_* of this library, and Python may have loaded it with RTLD_LOCAL.
void publish_own_symbols() {
  static std::once_flag once;
  std::call_once(once, [] {
    Dl_info info;
    if (dladdr(reinterpret_cast<void*>(&load_program), &info) && info.dli_fname) {
      dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_GLOBAL);
    }
  });
}

class LoadedProgram : public Program, public std::enable_shared_from_this<LoadedProgram> {
 public:
  LoadedProgram(const std::filesystem::path& path, double seconds,
                std::function<std::shared_ptr<const Program>()> counted)
      : seconds_(seconds), counted_(std::move(counted)) {
    publish_own_symbols();
    handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle_) throw CompileError(std::string("cannot load a compiled Metal program: ") + dlerror());
    kernels_ = symbol<const simulator_kernel>("simulator_kernels");
    kernel_count_ = *symbol<const uint32_t>("simulator_kernel_count");
    constants_ = symbol<const simulator_function_constant>("simulator_function_constants");
    constant_count_ = *symbol<const uint32_t>("simulator_function_constant_count");
    gates_ = symbol<const Gate>("simulator_gates");
    gate_count_ = *symbol<const uint32_t>("simulator_gate_count");
    requirements_ = symbol<const Requirement>("simulator_requirements");
    requirement_count_ = *symbol<const uint32_t>("simulator_requirement_count");
    if (const void* count = dlsym(handle_, "simulator_block_count")) {
      blocks_ = {symbol<const BlockOperations>("simulator_blocks"), *static_cast<const uint32_t*>(count)};
    }
    constants_changed_ = reinterpret_cast<void (*)()>(dlsym(handle_, "simulator_constants_changed"));
  }
  LoadedProgram(const LoadedProgram&) = delete;
  ~LoadedProgram() override {
    if (handle_) dlclose(handle_);
  }

  std::vector<std::string> function_names() const override {
    std::vector<std::string> names;
    for (uint32_t i = 0; i < kernel_count_; ++i) names.emplace_back(kernels_[i].name);
    return names;
  }

  std::shared_ptr<const Function> function(const std::string& name, const FunctionConstants& constants) const override {
    for (uint32_t i = 0; i < kernel_count_; ++i) {
      if (name != kernels_[i].name) continue;
      check(i, constants);
      auto function = std::make_shared<Function>();
      function->name = name;
      function->kernel = specialise(i, constants);
      function->program = shared_from_this();
      function->constants = constants;
      function->compile_seconds = seconds_;
      return function;
    }
    return nullptr;
  }

  void bind(const FunctionConstants& constants) const override {
    if (constant_count_ == 0) return;
    for (uint32_t i = 0; i < constant_count_; ++i) {
      const simulator_function_constant& constant = constants_[i];
      const auto value = constants.find(constant.index);
      *constant.is_defined = value != constants.end();
      if (value == constants.end()) {
        std::memset(constant.address, 0, constant.size);
      } else {
        std::memcpy(constant.address, value->second.data(), constant.size);
      }
    }
    constants_changed_();
  }

  double compile_seconds() const override { return seconds_; }
  std::shared_ptr<const Program> counted() const override { return counted_(); }
  std::span<const BlockOperations> blocks() const override { return blocks_; }

 private:
  // Has the layout of simulator::gate and simulator::requirement in metal/library/entry.h.
  struct Gate {
    uint32_t kernel, parameter;
    bool (*is_open)();
  };
  struct Requirement {
    uint32_t kernel, constant;
  };
  struct Specialised {
    simulator_kernel kernel;
    std::vector<simulator_parameter> parameters;
  };

  template <typename T>
  T* symbol(const char* name) const {
    void* address = dlsym(handle_, name);
    if (!address) throw CompileError(std::string("a compiled Metal program lacks ") + name);
    return static_cast<T*>(address);
  }

  void check(uint32_t number, const FunctionConstants& constants) const {
    for (uint32_t i = 0; i < requirement_count_; ++i) {
      const simulator_function_constant& constant = constants_[requirements_[i].constant];
      if (requirements_[i].kernel != number || constants.count(constant.index)) continue;
      throw CompileError("kernel '" + std::string(kernels_[number].name) + "' needs a value for function constant '" +
                         constant.name + "' (index " + std::to_string(constant.index) + ")");
    }
    for (uint32_t i = 0; i < constant_count_; ++i) {
      const auto value = constants.find(constants_[i].index);
      if (value == constants.end() || value->second.size() == constants_[i].size) continue;
      throw CompileError("function constant '" + std::string(constants_[i].name) + "' (index " +
                         std::to_string(constants_[i].index) + "): expected " + std::to_string(constants_[i].size) +
                         " bytes, got " + std::to_string(value->second.size()));
    }
  }

  // Returns the kernel after deciding the gates of its parameters.
  const simulator_kernel* specialise(uint32_t number, const FunctionConstants& constants) const {
    const std::lock_guard lock(mutex_);
    bool is_gated = false;
    for (uint32_t i = 0; i < gate_count_; ++i) is_gated |= gates_[i].kernel == number;
    if (!is_gated) return &kernels_[number];
    bind(constants);
    Specialised& result = specialised_.emplace_back();
    result.kernel = kernels_[number];
    result.parameters.assign(result.kernel.parameters, result.kernel.parameters + result.kernel.parameter_count);
    for (uint32_t i = 0; i < gate_count_; ++i) {
      if (gates_[i].kernel == number) result.parameters[gates_[i].parameter].is_present = gates_[i].is_open();
    }
    result.kernel.parameters = result.parameters.data();
    return &result.kernel;
  }

  void* handle_ = nullptr;
  const simulator_kernel* kernels_ = nullptr;
  const simulator_function_constant* constants_ = nullptr;
  const Gate* gates_ = nullptr;
  const Requirement* requirements_ = nullptr;
  uint32_t kernel_count_ = 0, constant_count_ = 0, gate_count_ = 0, requirement_count_ = 0;
  void (*constants_changed_)() = nullptr;
  double seconds_ = 0;
  std::function<std::shared_ptr<const Program>()> counted_;
  std::span<const BlockOperations> blocks_;
  mutable std::mutex mutex_;
  mutable std::deque<Specialised> specialised_;  // functions point into it
};

}  // namespace

std::shared_ptr<const Program> load_program(const std::filesystem::path& path, double seconds,
                                            std::function<std::shared_ptr<const Program>()> counted) {
  return std::make_shared<LoadedProgram>(path, seconds, std::move(counted));
}

}  // namespace simulator
