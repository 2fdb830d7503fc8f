// The interface of the Metal execution engine to the simulated device. It is plain C++, without Objective-C and
// PyTorch.
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
  // (major << 16) | minor, like MTLLanguageVersion. 0 means that the host set none and gets its default.
  uint32_t language_version = 0;
  bool fast_math = true;  // Metal's default
  std::vector<std::pair<std::string, std::string>> macros;
  // compile() sets these from the settings.
  bool strict = true;
  std::string march = "native";
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
  // Returns null if there is no such name.
  virtual std::shared_ptr<const Function> function(const std::string& name,
                                                   const FunctionConstants& constants) const = 0;
  virtual void bind(const FunctionConstants& constants) const = 0;  // call before a dispatch
  virtual double compile_seconds() const = 0;
  // Returns the same program with counters of operations, for a detailed profile. The first call compiles it.
  virtual std::shared_ptr<const Program> counted() const = 0;
  virtual std::span<const BlockOperations> blocks() const = 0;  // empty if the program has no counters
};

// Compiles the source, or takes the result from the cache on disk if the content is the same. Checks address spaces.
// Throws CompileError.
std::shared_ptr<const Program> compile(const std::string& source, const CompileOptions& options);

// ---- memory ----------------------------------------------------------------------------------------------------

// The device reports its buffers here. The watch then knows their bounds and which bytes were written.
void memory_created(const void* data, size_t length);  // no byte is written yet
void memory_destroyed(const void* data);
void memory_written(const void* data, size_t length);   // a host copy or a blit wrote the bytes
void memory_recycled(const void* data, size_t length);  // an allocator hands the memory out again: no byte is written
bool memory_is_written(const void* data, size_t length);

// ---- running ---------------------------------------------------------------------------------------------------

struct Size {
  size_t width = 1, height = 1, depth = 1;
  size_t count() const { return width * height * depth; }
};

struct BoundArgument {
  enum Kind { absent, buffer, bytes } kind = absent;
  std::byte* data = nullptr;  // the start of the bytes, with the offset applied
  size_t length = 0;          // from data to the buffer's end
  size_t offset = 0;          // offset of `data` in its buffer
};

constexpr size_t kMaxBuffers = 31;
constexpr size_t kMaxThreadgroupMemory = 32768;
constexpr size_t kMaxThreads = 1024;

struct Dispatch {
  std::shared_ptr<const Function> function;
  std::array<BoundArgument, kMaxBuffers> buffers;
  std::array<size_t, kMaxBuffers> threadgroup_lengths{};
  Size threadgroups, threads_per_threadgroup;
  Size threads;  // the exact grid of dispatchThreads; zero for dispatchThreadgroups
};

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Checks what Apple's validation layer checks when a dispatch is encoded. Throws a Fault that names the kernel.
void validate(const Dispatch& dispatch);

// Runs every threadgroup of the dispatch. Throws a Fault that names the kernel, the argument, the index and the thread.
void execute(const Dispatch& dispatch);

// ---- settings and figures --------------------------------------------------------------------------------------

struct Settings {
  bool watch = true;
  bool detailed = false;  // with watch, also counts the accesses of simdgroups; this is several times slower
  bool perturb = false;   // adds noise in ULPs to exp, log, rsqrt, ...; shuffles reductions; flushes denormals
  uint64_t seed = 0;      // decides the order of lanes and simdgroups; 0 means ascending
  unsigned workers = 0;   // operating-system threads; 0 for one per core
  uint64_t parts = 1;  // divides each dispatch into this many equal parts of its threadgroups, and runs only the last
  bool strict = true;  // refuses what C++14 lacks; Apple's compiler accepts some of C++17 with a warning
  std::string march = "native";  // the instruction set that shaders are compiled for, as in clang's -march
  bool all_lanes = true;  // refuses a simdgroup operation that some lanes do not reach; Metal leaves those lanes out
};
Settings& settings();

struct KernelFigures {
  uint64_t dispatches = 0, threadgroups = 0, threads = 0;
  uint64_t device_bytes_read = 0, device_bytes_written = 0;  // as threads issue them; counted only with watch
  uint64_t threadgroup_bytes_read = 0, threadgroup_bytes_written = 0;
  uint64_t barriers = 0, collectives = 0,
           matrix_multiplies = 0;   // threadgroup_barriers wait for a threadgroup; the others wait for a simdgroup
  uint64_t threadgroup_memory = 0;  // bytes, static and dynamic; the maximum over dispatches
  double seconds = 0;               // the time of the simulation, which says nothing about a GPU

  // These figures are counted only with Settings::detailed. simdgroup_access.h says what an access of a simdgroup is.
  // Its bytes, lines and words are distinct: lanes that read the same address count once.
  uint64_t device_accesses = 0;                                                // accesses of simdgroups
  uint64_t device_bytes_issued_read = 0, device_bytes_issued_written = 0;      // summed over accesses
  uint64_t device_bytes_distinct_read = 0, device_bytes_distinct_written = 0;  // distinct over a whole dispatch
  uint64_t load_rounds = 0;  // rounds of a simdgroup's loads from device memory; each threadgroup barrier ends a round
  uint64_t cache_lines = 0, least_cache_lines = 0;  // of 128 bytes; `least` is the number with contiguous accesses
  uint64_t threadgroup_accesses = 0;                // accesses of simdgroups
  uint64_t bank_cycles = 0, least_bank_cycles = 0;  // with 32 banks of 4 bytes; `least` is the number without conflicts
  // of threads; of simdgroups, each counted 32 times, with masked lanes
  OperationFigures operations{}, operations_issued{};
};

// The figures that are summed over dispatches, with their names in Python.
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
