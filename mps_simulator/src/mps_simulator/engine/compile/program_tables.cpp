#include "program_tables.h"

namespace simulator {
namespace {

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c;
  }
  return result + "\"";
}

const char* truth(bool value) { return value ? "true" : "false"; }

// An exported array and its length. The array ends with an empty element, because C++ has no empty arrays.
struct Table {
  std::string type, name;
  std::string rows = "";
  size_t count = 0;

  void add(const std::string& row) {
    rows += "{" + row + "}, ";
    ++count;
  }
  std::string text() const {
    return "extern \"C\" __global const " + type + " " + name + "s[] = {" + rows + "{}};\n" +
           "extern \"C\" __global const uint32_t " + name + "_count = " + std::to_string(count) + ";\n";
  }
};

class Tables {
 public:
  void add(const Entry& entry) {
    const std::string number = std::to_string(entry.number);
    add_parameters(entry);
    for (size_t constant : entry.kernel->required_constants) {
      requirements_.add(number + ", " + std::to_string(constant));
    }
    const std::string limit = entry.kernel->max_threads.empty() ? "0" : entry.scope + "::simulator_limit_" + number;
    kernels_.add(name_of(entry.host_name) + ", simulator_parameters_" + number + ", " +
                 std::to_string(entry.kernel->parameters.size()) + ", " + limit + ", " + entry.scope +
                 "::simulator_run_" + number);
  }

  void add(const FunctionConstant& constant) {
    const std::string value = constant.scope + "::simulator_value_" + constant.name;
    constants_.add(name_of(constant.name) + ", " + std::to_string(constant.index) + ", sizeof(" + value +
                   "), (void*)&" + value + ", &" + constant.scope + "::simulator_defined_" + constant.name);
  }

  std::string text() const {
    return names_ + parameters_ + kernels_.text() + constants_.text() + gates_.text() + requirements_.text();
  }

 private:
  void add_parameters(const Entry& entry) {
    static const char* const kinds[] = {"simulator_buffer", "simulator_threadgroup_memory", "simulator_builtin"};
    const std::string number = std::to_string(entry.number);
    std::string rows;
    for (size_t i = 0; i < entry.kernel->parameters.size(); ++i) {
      const KernelParameter& p = entry.kernel->parameters[i];
      const std::string position = std::to_string(i);
      const std::string layout = "simulator::layout_of<simulator::signature<" + entry.scope + "::simulator_signature_" +
                                 number + ">::parameter<" + position + ">>";
      rows += "{" + name_of(p.name) + ", " + kinds[p.kind] + ", " + std::to_string(p.index) + ", " + layout +
              "::size, " + layout + "::alignment, " + truth(p.is_constant) + ", " + truth(p.is_const) + ", " +
              truth(p.is_reference) + ", " + truth(p.gate.empty()) + "}, ";
      if (!p.gate.empty()) {
        gates_.add(number + ", " + position + ", " + entry.scope + "::simulator_gate_" + number + "_" + position);
      }
    }
    parameters_ +=
        "static __global const simulator_parameter simulator_parameters_" + number + "[] = {" + rows + "{}};\n";
  }

  std::string name_of(const std::string& text) {
    const std::string symbol = "simulator_name_" + std::to_string(name_count_++);
    names_ += "static __global const char " + symbol + "[] = " + quoted(text) + ";\n";
    return symbol;
  }

  std::string names_, parameters_;
  size_t name_count_ = 0;
  Table kernels_{"simulator_kernel", "simulator_kernel"};
  Table constants_{"simulator_function_constant", "simulator_function_constant"};
  Table gates_{"simulator::gate", "simulator_gate"};
  Table requirements_{"simulator::requirement", "simulator_requirement"};
};

}  // namespace

std::string program_tables(const std::vector<Entry>& entries, const std::vector<FunctionConstant>& constants,
                           const std::vector<std::string>& initialisers) {
  Tables tables;
  for (const Entry& entry : entries) tables.add(entry);
  for (const FunctionConstant& constant : constants) tables.add(constant);
  std::string calls;
  for (const std::string& initialiser : initialisers) calls += initialiser + "(); ";
  return "\n# 1 \"program tables\"\n" + tables.text() +
         "extern \"C\" SIMULATOR_ENTRY void simulator_constants_changed() { " + calls + "}\n";
}

}  // namespace simulator
