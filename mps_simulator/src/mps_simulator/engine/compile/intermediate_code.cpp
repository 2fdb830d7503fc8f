// Reads LLVM's intermediate code as text, one instruction per line.
#include "intermediate_code.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstring>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "mps_simulator/engine/count/operation_kinds.h"

namespace simulator {
namespace {

using Lines = std::vector<std::string>;

Lines lines_of(const std::string& text) {
  Lines lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(std::move(line));
  return lines;
}

bool is_name_letter(char c) { return std::isalnum(static_cast<unsigned char>(c)) || std::strchr("-$._", c); }

// The parts of an instruction such as "%12 = fadd contract <4 x float> %3, %4".
struct Instruction {
  std::string result, opcode, type, callee;
  std::vector<std::string> values;  // the names of its operands
  bool is_contracted = false;

  explicit Instruction(const std::string& line);
  bool is_double() const { return type.ends_with("double") || type.ends_with("double>"); }
  bool is_float() const {
    return type.ends_with("float") || type.ends_with("half") || type.ends_with("float>") || type.ends_with("half>");
  }
  // Returns the number of scalars, which is four for <4 x float>.
  uint32_t width() const {
    uint32_t count = 1;
    if (type.starts_with('<')) std::from_chars(type.data() + 1, type.data() + type.size(), count);
    return count;
  }
};

std::string name_at(const std::string& line, size_t at) {
  size_t end = at + 1;
  while (end < line.size() && is_name_letter(line[end])) ++end;
  return line.substr(at, end - at);
}

Instruction::Instruction(const std::string& line) {
  size_t at = line.find_first_not_of(' ');
  if (at == std::string::npos) return;
  if (line[at] == '%') {
    result = name_at(line, at);
    at = line.find("= ", at);
    if (at == std::string::npos) return;
    at += 2;
  }
  for (size_t percent = line.find('%', at); percent != std::string::npos; percent = line.find('%', percent + 1)) {
    values.push_back(name_at(line, percent));
  }
  static const std::set<std::string_view> flags = {"tail",    "musttail", "notail",  "contract", "fast",     "nnan",
                                                   "ninf",    "nsz",      "arcp",    "afn",      "reassoc",  "nuw",
                                                   "nsw",     "exact",    "nneg",    "disjoint", "samesign", "inbounds",
                                                   "noundef", "signext",  "zeroext", "nofpclass"};
  std::istringstream words(line.substr(at));
  std::string word;
  while (words >> word) {
    is_contracted |= word == "contract" || word == "fast";
    if (flags.contains(word)) continue;
    if (opcode.empty()) {
      opcode = word;
      continue;
    }
    if (opcode == "fcmp" || opcode == "icmp") words >> word;  // skips the predicate
    if (flags.contains(word)) words >> word;
    type = word;
    for (std::string rest; word.starts_with('<') && !type.ends_with('>') && words >> rest;) type += " " + rest;
    break;
  }
  if (opcode != "call") return;
  const size_t callee_at = line.find('@');
  if (callee_at != std::string::npos) callee = name_at(line, callee_at).substr(1);
}

// Maps both llvm.exp2.f64 and exp2 to exp2.
std::string function_name(const std::string& callee) {
  if (!callee.starts_with("llvm.")) return callee;
  return callee.substr(5, callee.find('.', 5) - 5);
}

typedef std::unordered_map<std::string_view, OperationKind> Kinds;

// For doubles, the list has only the functions that the simulator computes in double for a float.
const Kinds& functions_of_any_type() {
  static const Kinds kinds = {
      {"exp", operation_exp},    {"exp2", operation_exp},    {"exp10", operation_exp},   {"log", operation_log},
      {"log2", operation_log},   {"log10", operation_log},   {"sqrt", operation_sqrt},   {"sin", operation_other},
      {"cos", operation_other},  {"tan", operation_other},   {"asin", operation_other},  {"acos", operation_other},
      {"atan", operation_other}, {"atan2", operation_other}, {"sinh", operation_other},  {"cosh", operation_other},
      {"tanh", operation_other}, {"asinh", operation_other}, {"acosh", operation_other}, {"atanh", operation_other},
      {"pow", operation_other},  {"fmod", operation_other}};
  return kinds;
}

const Kinds& functions() {
  static const Kinds kinds = {
      {"fma", operation_fma},       {"fmuladd", operation_fma},  {"maxnum", operation_minmax},
      {"minnum", operation_minmax}, {"floor", operation_round},  {"ceil", operation_round},
      {"trunc", operation_round},   {"rint", operation_round},   {"round", operation_round},
      {"ldexp", operation_other},   {"smax", operation_integer}, {"smin", operation_integer},
      {"umax", operation_integer},  {"umin", operation_integer}, {"abs", operation_integer},
      {"ctpop", operation_integer}, {"ctlz", operation_integer}, {"cttz", operation_integer},
      {"fshl", operation_integer},  {"fshr", operation_integer}, {"bitreverse", operation_integer}};
  return kinds;
}

const Kinds& instructions() {
  static const Kinds kinds = {
      {"fadd", operation_add},       {"fsub", operation_add},        {"fmul", operation_mul},
      {"fdiv", operation_div},       {"fptrunc", operation_convert}, {"fpext", operation_convert},
      {"sitofp", operation_convert}, {"uitofp", operation_convert},  {"fptosi", operation_convert},
      {"fptoui", operation_convert}, {"fcmp", operation_compare},    {"icmp", operation_compare},
      {"select", operation_select},  {"add", operation_integer},     {"sub", operation_integer},
      {"mul", operation_integer},    {"shl", operation_integer},     {"lshr", operation_integer},
      {"ashr", operation_integer},   {"and", operation_integer},     {"or", operation_integer},
      {"xor", operation_integer},    {"sdiv", operation_integer},    {"udiv", operation_integer},
      {"srem", operation_integer},   {"urem", operation_integer}};
  return kinds;
}

class BlockCount {
 public:
  explicit BlockCount(const std::unordered_map<std::string, uint32_t>& uses) : uses_(uses) {}

  void add(const Instruction& instruction, const std::string& line) {
    const std::string& opcode = instruction.opcode;
    const std::string name = opcode == "call" ? function_name(instruction.callee) : opcode;
    const Kinds& any = functions_of_any_type();
    if (opcode == "call" && any.contains(name)) {
      count(any.at(name), instruction);
      if (name == "sqrt" && instruction.is_double()) roots_.insert(instruction.result);
    } else if (line.find("double") != std::string::npos) {
      const bool is_of_root =
          opcode == "fdiv" && instruction.values.size() == 1 && roots_.contains(instruction.values[0]);
      if (is_of_root) move(operation_sqrt, operation_rsqrt);
    } else if (opcode == "call") {
      if (functions().contains(name)) count(functions().at(name), instruction);
    } else if (instructions().contains(name)) {
      count(instructions().at(name), instruction);
      if (instruction.is_contracted) contract(instruction);
    }
  }
  const BlockOperations& counts() const { return counts_; }

 private:
  void count(OperationKind kind, const Instruction& instruction) { counts_[kind] += instruction.width(); }
  void move(OperationKind from, OperationKind to, uint32_t width = 1) {
    counts_[from] -= width;
    counts_[to] += width;
  }
  // Makes a product part of a sum if nothing else uses the product.
  void contract(const Instruction& instruction) {
    if (instruction.opcode == "fmul" && uses_.at(instruction.result) == 1) products_.insert(instruction.result);
    if (instruction.opcode != "fadd" && instruction.opcode != "fsub") return;
    for (const std::string& value : instruction.values) {
      if (products_.erase(value) == 0) continue;
      move(operation_mul, operation_fma, instruction.width());
      counts_[operation_add] -= instruction.width();
      return;
    }
  }

  const std::unordered_map<std::string, uint32_t>& uses_;
  std::set<std::string> products_, roots_;
  BlockOperations counts_{};
};

class ShaderFunction {
 public:
  ShaderFunction(Lines::const_iterator begin, Lines::const_iterator end) : begin_(begin), end_(end) {
    for (auto line = begin + 1; line != end; ++line) {
      const Instruction instruction(*line);
      if (!instruction.result.empty()) uses_.try_emplace(instruction.result, 0);
      for (const std::string& value : instruction.values) ++uses_[value];
    }
  }

  // Appends the function with its added calls to `text`, and the blocks' operations to `table`.
  void count(std::string& text, std::vector<BlockOperations>& table) const {
    text += *begin_ + '\n';
    auto line = begin_ + 1;
    while (line != end_) {
      while (line != end_ && (is_label(*line) || line->empty() || line->find(" = phi ") != std::string::npos))
        text += *line++ + '\n';
      text += "  call void @simulator_enter_block(i32 " + std::to_string(table.size()) + ")\n";
      BlockCount block(uses_);
      for (; line != end_ && !is_label(*line); ++line) {
        block.add(Instruction(*line), *line);
        text += *line + '\n';
      }
      table.push_back(block.counts());
    }
  }

 private:
  static bool is_label(const std::string& line) {
    return !line.empty() && line[0] != ' ' && line.find(':') != std::string::npos;
  }

  Lines::const_iterator begin_, end_;
  std::unordered_map<std::string, uint32_t> uses_;
};

// Finds "#12" in "attributes #12 = { ... sanitize_thread ... }". Only the shader's own functions have such attributes.
std::set<std::string> attributes_of_shaders(const Lines& lines) {
  std::set<std::string> names;
  for (const std::string& line : lines) {
    if (!line.starts_with("attributes #") || line.find(" sanitize_thread") == std::string::npos) continue;
    names.insert(line.substr(11, line.find(' ', 11) - 11));
  }
  return names;
}

bool is_of_shader(const std::string& definition, const std::set<std::string>& attributes) {
  const size_t at = definition.rfind(" #");
  return at != std::string::npos &&
         attributes.contains(definition.substr(at + 1, definition.find(' ', at + 1) - at - 1));
}

std::string table_text(const std::vector<BlockOperations>& table) {
  const std::string row_type = "[" + std::to_string(kOperationKinds) + " x i32]";
  std::string text = "@simulator_block_count = constant i32 " + std::to_string(table.size()) +
                     "\n@simulator_blocks = constant [" + std::to_string(table.size()) + " x " + row_type + "] [";
  for (size_t i = 0; i < table.size(); ++i) {
    text += (i > 0 ? ", " : "") + row_type + " [";
    for (size_t kind = 0; kind < kOperationKinds; ++kind) {
      text += (kind > 0 ? ", i32 " : "i32 ") + std::to_string(table[i][kind]);
    }
    text += "]";
  }
  return text + "]\ndeclare void @simulator_enter_block(i32)\n";
}

}  // namespace

std::string with_counters(const std::string& intermediate_code) {
  const Lines lines = lines_of(intermediate_code);
  const std::set<std::string> attributes = attributes_of_shaders(lines);
  std::string text;
  std::vector<BlockOperations> table;
  for (auto line = lines.begin(); line != lines.end(); ++line) {
    if (!line->starts_with("define ") || !is_of_shader(*line, attributes)) {
      text += *line + '\n';
      continue;
    }
    const auto end = std::find(line, lines.end(), "}");
    ShaderFunction(line, end).count(text, table);
    line = end - 1;
  }
  return text + table_text(table);
}

}  // namespace simulator
