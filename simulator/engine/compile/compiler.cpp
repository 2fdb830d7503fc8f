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

#include "engine.h"
#include "operations.h"
#include "process.h"
#include "program.h"
#include "shader_cache.h"
#include "source_transform.h"

namespace simulator {
namespace {

namespace fs = std::filesystem;

// A host that sets no version gets what Apple's oldest still supported compilers defaulted to, in which bfloat does not
// exist: forgetting languageVersion shows.
constexpr uint32_t kDefaultVersion = 2u << 16;

// Set to 0 in CompileOptions::macros by tests that compile other people's Metal: features of C++17 that Apple's
// compiler takes with a warning are then allowed. The address spaces are checked all the same.
constexpr const char* kProjectRules = "SIMULATOR_PROJECT_RULES";

std::string& directory_setting() {
  static std::string directory;
  return directory;
}

const std::string& clang() {
  static const std::string path = find_program({"clang++-19", "clang-19"});
  if (path.empty()) throw CompileError("the Metal engine needs clang-19: apt-get install clang-19");
  return path;
}

// The compiler's identity and the processor's features (-march=native), without running the compiler.
std::string machine_key() {
  struct stat status{};
  stat(clang().c_str(), &status);
  std::string key = clang() + " " + std::to_string(status.st_size) + " " + std::to_string(status.st_mtime);
  std::ifstream cpu("/proc/cpuinfo");
  for (std::string line; std::getline(cpu, line);) {
    if (line.starts_with("flags") || line.starts_with("Features")) return key + line;
  }
  return key;
}

// Everything in simulator/engine that goes into a compiled kernel: headers, and the code that makes the C++.
std::string engine_key() {
  const fs::path root = engine_directory();
  if (root.empty()) throw std::logic_error("set_engine_directory() was not called");
  std::vector<fs::path> files;
  for (const char* name :
       {"kernel_abi.h", "compiler.cpp", "constant_use.cpp", "intermediate_code.cpp", "kernel_entry.cpp",
        "operation_kinds.h", "program_tables.cpp", "source_transform.cpp", "source_words.cpp", "tokens.cpp"}) {
    files.push_back(root / name);
  }
  for (const auto& entry : fs::recursive_directory_iterator(root / "metal")) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  std::string all;
  for (const fs::path& file : files) all += fs::relative(file, root).string() + '\0' + read_file(file) + '\0';
  return content_hash(all);
}

const std::vector<std::string>& common_flags() {
  static const std::vector<std::string> flags = {
      "-cl-std=clc++2021", "-cl-no-stdinc", "-nostdinc", "-cl-single-precision-constant", "-fPIC", "-O2",
      "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-strict-aliasing",
      // The sanitizer's pass does not see accesses of more than 16 bytes, and scalar accesses must stay what they are.
      "-fno-vectorize", "-fno-slp-vectorize", "-mllvm", "-disable-vector-combine", "-fsanitize=thread", "-mllvm",
      "-tsan-instrument-func-entry-exit=0", "-mllvm", "-tsan-handle-cxx-exceptions=0",
      // Else `x += 1` counts as a write alone.
      "-mllvm", "-tsan-instrument-read-before-write=1",
      // A thread's stack has 128 KB (fibers.cpp).
      "-Wno-everything", "-Wframe-larger-than=65536", "-Werror=frame-larger-than", "-fno-caret-diagnostics",
      "-fno-color-diagnostics", "-ferror-limit=20"};
  return flags;
}

std::vector<std::string> math_flags(const CompileOptions& options) {
  if (!options.fast_math) return {};
  return {"-ffast-math"};
}

void append(std::vector<std::string>& list, const std::vector<std::string>& more) {
  list.insert(list.end(), more.begin(), more.end());
}

void replace_all(std::string& text, const std::string& from, const std::string& to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
}

// clang's words, in Metal's, without the way to the prelude.
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

std::string run_clang(const std::vector<std::string>& arguments) {
  std::vector<std::string> command = {clang()};
  append(command, arguments);
  ProcessResult result = run_process(command);
  if (WIFEXITED(result.status) && WEXITSTATUS(result.status) == 0) return std::move(result.output);
  if (result.errors.empty()) result.errors = "clang failed and said nothing\n";
  throw CompileError(in_metal_terms(result.errors));
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

bool follows_project_rules(const CompileOptions& options) {
  return std::find(options.macros.begin(), options.macros.end(),
                   std::pair<std::string, std::string>{kProjectRules, "0"}) == options.macros.end();
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
                                        "-I" + (fs::path(engine_directory()) / "metal").string()};
  append(arguments, macro_flags(options));
  append(arguments, {"-o", "-", file.path().string()});
  return run_clang(arguments);
}

// The precompiled metal/library/prelude.h.
fs::path prelude(const CompileOptions& options, const std::string& engine, const fs::path& directory) {
  const std::string key =
      content_hash(engine + machine_key() + engine_directory() + (options.fast_math ? "fast" : "safe"));
  const fs::path path = directory / ("prelude_" + key + ".pch");
  if (fs::exists(path)) return path;
  const fs::path library = fs::path(engine_directory()) / "metal" / "library";
  TemporaryFile output(directory, ".pch");
  std::vector<std::string> arguments = {"-x", "cl-header"};
  append(arguments, common_flags());
  append(arguments, math_flags(options));
  // Checkouts change the time of a header, not its content, which the key holds.
  append(arguments, {"-Xclang", "-fno-pch-timestamp", "-isystem", (library / "host").string(), "-o",
                     output.path().string(), (library / "prelude.h").string()});
  run_clang(arguments);
  output.publish(path);
  return path;
}

// Puts counters of operations into a program on its way to the processor's code.
void add_counters(std::vector<std::string> arguments, const fs::path& directory, const fs::path& output) {
  TemporaryFile plain(directory, ".ll"), counting(directory, ".ll");
  append(arguments, {"-S", "-emit-llvm", "-o", plain.path().string()});
  run_clang(arguments);
  counting.write(with_counters(read_file(plain.path())));
  run_clang({"-x", "ir", "-O2", "-Xclang", "-disable-llvm-passes", "-fPIC", "-Wno-everything", "-shared", "-nostdlib",
             "-o", output.string(), counting.path().string(), "-lm", "-lgcc"});
}

void build(const std::string& source, const CompileOptions& options, bool is_counted, const std::string& engine,
           const fs::path& directory, const fs::path& path) {
  TemporaryFile input(directory, ".cl"), output(directory, ".so");
  input.write(transform_source(preprocess(source, options, directory), language_version(options)));
  std::vector<std::string> arguments = {"-x", "cl"};
  append(arguments, common_flags());
  append(arguments, math_flags(options));
  // Metal 3.1 is C++14. clang's C++ for OpenCL is C++17, but tells what C++14 lacks.
  if (follows_project_rules(options)) arguments.push_back("-Werror=pre-c++17-compat");
  append(arguments, {"-include-pch", prelude(options, engine, directory).string(), input.path().string()});
  if (is_counted) {
    add_counters(arguments, directory, output.path());
  } else {
    append(arguments, {"-shared", "-nostdlib", "-o", output.path().string(), "-lm", "-lgcc"});
    run_clang(arguments);
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
  for (const std::string& flag : common_flags()) key += flag + '\0';
  for (const auto& [name, value] : options.macros) key += name + '=' + value + '\0';
  if (is_counted) key += "counted";
  const fs::path directory = cache_directory();
  const fs::path path = directory / (content_hash(key + '\0' + source) + ".so");
  const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
  const auto counted = [source, options] { return compile_one(source, options, true); };
  if (fs::exists(path)) {
    try {
      return load_program(path, seconds(), counted);
    } catch (const CompileError&) {
      // damaged, by a full disk perhaps: built again below
    }
  }
  build(source, options, is_counted, engine, directory, path);
  return load_program(path, seconds(), counted);
}

std::shared_ptr<const Program> compile_one(const std::string& source, const CompileOptions& options, bool is_counted) {
  using Key = std::tuple<std::string, uint32_t, bool, std::vector<std::pair<std::string, std::string>>, bool>;
  static std::mutex mutex;
  static std::map<Key, std::shared_ptr<const Program>> programs;
  const Key key{source, language_version(options), options.fast_math, options.macros, is_counted};
  {
    const std::lock_guard lock(mutex);
    if (const auto known = programs.find(key); known != programs.end()) return known->second;
  }
  auto program = build_and_load(source, options, is_counted);
  const std::lock_guard lock(mutex);
  return programs.emplace(key, program).first->second;
}

}  // namespace

void set_engine_directory(std::string directory) { directory_setting() = std::move(directory); }
std::string engine_directory() { return directory_setting(); }

std::shared_ptr<const Program> compile(const std::string& source, const CompileOptions& options) {
  return compile_one(source, options, false);
}

}  // namespace simulator
