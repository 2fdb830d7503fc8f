// Defines torch_gdn._C, which has everything except the ops. Only this file includes Python.
#include <ATen/Parallel.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <algorithm>
#include <set>

#include "build/version.h"  // from setup.py
#include "launch/launch.h"
#include "launch/prefill.h"
#include "launch/recorder.h"
#include "launch/self_test.h"
#include "ops/collectives.h"
#include "ops/op.h"

namespace py = pybind11;
using py::literals::operator""_a;

namespace {

// Releases the GIL, because another thread may hold a lock of the launcher while it waits for Python.
template <typename F>
auto without_gil(const F& f) {
  const py::gil_scoped_release released;
  return f();
}

py::dict pipeline_facts(const torch_gdn::PipelineFacts& facts) {
  return py::dict("name"_a = facts.name, "warnings"_a = facts.warnings, "compile_seconds"_a = facts.compile_seconds,
                  "max_total_threads_per_threadgroup"_a = facts.max_total_threads_per_threadgroup,
                  "thread_execution_width"_a = facts.thread_execution_width,
                  "static_threadgroup_memory_length"_a = facts.static_threadgroup_memory_length);
}

using Strings = std::vector<std::string>;

std::string shader_source(std::string kernel, std::string file, Strings arguments) {
  return torch_gdn::shader_source(torch_gdn::Variant{std::move(kernel), std::move(file), std::move(arguments)});
}

py::dict compile(std::string kernel, std::string file, Strings arguments) {
  const torch_gdn::Variant variant{std::move(kernel), std::move(file), std::move(arguments)};
  return pipeline_facts(without_gil([&] { return torch_gdn::launcher().compile(variant); }).front());
}

void compile_file(const std::string& file, const std::vector<std::pair<std::string, Strings>>& variants) {
  std::vector<torch_gdn::Variant> wanted;
  for (const auto& [kernel, arguments] : variants) wanted.push_back({kernel, file, arguments});
  if (!wanted.empty()) without_gil([&] { return torch_gdn::launcher().compile(wanted); });
}

py::list pipelines() {
  const auto compiled = without_gil([] { return torch_gdn::launcher().pipelines(); });
  py::list result;
  for (const auto& facts : compiled) result.append(pipeline_facts(facts));
  return result;
}

template <typename AnyLaunch>
py::dict launch_row(const torch_gdn::Variant& variant, const AnyLaunch& launch, py::object bindings) {
  return py::dict("kernel"_a = variant.kernel, "file"_a = variant.file, "arguments"_a = variant.arguments,
                  "bindings"_a = std::move(bindings), "threadgroups"_a = launch.threadgroups,
                  "threads"_a = launch.threads);
}

py::list recorded(const torch_gdn::Recorder& recorder) {
  py::list result;
  for (const auto& launch : recorder.launches()) {
    auto row = launch_row(launch.variant, launch, py::int_(launch.bindings));
    row["overlaps"] = launch.overlaps;
    result.append(std::move(row));
  }
  return result;
}

// Reads one binding. It is a tensor, None for an absent tensor, the bytes of a parameter block or of a host array, or
// "errors" for the error log.
py::object bound_object(const torch_gdn::Bindings& bindings, const torch_gdn::Binding& binding) {
  using Kind = torch_gdn::Binding::Kind;
  switch (binding.kind) {
    case Kind::kAbsent:
      return py::none();
    case Kind::kTensor:
      return py::cast(binding.tensor);
    case Kind::kHostArray:
      return py::bytes(static_cast<const char*>(binding.tensor.const_data_ptr()), binding.tensor.nbytes());
    case Kind::kParameterBlock:
      return py::bytes(reinterpret_cast<const char*>(bindings.block()), bindings.block_bytes());
    case Kind::kErrorLog:
      break;
  }
  return py::str("errors");
}

torch_gdn::Binding binding_of(const py::object& object, std::vector<std::byte>& block) {
  using Kind = torch_gdn::Binding::Kind;
  if (object.is_none()) return torch_gdn::Binding(Kind::kAbsent);
  if (py::isinstance<py::bytes>(object)) {
    const auto bytes = object.cast<std::string_view>();
    if (!block.empty() || bytes.empty()) throw py::value_error("launch: bindings: expected at most one block of bytes");
    const auto* first = reinterpret_cast<const std::byte*>(bytes.data());
    block.assign(first, first + bytes.size());
    return torch_gdn::Binding(Kind::kParameterBlock);
  }
  if (py::isinstance<py::str>(object) && object.cast<std::string_view>() == "errors") {
    return torch_gdn::Binding::error_log();
  }
  const auto tensor = object.cast<at::Tensor>();
  if (!tensor.is_mps())
    throw py::value_error("launch: bindings: expected tensors on mps, got " + tensor.device().str());
  return torch_gdn::Binding(tensor);
}

// Keeps names alive, because a launch holds pointers to their characters.
const char* kept(const std::string& name) {
  static auto* names = new std::set<std::string>;
  return names->insert(name).first->c_str();
}

void launch(const std::string& kernel, const std::string& file, const Strings& arguments, const py::list& bindings,
            std::array<size_t, 3> threadgroups, size_t threads) {
  torch_gdn::TemplateArguments template_arguments;
  if (arguments.size() > template_arguments.size())
    throw py::value_error("launch: arguments: expected at most 8 template arguments");
  std::transform(arguments.begin(), arguments.end(), template_arguments.begin(),
                 &torch_gdn::TemplateArgument::spelled_as);
  std::vector<std::byte> block;
  std::vector<torch_gdn::Binding> bound;
  for (const auto& each : bindings) bound.push_back(binding_of(py::reinterpret_borrow<py::object>(each), block));
  const auto [x, y, z] = threadgroups;
  const torch_gdn::Launch launch{
      kept(kernel),     template_arguments, torch_gdn::Bindings::of(bound, block), {int64_t(x), int64_t(y), int64_t(z)},
      int64_t(threads), kept(file)};
  without_gil([&] { torch_gdn::launcher().run(launch); });
}

// The last owner of a function may be a thread without the GIL, or one that outlives Python, whose objects are gone.
std::shared_ptr<py::function> shared(const py::function& function) {
  return {new py::function(function), [](py::function* owned) {
            if (Py_IsInitialized() == 0) return;
            const py::gil_scoped_acquire held;
            delete owned;
          }};
}

torch_gdn::Tracer::Callback tracing_callback(const py::function& function) {
  return [function = shared(function)](const torch_gdn::Launch& launch) {
    const py::gil_scoped_acquire held;
    py::list bindings;
    for (const auto& binding : launch.bindings) bindings.append(bound_object(launch.bindings, binding));
    (*function)(launch_row(launch.variant(), launch, std::move(bindings)));
  };
}

// pybind11 gets classes of this file alone, because g++ warns about the visibility of others.
class Trusted : public torch_gdn::Trusted {
 public:
  Trusted() : torch_gdn::Trusted(torch_gdn::Trust()) {}
};

class Recording {
 public:
  void start() { recording_.start(); }
  py::list stop() {
    recording_.end();
    return recorded(*recorder_);
  }

 private:
  std::shared_ptr<torch_gdn::Recorder> recorder_ = std::make_shared<torch_gdn::Recorder>();
  torch_gdn::Recording recording_{recorder_};
};

class Tracing : public torch_gdn::Recording {
 public:
  Tracing(const py::function& before, const py::function& after, bool runs)
      : torch_gdn::Recording(
            std::make_shared<torch_gdn::Tracer>(tracing_callback(before), tracing_callback(after), runs)) {}
};

py::dict device_facts() {
  const auto facts = without_gil([] { return torch_gdn::launcher().device(); });
  return py::dict("name"_a = facts.name, "core_count"_a = facts.core_count,
                  "max_threadgroup_memory_length"_a = facts.max_threadgroup_memory_length,
                  "max_buffer_length"_a = facts.max_buffer_length,
                  "recommended_max_working_set_size"_a = facts.recommended_max_working_set_size,
                  "registry_id"_a = facts.registry_id, "families"_a = facts.families);
}

torch_gdn::PrefillAlgorithm algorithm_named(const std::string& name) {
  const auto algorithm = torch_gdn::prefill_algorithm_of(name);
  if (algorithm.has_value()) return *algorithm;
  std::string known;
  for (const auto& each : torch_gdn::prefill_algorithms()) known += (known.empty() ? "'" : ", '") + each + "'";
  throw py::value_error("prefill_algorithm: algorithm: expected one of " + known + " or None, got '" + name + "'");
}

torch_gdn::PrefillChoice choice_of(const std::string& algorithm, int64_t chunk_size) {
  const torch_gdn::PrefillChoice choice{algorithm_named(algorithm), chunk_size};
  const bool is_fused = choice.algorithm == torch_gdn::PrefillAlgorithm::kFusedChunk;
  if (chunk_size != 0 && !(is_fused && (chunk_size == 8 || chunk_size == 16 || chunk_size == 32))) {
    throw py::value_error("prefill_algorithm: chunk_size: expected 8, 16 or 32 with 'fused_chunk', or 0, got " +
                          std::to_string(chunk_size) + " with '" + algorithm + "'");
  }
  return choice;
}

py::tuple named(const torch_gdn::PrefillChoice& choice) {
  return py::make_tuple(torch_gdn::name_of(choice.algorithm), choice.chunk_size);
}

class ForcedPrefill : public torch_gdn::ForcedPrefill {
 public:
  ForcedPrefill(const std::optional<std::string>& algorithm, int64_t chunk_size)
      : torch_gdn::ForcedPrefill(algorithm.has_value() ? std::optional(choice_of(*algorithm, chunk_size))
                                                       : std::nullopt) {}
};

py::object forced_prefill_algorithm() {
  const auto choice = torch_gdn::forced_prefill_algorithm();
  return choice.has_value() ? py::object(named(*choice)) : py::none();
}

template <typename Setting>
py::class_<Setting> block(py::module_& m, const char* name, const char* documentation) {
  const auto end = [](Setting& open, const py::args&) { open.end(); };
  return py::class_<Setting>(m, name, documentation)
      .def("start", &Setting::start)
      .def("stop", &Setting::end)
      .def("__enter__", &Setting::start)
      .def("__exit__", end);
}

using Rows = std::vector<std::tuple<int64_t, int64_t, int64_t, bool, std::string, int64_t>>;

void set_tuning_cache(const std::map<std::string, Rows>& table) {
  std::map<std::string, std::vector<torch_gdn::TuningRow>> result;
  for (const auto& [device, rows] : table) {
    for (const auto& [tokens, threadgroups, K, channel_decays, algorithm, chunk_size] : rows) {
      result[device].push_back({tokens, threadgroups, K, channel_decays, choice_of(algorithm, chunk_size)});
    }
  }
  torch_gdn::set_tuning_cache(std::move(result));
}

py::tuple prefill_algorithm(int64_t tokens, int64_t heads, int64_t K, int64_t V, const std::string& device,
                            int64_t cores, bool channel_decays) {
  return named(torch_gdn::prefill_algorithm({tokens, heads, K, V, channel_decays}, device, cores));
}

void exclude_prefill_algorithms(const Strings& algorithms, bool channel_decays) {
  std::vector<torch_gdn::PrefillAlgorithm> excluded;
  for (const auto& each : algorithms) excluded.push_back(algorithm_named(each));
  torch_gdn::exclude_prefill_algorithms(channel_decays, excluded);
}

// PyTorch's headers define parallel_for inline. Without the OpenMP flag it is a plain loop.
int64_t cpu_threads() {
#ifdef INTRA_OP_PARALLEL
  return at::get_num_threads();
#else
  return 1;
#endif
}

std::vector<std::string> ops() { return {torch_gdn::op_names().begin(), torch_gdn::op_names().end()}; }

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Reports and controls torch_gdn's Metal half. The ops are torch.ops.gdn.*.";
  m.attr("version") = TORCH_GDN_VERSION;
  m.attr("built_with_torch") = TORCH_VERSION;
  m.attr("built_with_compiler") = __VERSION__;
#ifdef __MAC_OS_X_VERSION_MAX_ALLOWED
  m.attr("built_with_sdk") = __MAC_OS_X_VERSION_MAX_ALLOWED;
#else
  m.attr("built_with_sdk") = py::none();
#endif
  m.def("ops", &ops, "Returns the names of the ops in torch.ops.gdn.");
  m.def("define_collective", &torch_gdn::define_collective, "name"_a,
        "Defines gdn_c10d::<name>: c10d's collective, with tensors that gloo's thread may release without Python.");
  m.def("define_work", &torch_gdn::define_work,
        "Defines gdn_c10d::notify and set_error, for the work of a collective.");
  m.def("cpu_threads", &cpu_threads, "Returns the number of threads that the ops use on the CPU.");
  m.def("has_launcher", &torch_gdn::has_launcher, "Returns whether this process can run kernels on an mps device.");
  m.def("is_recording", &torch_gdn::is_recording, "Returns whether this thread records launches.");
  m.def(
      "compile", &compile, "kernel"_a, "file"_a, "arguments"_a,
      "Compiles one kernel variant, unless it is compiled already, and does not run it. Takes the template, its file "
      "below the shader directory, and its arguments as Metal spells them. Returns a dict like those of pipelines().");
  m.def("compile_file", &compile_file, "file"_a, "variants"_a,
        "Compiles several kernel variants of a file, pairs of kernel and arguments, from one source. Skips those that "
        "are compiled already. If some fail, it still compiles the others, then raises the first error.");
  m.def("launch", &launch, "kernel"_a, "file"_a, "arguments"_a, "bindings"_a, "threadgroups"_a, "threads"_a,
        "Encodes one launch of a kernel in the shader directory. Bindings are mps tensors, None for an absent one, one "
        "block of bytes, and 'errors' for the error log; threads counts the threads of one threadgroup. It checks the "
        "number of bindings and bytes, and nothing else: you answer for what the kernel does with them.");
  m.def("pipelines", &pipelines,
        "Returns the pipelines compiled so far: a list of dicts with name, warnings, compile_seconds, "
        "max_total_threads_per_threadgroup, thread_execution_width and static_threadgroup_memory_length.");
  m.def(
      "clear_pipelines", [] { without_gil([] { torch_gdn::launcher().clear_pipelines(); }); },
      "Drops every compiled pipeline. The next call of an op compiles its pipeline again.");
  m.def("device_facts", &device_facts,
        "Describes the mps device: name, core_count, max_threadgroup_memory_length, max_buffer_length, "
        "recommended_max_working_set_size, registry_id and families, a list of the GPU families that it supports.");
  m.def(
      "wait_and_time", [] { return without_gil([] { return torch_gdn::launcher().wait_and_time(); }); },
      "Waits for everything that was encoded on PyTorch's stream. Returns the seconds that the GPU worked on the "
      "command buffer in progress, by the GPU's own clock: GPUEndTime less GPUStartTime.");
  // These blocks end as Block does: on any thread, with effect on the thread that started them.
  py::class_<Recording>(m, "Recording", "Records the launches of the thread that starts it instead of running them.")
      .def(py::init<>())
      .def("start", &Recording::start)
      .def("stop", &Recording::stop,
           "Returns the launches since start(): a list of dicts with kernel, file, arguments, bindings (how many), "
           "overlaps (pairs of bindings that share bytes), threadgroups and threads (per threadgroup).");
  block<Trusted>(m, "Trusted", "Keeps the self-test from the launches of the thread that starts it.").def(py::init<>());
  m.def(
      "set_self_test", &torch_gdn::set_self_test, "is_on"_a,
      "Says whether the op gdn_self_test::<name> takes an op's calls that first launch a kernel variant. Forgets what "
      "set_tested() was told.");
  m.def("set_tested", &torch_gdn::set_tested, "names"_a, "passed"_a,
        "Lets ops launch kernel variants, named 'op variant', without a self-test. If they have not passed, it takes "
        "each call that would launch them, even in a recording.");
  block<Tracing>(m, "Tracing",
                 "Calls before(launch) and after(launch) around each launch of the thread that starts it.")
      .def(py::init<const py::function&, const py::function&, bool>(), "before"_a, "after"_a, "runs"_a);
  block<ForcedPrefill>(m, "ForcedPrefill",
                       "Forces this algorithm on every prefill of the thread that starts it. None lets the tuning "
                       "cache or the heuristic decide again. chunk_size applies to fused_chunk, if it fits threadgroup "
                       "memory; fused_chunk_size() chooses it if you pass 0.")
      .def(py::init<const std::optional<std::string>&, int64_t>(), "algorithm"_a, "chunk_size"_a = 0);
  m.def("shader_source", &shader_source, "kernel"_a, "file"_a, "arguments"_a,
        "Returns the Metal source of a kernel variant.");
  m.def("prefill_algorithms", &torch_gdn::prefill_algorithms, "Returns the names of the prefill algorithms on Metal.");
  m.def("prefill_algorithm", &prefill_algorithm, "tokens"_a, "heads"_a, "K"_a, "V"_a, "device"_a, "cores"_a,
        "channel_decays"_a = false,
        "Returns the algorithm and chunk_size for a prefill. tokens is the mean length of the sequences, heads their "
        "value heads in total; device and cores are the GPU's name and number of cores; channel_decays says whether "
        "each key channel has its own decay.");
  m.def("tuning_key", &torch_gdn::tuning_key, "device"_a, "cores"_a,
        "Returns the name that a device's rows have in the tuning cache.");
  m.def("set_tuning_cache", &set_tuning_cache, "table"_a,
        "Sets the fastest algorithms: {tuning_key(): [(tokens, threadgroups of 32 columns of V, K, channel_decays, "
        "algorithm, chunk_size), ...]}.");
  m.def("forced_prefill_algorithm", &forced_prefill_algorithm,
        "Returns the algorithm forced in the calling thread and its chunk_size, or None.");
  m.def("exclude_prefill_algorithms", &exclude_prefill_algorithms, "algorithms"_a, "channel_decays"_a,
        "Keeps every later prefill of the rule from running these, even if forced. fused_chunk takes their place, else "
        "chunked, else recurrent. channel_decays names the rule: whether each key channel has its own decay.");
  m.def("fused_chunk_size", &torch_gdn::fused_chunk_size, "K"_a, "element_bytes"_a, "wanted"_a = 0,
        "Returns the number of tokens per chunk of fused_chunk.");
  m.def("set_shader_directory", &torch_gdn::set_shader_directory, "directory"_a,
        "Sets the folder of the shader sources. Importing torch_gdn calls it.");
  m.def("shader_directory", [] { return torch_gdn::shader_directory(); }, "Returns the folder of the shader sources.");
}
