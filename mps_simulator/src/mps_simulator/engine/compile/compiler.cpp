#include "compiler.h"

#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <vector>

#include "intermediate_code.h"
#include "mps_simulator/engine/engine.h"
#include "process.h"
#include "program.h"
#include "shader_cache.h"
#include "source_transform.h"

namespace simulator {
namespace {

namespace fs = std::filesystem;

// Used if the host sets no version. This is the default of the oldest supported macOS. It has no bfloat, so you notice
// if you forgot languageVersion.
constexpr uint32_t kDefaultVersion = 2u << 16;

struct Directories {
  fs::path engine, cache;
};

Directories& directories() {
  static Directories instance;
  return instance;
}

struct Tools {
  std::string clang, linker, gcc;
};

Tools& tools() {
  static Tools instance;
  return instance;
}

fs::path metal_headers() { return directories().engine / "compile" / "metal"; }

// Returns the compiler's identity and the processor's features, which -march=native stands for, without running the
// compiler.
std::string machine_key() {
  struct stat status{};
  stat(tools().clang.c_str(), &status);
  std::string key = tools().clang + " " + std::to_string(status.st_size) + " " + std::to_string(status.st_mtime);
  std::ifstream cpu("/proc/cpuinfo");
  for (std::string line; std::getline(cpu, line);) {
    if (line.starts_with("flags") || line.starts_with("Features")) return key + line;
  }
  return key;
}

// Hashes everything that a compiled kernel depends on: the headers of the language, and the code that turns Metal into
// C++.
std::string engine_key() {
  const fs::path& root = directories().engine;
  if (root.empty()) throw std::logic_error("set_directories() was not called");
  std::vector<fs::path> files = {root / "kernel_abi.h", root / "count" / "operation_kinds.h"};
  for (const auto& entry : fs::recursive_directory_iterator(root / "compile")) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  std::string all;
  for (const fs::path& file : files) all += fs::relative(file, root).string() + '\0' + read_file(file) + '\0';
  return content_hash(all);
}

const std::vector<std::string>& common_flags() {
  static const std::vector<std::string> flags = {
      "-cl-std=clc++2021", "-cl-no-stdinc", "-nostdinc", "-cl-single-precision-constant", "-fPIC", "-ffp-contract=fast",
      "-fno-math-errno", "-fno-strict-aliasing",
      // The sanitizer's pass misses accesses of more than 16 bytes. Vectorising would hide the shader's own accesses.
      "-fno-vectorize", "-fno-slp-vectorize", "-mllvm", "-disable-vector-combine",
      // A kernel variant runs for milliseconds and takes about a second to compile. The passes that are turned off here
      // took a third of that second, and made no kernel measurably faster. -O1 alone would not fully unroll loops of a
      // constant length, but the checks of private arrays find more in unrolled loops.
      "-funroll-loops", "-mllvm", "-unroll-runtime=0", "-mllvm", "-unroll-allow-partial=0", "-mllvm", "-disable-lsr",
      // These three passes of the code generator took a sixth of the rest of the time.
      "-mllvm", "-regalloc=basic", "-mllvm", "-disable-cgp", "-mllvm", "-disable-x86-domain-reassignment",
      "-fsanitize=thread", "-mllvm", "-tsan-instrument-func-entry-exit=0", "-mllvm", "-tsan-handle-cxx-exceptions=0",
      // These flags check private arrays and constant tables (watch/private_memory.cpp). The first checks array
      // indices. The second checks, once loops are unrolled, what a pointer reaches. The third checks the rest at run
      // time. The handlers do not return, but clang must believe that they do. Otherwise each check guards all code
      // after it, and GVN and IndVarSimplify take most of the compile time of a large kernel (6.0 s instead of 0.8 s).
      "-fsanitize=array-bounds,object-size,local-bounds", "-fsanitize-recover=array-bounds,object-size",
      "-fsanitize-trap=local-bounds",
      // A private variable that was never written is NaN.
      "-ftrivial-auto-var-init=pattern",
      // Without this flag, `x += 1` would count only as a write.
      "-mllvm", "-tsan-instrument-read-before-write=1",
      // A thread's stack has 128 KB (fibers.cpp).
      "-Wno-everything", "-Wframe-larger-than=65536", "-Werror=frame-larger-than", "-fno-caret-diagnostics",
      "-fno-color-diagnostics", "-ferror-limit=20"};
  return flags;
}

std::vector<std::string> option_flags(const CompileOptions& options) {
  std::vector<std::string> flags = {"-march=" + options.march};
  if (options.fast_math) flags.push_back("-ffast-math");
  return flags;
}

// With -O1, a kernel variant compiles in two thirds of the time that -O2 takes, and runs as fast. Operations are
// counted in -O2 code, which is closer to the output of a GPU's compiler.
std::string optimisation(bool is_counted) { return is_counted ? "-O2" : "-O1"; }

void append(std::vector<std::string>& list, const std::vector<std::string>& more) {
  list.insert(list.end(), more.begin(), more.end());
}

void replace_all(std::string& text, const std::string& from, const std::string& to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
}

// Replaces clang's address spaces and types in its messages by Metal's names.
std::string in_metal_terms(const std::string& errors) {
  std::string text;
  std::istringstream lines(errors);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("In file included from ")) text += line + "\n";
  }
  for (const auto& [from, to] : std::initializer_list<std::pair<const char*, const char*>>{
           {" *__private", " *"},
           {" &__private", " &"},
           {"__generic ", ""},
           {"__attribute__((opencl_global_device))", "threadgroup"},
           {"__global_device", "threadgroup"},
           {"const __global", "constant"},
           {"__global", "constant"},
           {"__local", "device"},
           {"__private", "thread"},
           {"metal::vec<", "vec<"},
           {"simulator_atomic_", "atomic_"}}) {
    replace_all(text, from, to);
  }
  return text;
}

std::string run(const std::string& program, const std::vector<std::string>& arguments) {
  if (program.empty()) throw std::logic_error("set_tools() was not called");
  std::vector<std::string> command = {program};
  append(command, arguments);
  ProcessResult result = run_process(command);
  if (WIFEXITED(result.status) && WEXITSTATUS(result.status) == 0) return std::move(result.output);
  if (result.errors.empty()) result.errors = program + " failed without a message\n";
  throw CompileError(in_metal_terms(result.errors));
}

std::string run_clang(const std::vector<std::string>& arguments) { return run(tools().clang, arguments); }

// Compiles with the given arguments, and links the object. If clang did both, it would start itself a second time,
// which takes 20 ms: a tenth of a kernel's compile time.
void make_library(std::vector<std::string> arguments, const fs::path& directory, const fs::path& library) {
  TemporaryFile object(directory, ".o");
  append(arguments, {"-c", "-o", object.path().string()});
  run_clang(arguments);
  run(tools().linker, {"-shared", "-o", library.string(), object.path().string(), "-L" + tools().gcc, "-lm", "-lgcc"});
}

uint32_t language_version(const CompileOptions& options) {
  return options.language_version ? options.language_version : kDefaultVersion;
}

std::vector<std::string> macro_flags(const CompileOptions& options) {
  const uint32_t version = language_version(options);
  std::vector<std::string> flags = {
      "-D__cplusplus=201402L", "-D__METAL__=1", "-D__METAL_MACOS__=1", "-D__HAVE_SIMDGROUP_MATRIX__=1",
      "-D__METAL_VERSION__=" + std::to_string((version >> 16) * 100 + (version & 0xffff) * 10)};
  if (version >= (3u << 16 | 1)) flags.push_back("-D__HAVE_BFLOAT__=1");
  if (options.fast_math) flags.push_back("-D__FAST_MATH__=1");
  for (const auto& [name, value] : options.macros) flags.push_back("-D" + name + "=" + value);
  return flags;
}

std::string preprocess(const std::string& source, const CompileOptions& options, const fs::path& directory) {
  TemporaryFile file(directory, ".metal");
  file.write("# 1 \"program_source\"\n" + source);
  std::vector<std::string> arguments = {"-E",
                                        "-x",
                                        "c++",
                                        "-std=c++14",
                                        "-undef",
                                        "-nostdinc",
                                        "-w",
                                        "-fno-caret-diagnostics",
                                        "-I" + metal_headers().string()};
  append(arguments, macro_flags(options));
  append(arguments, {"-o", "-", file.path().string()});
  return run_clang(arguments);
}

fs::path prelude(const CompileOptions& options, const std::string& engine, const fs::path& directory) {
  const std::string key = content_hash(engine + machine_key() + directories().engine.string() + options.march + " " +
                                       (options.fast_math ? "fast" : "safe"));
  const fs::path path = directory / ("prelude_" + key + ".pch");
  if (fs::exists(path)) return path;
  const fs::path library = metal_headers() / "library";
  TemporaryFile output(directory, ".pch");
  std::vector<std::string> arguments = {"-x", "cl-header"};
  append(arguments, common_flags());
  append(arguments, option_flags(options));
  // The cache's key covers the headers' content. A new checkout changes only their times.
  append(arguments, {"-Xclang", "-fno-pch-timestamp", "-isystem", (library / "host").string(), "-o",
                     output.path().string(), (library / "prelude.h").string()});
  run_clang(arguments);
  output.publish(path);
  return path;
}

void add_counters(std::vector<std::string> arguments, const fs::path& directory, const fs::path& output) {
  TemporaryFile plain(directory, ".ll"), counting(directory, ".ll");
  append(arguments, {"-S", "-emit-llvm", "-o", plain.path().string()});
  run_clang(arguments);
  counting.write(with_counters(read_file(plain.path())));
  make_library(
      {"-x", "ir", "-O2", "-Xclang", "-disable-llvm-passes", "-fPIC", "-Wno-everything", counting.path().string()},
      directory, output);
}

void build(const std::string& source, const CompileOptions& options, bool is_counted, const std::string& engine,
           const fs::path& directory, const fs::path& path) {
  TemporaryFile input(directory, ".cl"), output(directory, ".so");
  input.write(transform_source(preprocess(source, options, directory), language_version(options)));
  std::vector<std::string> arguments = {"-x", "cl", optimisation(is_counted)};
  append(arguments, common_flags());
  append(arguments, option_flags(options));
  // Metal 3.1 is C++14. clang's C++ for OpenCL is C++17, and warns about features that C++14 lacks.
  if (options.strict) arguments.push_back("-Werror=pre-c++17-compat");
  append(arguments, {"-include-pch", prelude(options, engine, directory).string(), input.path().string()});
  if (is_counted) {
    add_counters(arguments, directory, output.path());
  } else {
    make_library(std::move(arguments), directory, output.path());
  }
  output.publish(path);
}

std::shared_ptr<const Program> compile_one(const std::string& source, const CompileOptions& options, bool is_counted);

std::shared_ptr<const Program> build_and_load(const std::string& source, const CompileOptions& options,
                                              bool is_counted) {
  const auto begin = std::chrono::steady_clock::now();
  const std::string engine = engine_key();
  std::string key =
      engine + machine_key() + std::to_string(language_version(options)) + (options.fast_math ? "fast" : "safe");
  key += options.march + '\0';
  for (const std::string& flag : common_flags()) key += flag + '\0';
  for (const auto& [name, value] : options.macros) key += name + '=' + value + '\0';
  if (options.strict) key += "strict";
  if (is_counted) key += "counted";
  const fs::path& directory = directories().cache;
  const fs::path path = directory / (content_hash(key + '\0' + source) + ".so");
  const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
  const auto counted = [source, options] { return compile_one(source, options, true); };
  if (fs::exists(path)) {
    try {
      return load_program(path, seconds(), counted);
    } catch (const CompileError&) {
      // The library is damaged, perhaps because the disk was full. It is rebuilt below.
    }
  }
  build(source, options, is_counted, engine, directory, path);
  return load_program(path, seconds(), counted);
}

std::shared_ptr<const Program> compile_one(const std::string& source, const CompileOptions& options, bool is_counted) {
  using Key = std::tuple<std::string, uint32_t, bool, std::vector<std::pair<std::string, std::string>>, bool, bool,
                         std::string>;
  static std::mutex mutex;
  static std::map<Key, std::shared_ptr<const Program>> programs;
  const Key key{source,       language_version(options), options.fast_math, options.macros, options.strict, is_counted,
                options.march};
  {
    const std::lock_guard lock(mutex);
    if (const auto known = programs.find(key); known != programs.end()) return known->second;
  }
  auto program = build_and_load(source, options, is_counted);
  const std::lock_guard lock(mutex);
  return programs.emplace(key, program).first->second;
}

}  // namespace

void set_directories(const std::string& engine, const std::string& cache) {
  fs::create_directories(cache);
  directories() = {engine, cache};
}

void set_tools(const std::string& clang, const std::string& linker, const std::string& gcc) {
  tools() = {clang, linker, gcc};
}

std::shared_ptr<const Program> compile(const std::string& source, const CompileOptions& options) {
  CompileOptions with_settings = options;
  with_settings.strict = settings().strict;
  with_settings.march = settings().march;
  return compile_one(source, with_settings, false);
}

}  // namespace simulator
