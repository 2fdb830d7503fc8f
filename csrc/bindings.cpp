// torch_gdn._C: what is not an op. The only file that includes Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "metal/launch.h"
#include "metal/prefill.h"

namespace py = pybind11;

namespace {

// The launcher has locks of its own, which another thread may hold while it waits for Python.
template <typename F>
auto without_gil(const F& f) {
  const py::gil_scoped_release released;
  return f();
}

py::dict pipeline_facts(const torch_gdn::PipelineFacts& facts) {
  py::dict result;
  result["name"] = facts.name;
  result["warnings"] = facts.warnings;
  result["compile_seconds"] = facts.compile_seconds;
  result["max_total_threads_per_threadgroup"] = facts.max_total_threads_per_threadgroup;
  result["thread_execution_width"] = facts.thread_execution_width;
  result["static_threadgroup_memory_length"] = facts.static_threadgroup_memory_length;
  return result;
}

py::dict compile(std::string kernel, std::string file, std::vector<std::string> arguments) {
  const torch_gdn::Launch launch{std::move(kernel), std::move(file), std::move(arguments), {}, {}, 0};
  return pipeline_facts(without_gil([&] { return torch_gdn::launcher().compile(launch); }));
}

py::list pipelines() {
  const auto compiled = without_gil([] { return torch_gdn::launcher().pipelines(); });
  py::list result;
  for (const auto& facts : compiled) result.append(pipeline_facts(facts));
  return result;
}

py::dict device_facts() {
  const auto facts = without_gil([] { return torch_gdn::launcher().device(); });
  py::dict result;
  result["name"] = facts.name;
  result["core_count"] = facts.core_count;
  result["max_threadgroup_memory_length"] = facts.max_threadgroup_memory_length;
  result["max_buffer_length"] = facts.max_buffer_length;
  result["recommended_max_working_set_size"] = facts.recommended_max_working_set_size;
  return result;
}

torch_gdn::PrefillWay way_named(const std::string& name) {
  const auto way = torch_gdn::prefill_way_of(name);
  if (way.has_value()) return *way;
  std::string known;
  for (const auto& each : torch_gdn::prefill_way_names()) known += (known.empty() ? "'" : ", '") + each + "'";
  throw py::value_error("prefill_way: way: expected one of " + known + " or None, got '" + name + "'");
}

torch_gdn::PrefillChoice choice_of(const std::string& way, int64_t chunk_size) {
  const torch_gdn::PrefillChoice choice{way_named(way), chunk_size};
  const bool is_fused = choice.way == torch_gdn::PrefillWay::kFused;
  if (chunk_size != 0 && !(is_fused && (chunk_size == 8 || chunk_size == 16 || chunk_size == 32))) {
    throw py::value_error("prefill_way: chunk_size: expected 8, 16 or 32 with 'fused', or none, got " +
                          std::to_string(chunk_size) + " with '" + way + "'");
  }
  return choice;
}

py::tuple named(const torch_gdn::PrefillChoice& choice) {
  return py::make_tuple(torch_gdn::name_of(choice.way), choice.chunk_size);
}

void force_prefill_way(const std::optional<std::string>& way, int64_t chunk_size) {
  torch_gdn::force_prefill_way(way.has_value() ? std::optional(choice_of(*way, chunk_size)) : std::nullopt);
}

py::object forced_prefill_way() {
  const auto choice = torch_gdn::forced_prefill_way();
  return choice.has_value() ? py::object(named(*choice)) : py::none();
}

using Rows = std::vector<std::tuple<int64_t, int64_t, int64_t, std::string, int64_t>>;

void set_prefill_table(const std::map<std::string, Rows>& table) {
  std::map<std::string, std::vector<torch_gdn::PrefillRow>> result;
  for (const auto& [device, rows] : table) {
    for (const auto& [tokens, threadgroups, K, way, chunk_size] : rows) {
      result[device].push_back({tokens, threadgroups, K, choice_of(way, chunk_size)});
    }
  }
  torch_gdn::set_prefill_table(std::move(result));
}

py::tuple prefill_way(int64_t tokens, int64_t heads, int64_t K, int64_t V, const std::string& device, int64_t cores) {
  return named(torch_gdn::prefill_way({tokens, heads, K, V}, device, cores));
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "What torch_gdn's Metal half knows about itself. The ops are torch.ops.gdn.*.";
  m.def("has_launcher", &torch_gdn::has_launcher, "Whether kernels can be run on an mps device in this process.");
  m.def("compile", &compile, py::arg("kernel"), py::arg("file"), py::arg("arguments"),
        "Compiles one specialisation, if it is not, without running it: the template, its file below the shader "
        "directory, its arguments as Metal spells them. Returns a dict as those of pipelines().");
  m.def("pipelines", &pipelines,
        "The pipelines compiled so far: a list of dicts with name, warnings, compile_seconds, "
        "max_total_threads_per_threadgroup, thread_execution_width and static_threadgroup_memory_length.");
  m.def(
      "clear_pipelines", [] { without_gil([] { torch_gdn::launcher().clear_pipelines(); }); },
      "Forgets every compiled pipeline; the next call of an op compiles its own again.");
  m.def("device_facts", &device_facts,
        "The mps device: name, core_count, max_threadgroup_memory_length, max_buffer_length and "
        "recommended_max_working_set_size.");
  m.def("prefill_way_names", &torch_gdn::prefill_way_names, "The ways in which Metal can go through a prompt.");
  m.def("prefill_way", &prefill_way, py::arg("tokens"), py::arg("heads"), py::arg("K"), py::arg("V"), py::arg("device"),
        py::arg("cores"),
        "The way of a prefill, and its chunk_size: of so many tokens a sequence, on average, and value heads of all "
        "sequences, on the "
        "device with this name and so many cores.");
  m.def("set_prefill_table", &set_prefill_table, py::arg("table"),
        "Which way was the fastest: {device's name: [(tokens, threadgroups of 32 columns of V, K, way, chunk_size), "
        "...]}.");
  m.def("force_prefill_way", &force_prefill_way, py::arg("way"), py::arg("chunk_size") = 0,
        "Makes every prefill take this way, until another is forced; None: the table decides again. chunk_size: of the "
        "fused way, where it has room; 0: its own choice.");
  m.def("forced_prefill_way", &forced_prefill_way, "The way that is forced and its chunk_size, or None.");
  m.def("fused_chunk_size", &torch_gdn::fused_chunk_size, py::arg("K"), py::arg("element_bytes"), py::arg("wanted") = 0,
        "Tokens of a chunk of the fused way.");
  m.def("set_shader_directory", &torch_gdn::set_shader_directory, py::arg("directory"),
        "Where the shader sources lie; torch_gdn sets it when it is imported.");
  m.def("shader_directory", [] { return torch_gdn::shader_directory(); }, "Where the shader sources are looked for.");
}
