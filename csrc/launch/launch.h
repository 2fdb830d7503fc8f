// A kernel launch as plain data. Ops make launches, and encoder.mm encodes them. This file has no Objective-C, so any
// machine can record launches.
#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "launch/block.h"

namespace torch_gdn {

// A template argument in one word: a dtype, a bool, or a non-negative number. No string and no allocation is needed to
// build a launch and find its pipeline.
class TemplateArgument {
 public:
  TemplateArgument() = default;  // no argument
  TemplateArgument(at::ScalarType dtype);
  template <typename Integer, typename = std::enable_if_t<std::is_integral_v<Integer>>>
  TemplateArgument(Integer value) {
    if constexpr (std::is_same_v<Integer, bool>) {
      word_ = value ? kTrue : kFalse;
    } else {
      word_ = number(int64_t(value));
    }
  }

  // Returns true, or no argument if the template's default is false.
  static TemplateArgument flag(bool value) { return value ? TemplateArgument(true) : TemplateArgument(); }

  bool is_none() const { return word_ == kNone; }
  int32_t word() const { return word_; }
  std::string spelled() const;                                  // in Metal's spelling
  static TemplateArgument spelled_as(const std::string& text);  // the inverse
  bool operator==(const TemplateArgument&) const = default;

 private:
  enum Word : int32_t { kNone = -6, kFloat, kHalf, kBfloat, kFalse, kTrue };
  static int32_t number(int64_t value);
  int32_t word_ = kNone;
};

constexpr size_t kMostTemplateArguments = 8;
using TemplateArguments = std::array<TemplateArgument, kMostTemplateArguments>;  // absent ones come last

constexpr size_t kMostOfSetBytes = 4096;  // bytes, according to Metal's documentation

struct Binding {
  enum class Kind : uint8_t { kAbsent, kTensor, kHostArray, kParameterBlock, kErrorLog };

  Kind kind = Kind::kAbsent;
  // One binding. A tensor on the device is bound at its storage offset. A tensor on the host is copied into the
  // command.
  at::Tensor tensor;

  Binding() = default;
  explicit Binding(Kind kind) : kind(kind) {}
  // A tensor that is undefined or has no elements has no buffer, and counts as absent.
  Binding(at::Tensor value) {
    if (!value.defined() || value.numel() == 0) return;
    kind = value.is_cpu() ? host_array(value) : Kind::kTensor;
    tensor = std::move(value);
  }
  Binding(const std::optional<at::Tensor>& value) : Binding(value.value_or(at::Tensor())) {}
  static Binding error_log() { return Binding(Kind::kErrorLog); }

 private:
  static Kind host_array(const at::Tensor& value);  // checks that setBytes can pass it
};

template <typename Each>
constexpr size_t kBindingsOf = 1;
template <typename... Part>
constexpr size_t kBindingsOf<std::tuple<Part...>> = sizeof...(Part);

// The bindings of a launch, in the order of [[buffer(i)]]: tensors, which may be absent, small host arrays, the error
// log, and one parameter block: a struct that is defined in shaders/, of which this has a copy. A tuple adds each of
// its elements.
class Bindings {
 public:
  static constexpr size_t kMost = 31;        // Metal's own limit
  static constexpr size_t kMostBytes = 768;  // of a copied parameter block

  template <typename... Each>
    requires(sizeof...(Each) > 1)
  Bindings(Each&&... each) {
    static_assert((kBindingsOf<std::decay_t<Each>> + ...) <= kMost);
    (add(std::forward<Each>(each)), ...);
  }

  // Takes bindings that are known only when the launch is made. It does not copy the parameter block, so keep the block
  // until the launch has run.
  static Bindings of(c10::ArrayRef<Binding> bindings, c10::ArrayRef<std::byte> block);

  const Binding* begin() const { return bindings_.data(); }
  const Binding* end() const { return bindings_.data() + size_; }
  size_t size() const { return size_; }
  const std::byte* block() const { return outer_block_ ? outer_block_ : block_.data(); }
  size_t block_bytes() const { return block_bytes_; }

 private:
  Bindings() = default;
  void add(Binding binding) { bindings_[size_++] = std::move(binding); }

  template <typename Parameters>
    requires(std::is_class_v<Parameters> && std::is_trivially_copyable_v<Parameters>)
  void add(const Parameters& parameters) {
    static_assert(sizeof(Parameters) <= kMostBytes);
    block_bytes_ = sizeof(Parameters);
    std::memcpy(block_.data(), &parameters, sizeof(Parameters));
    bindings_[size_++].kind = Binding::Kind::kParameterBlock;
  }

  template <typename... Part>
  void add(std::tuple<Part...> parts) {
    std::apply([&](auto&... part) { (add(std::forward<Part>(part)), ...); }, parts);
  }

  std::array<Binding, kMost> bindings_;
  size_t size_ = 0, block_bytes_ = 0;
  const std::byte* outer_block_ = nullptr;
  std::array<std::byte, kMostBytes> block_;
};

// A kernel with its template arguments as text.
struct Variant {
  std::string kernel;                  // the function template
  std::string file;                    // "gdn/solve_tril.metal"
  std::vector<std::string> arguments;  // in Metal's spelling

  std::string name() const;  // "solve_tril_64"
};

// Identifies a kernel variant. The name is a string literal, whose address identifies the kernel.
struct LaunchKey {
  const char* kernel;
  TemplateArguments arguments;
  bool operator==(const LaunchKey&) const = default;
};

struct LaunchKeyHash {
  size_t operator()(const LaunchKey& key) const {
    uint64_t hash = reinterpret_cast<uintptr_t>(key.kernel);
    for (const auto& argument : key.arguments) {
      hash = (hash ^ uint32_t(argument.word())) * 0x9e3779b97f4a7c15;  // 2^64 divided by the golden ratio, odd
      hash ^= hash >> 32;
    }
    return hash;
  }
};

using Grid = std::array<int64_t, 3>;

struct Launch {
  const char* kernel;  // "gdn/solve_tril": the kernel solve_tril of gdn/solve_tril.metal
  TemplateArguments arguments;
  Bindings bindings;
  Grid threadgroups;
  int64_t threads;             // threads per threadgroup, a multiple of 32
  const char* file = nullptr;  // the file of a kernel that has another name than its file

  bool is_empty() const { return threadgroups[0] * threadgroups[1] * threadgroups[2] == 0; }
  LaunchKey key() const { return {kernel, arguments}; }
  Variant variant() const;
};

using Launches = c10::ArrayRef<Launch>;

// Returns the Metal source of kernel variants, all of one file: the shader file with each `#include "..."` inlined once
// (relative to shader_directory()), because run-time compilation has no include path. Adds #line directives for the
// compiler's messages, and one line per variant that instantiates it.
std::string shader_source(c10::ArrayRef<Variant> variants);

struct PipelineFacts {
  std::string name;
  std::string warnings;  // from the device's compiler
  double compile_seconds;
  size_t max_total_threads_per_threadgroup, thread_execution_width, static_threadgroup_memory_length;
};

struct DeviceFacts {
  std::string name;
  size_t core_count, max_threadgroup_memory_length, max_buffer_length, recommended_max_working_set_size;
  uint64_t registry_id;               // distinguishes devices of the same name
  std::vector<std::string> families;  // "Apple7", "Metal3", ...: the families that the device supports
};

class Launcher {
 public:
  virtual ~Launcher() = default;
  virtual void run(Launches launches) = 0;  // encodes without waiting; skips launches without threadgroups
  // Compiles variants of one file from one source. If some fail, it still compiles the others, and then raises the
  // first error.
  virtual std::vector<PipelineFacts> compile(c10::ArrayRef<Variant> variants) = 0;
  virtual std::vector<PipelineFacts> pipelines() const = 0;
  virtual void clear_pipelines() = 0;
  virtual const DeviceFacts& device() const = 0;
  // Waits for everything that was encoded. Returns how many seconds the GPU worked on the command buffer in progress,
  // by the GPU's own clock.
  virtual double wait_and_time() = 0;
};

// Both functions raise an error if there is no encoder (on Linux without the simulated device). The encoder registers
// itself when it is loaded.
Launcher& launcher();         // the calling thread's recorder, or the device's launcher if there is no recorder
Launcher& device_launcher();  // the device's launcher, even while the thread records
bool has_launcher();

// Returns the number of threadgroups that leaves no core idle. It is 3 per core, an assumption that no Mac has
// confirmed. Attention splits its keys until it has this many threadgroups. More would only write and read more partial
// results.
int64_t busy_threadgroups();

void set_launcher(Launcher* launcher);

// Takes the launches of the thread that starts it (recorder.h).
using Recording = Block<std::shared_ptr<Launcher>>;
bool is_recording();

// Set when torch_gdn is imported.
const std::string& shader_directory();
void set_shader_directory(std::string directory);

}  // namespace torch_gdn
