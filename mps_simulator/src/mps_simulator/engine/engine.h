// The Metal execution engine, as the simulated device sees it. It is plain C++, without Objective-C and PyTorch.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "mps_simulator/engine/count/operation_kinds.h"

struct simulator_kernel;

namespace simulator {

// ---- compiling -------------------------------------------------------------------------------------------------

struct CompileOptions {
  uint32_t language_version = 0;  // (major << 16) | minor, as MTLLanguageVersion; 0: not set, the host's default
  bool fast_math = true;          // Metal's default
  std::vector<std::pair<std::string, std::string>> macros;
  bool strict = true;  // compile() takes it from the settings
};

struct CompileError : std::runtime_error {
  using std::runtime_error::runtime_error;  // the compiler's message, with the shader's file names and lines
};

using FunctionConstants = std::map<uint32_t, std::vector<std::byte>>;  // index -> value

class Program;

// A kernel with its function constants bound.
struct Function {
  std::string name;
  const simulator_kernel* kernel = nullptr;
  std::shared_ptr<const Program> program;  // keeps the code loaded
  FunctionConstants constants;
  double compile_seconds = 0;
};

class Program {
 public:
  virtual ~Program() = default;
  virtual std::vector<std::string> function_names() const = 0;
  virtual std::shared_ptr<const Function> function(const std::string& name,
                                                   const FunctionConstants& constants) const = 0;  // null: no such name
  virtual void bind(const FunctionConstants& constants) const = 0;                                 // before a dispatch
  virtual double compile_seconds() const = 0;
  // Returns the same program with counters of operations, for a detailed profile. The first call compiles it.
  virtual std::shared_ptr<const Program> counted() const = 0;
  virtual std::span<const BlockOperations> blocks() const = 0;  // empty unless it has counters
};

// Compiles the source, or takes it from the cache on disk, by its content. Checks address spaces. Throws CompileError.
std::shared_ptr<const Program> compile(const std::string& source, const CompileOptions& options);

// ---- memory ----------------------------------------------------------------------------------------------------

// The device reports its buffers here, so that the watch knows their bounds and what was written.
void memory_created(const void* data, size_t length);  // nothing written yet
void memory_destroyed(const void* data);
void memory_written(const void* data, size_t length);   // by a host copy or a blit
void memory_recycled(const void* data, size_t length);  // handed out again by an allocator: unwritten from here on
bool memory_is_written(const void* data, size_t length);

// ---- running ---------------------------------------------------------------------------------------------------

struct Size {
  size_t width = 1, height = 1, depth = 1;
  size_t count() const { return width * height * depth; }
};

struct BoundArgument {
  enum Kind { absent, buffer, bytes } kind = absent;
  std::byte* data = nullptr;  // already at the offset
  size_t length = 0;          // from data to the buffer's end
  size_t offset = 0;          // of data in its buffer
};

constexpr size_t kMaxBuffers = 31;
constexpr size_t kMaxThreadgroupMemory = 32768;
constexpr size_t kMaxThreads = 1024;

struct Dispatch {
  std::shared_ptr<const Function> function;
  std::array<BoundArgument, kMaxBuffers> buffers;
  std::array<size_t, kMaxBuffers> threadgroup_lengths{};
  Size threadgroups, threads_per_threadgroup;
  Size threads;  // the exact grid of dispatchThreads; zero where dispatchThreadgroups was used
};

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Checks what Apple's validation layer rejects when a dispatch is encoded. Throws a Fault that names the kernel.
void validate(const Dispatch& dispatch);

// Runs every threadgroup of the dispatch. Throws a Fault that names kernel, argument, index and thread.
void execute(const Dispatch& dispatch);

// ---- settings and figures --------------------------------------------------------------------------------------

struct Settings {
  bool watch = true;
  bool detailed = false;  // with watch: also counts the accesses of simdgroups, at several times the cost
  bool perturb = false;   // ULP noise on exp, log, rsqrt, ...; shuffled reductions; denormals flushed
  uint64_t seed = 0;      // order of lanes and simdgroups; 0: ascending
  unsigned workers = 0;   // operating-system threads; 0 for one per core
  uint64_t parts = 1;     // runs only the last of so many equal parts of each dispatch's threadgroups
  bool strict = true;     // refuses what C++14 lacks; Apple's compiler accepts some of C++17 with a warning
  bool all_lanes = true;  // refuses a simdgroup operation that some lanes do not reach; Metal leaves those lanes out
};
Settings& settings();

struct KernelFigures {
  uint64_t dispatches = 0, threadgroups = 0, threads = 0;
  uint64_t device_bytes_read = 0, device_bytes_written = 0;  // as threads issue them; counted while watched
  uint64_t threadgroup_bytes_read = 0, threadgroup_bytes_written = 0;
  uint64_t barriers = 0, collectives = 0,
           matrix_multiplies = 0;   // barriers of a threadgroup, and the others of a simdgroup
  uint64_t threadgroup_memory = 0;  // bytes, static and dynamic, the most of any dispatch
  double seconds = 0;               // the time of the simulation, which says nothing about a GPU

  // Counted only with Settings::detailed. simdgroup_access.h says what an access of a simdgroup is. Its bytes, lines
  // and words are distinct: lanes that read the same address count once.
  uint64_t device_accesses = 0;                                                // of simdgroups
  uint64_t device_bytes_issued_read = 0, device_bytes_issued_written = 0;      // summed over accesses
  uint64_t device_bytes_distinct_read = 0, device_bytes_distinct_written = 0;  // in the whole of each dispatch
  uint64_t load_rounds = 0;  // times that a simdgroup loaded from device memory between two barriers of its threadgroup
  uint64_t cache_lines = 0, least_cache_lines = 0;     // of 128 bytes; least: if each access were contiguous
  uint64_t threadgroup_accesses = 0;                   // of simdgroups
  uint64_t bank_cycles = 0, least_bank_cycles = 0;     // with 32 banks of 4 bytes; least: without conflicts
  OperationFigures operations{}, operations_issued{};  // of threads; 32 for each of a simdgroup, masked lanes included
};

// The figures that are sums over dispatches, with their names in Python.
struct Count {
  const char* name;
  uint64_t KernelFigures::* value;
};
inline constexpr Count kCounts[] = {
    {"dispatches", &KernelFigures::dispatches},
    {"threadgroups", &KernelFigures::threadgroups},
    {"threads", &KernelFigures::threads},
    {"device_bytes_read", &KernelFigures::device_bytes_read},
    {"device_bytes_written", &KernelFigures::device_bytes_written},
    {"threadgroup_bytes_read", &KernelFigures::threadgroup_bytes_read},
    {"threadgroup_bytes_written", &KernelFigures::threadgroup_bytes_written},
    {"barriers", &KernelFigures::barriers},
    {"collectives", &KernelFigures::collectives},
    {"matrix_multiplies", &KernelFigures::matrix_multiplies},
    {"device_accesses", &KernelFigures::device_accesses},
    {"device_bytes_issued_read", &KernelFigures::device_bytes_issued_read},
    {"device_bytes_issued_written", &KernelFigures::device_bytes_issued_written},
    {"device_bytes_distinct_read", &KernelFigures::device_bytes_distinct_read},
    {"device_bytes_distinct_written", &KernelFigures::device_bytes_distinct_written},
    {"load_rounds", &KernelFigures::load_rounds},
    {"cache_lines", &KernelFigures::cache_lines},
    {"least_cache_lines", &KernelFigures::least_cache_lines},
    {"threadgroup_accesses", &KernelFigures::threadgroup_accesses},
    {"bank_cycles", &KernelFigures::bank_cycles},
    {"least_bank_cycles", &KernelFigures::least_bank_cycles},
};

void reset_figures();
std::map<std::string, KernelFigures> figures();  // by kernel name

}  // namespace simulator
