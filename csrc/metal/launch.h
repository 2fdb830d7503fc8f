// A kernel launch as plain data: ops make launches, encoder.mm encodes them. No Objective-C here, so that any machine
// can record them.
#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace torch_gdn {

struct Binding {
  at::Tensor tensor;             // bound at its storage offset
  std::vector<std::byte> bytes;  // values; with neither: the stream's error log

  Binding(at::Tensor value) : tensor(std::move(value)) {}

  static Binding error_log() { return Binding(at::Tensor()); }

  // A parameter block, a struct of shaders/.
  template <typename Parameters>
  static Binding values(const Parameters& parameters) {
    static_assert(std::is_trivially_copyable_v<Parameters> && sizeof(Parameters) <= 4096,
                  "setBytes takes plain data up to 4 KB");
    Binding binding = error_log();
    const auto* first = reinterpret_cast<const std::byte*>(&parameters);
    binding.bytes.assign(first, first + sizeof(Parameters));
    return binding;
  }
};

struct Launch {
  std::string kernel;                  // the function template
  std::string file;                    // "gdn/solve_tril.metal"
  std::vector<std::string> arguments;  // template arguments as Metal spells them
  std::vector<Binding> bindings;       // [[buffer(i)]] in order
  std::array<size_t, 3> threadgroups;
  size_t threads;  // a threadgroup, a multiple of 32

  // "solve_tril_64": kernel and template arguments.
  std::string name() const;
};

struct PipelineFacts {
  std::string name;
  std::string warnings;  // of the device's compiler
  double compile_seconds;
  size_t max_total_threads_per_threadgroup, thread_execution_width, static_threadgroup_memory_length;
};

struct DeviceFacts {
  std::string name;
  size_t core_count, max_threadgroup_memory_length, max_buffer_length, recommended_max_working_set_size;
};

class Launcher {
 public:
  virtual ~Launcher() = default;
  virtual void run(const std::vector<Launch>& launches) = 0;  // encodes; does not wait
  virtual PipelineFacts compile(const Launch& launch) = 0;    // reads kernel, file and arguments only
  virtual std::vector<PipelineFacts> pipelines() const = 0;
  virtual void clear_pipelines() = 0;
  virtual const DeviceFacts& device() const = 0;
};

// Both raise without an encoder (Linux without the simulated device), which registers itself when loaded.
Launcher& launcher();         // the calling thread's recorder, else the device's
Launcher& device_launcher();  // the device's, while the thread records too
bool has_launcher();
void set_launcher(Launcher* launcher);

// A recorder takes the launches of its thread only (recorder.h).
bool is_recording();
Launcher* set_recorder(Launcher* recorder);  // of the calling thread; nullptr: none. Returns the previous one.

// Set when torch_gdn is imported.
const std::string& shader_directory();
void set_shader_directory(std::string directory);

}  // namespace torch_gdn
