#include "kernel_entry.h"

#include <algorithm>
#include <map>

#include "mps_simulator/engine/engine.h"
#include "source_words.h"

namespace simulator {
namespace {

// Maps an attribute to its field in simulator_thread.
const std::map<std::string, std::string>& builtins() {
  static const std::map<std::string, std::string> names = {
      {"thread_position_in_grid", "t->thread_position_in_grid"},
      {"thread_position_in_threadgroup", "t->thread_position_in_threadgroup"},
      {"threadgroup_position_in_grid", "t->threadgroup_position_in_grid"},
      {"threads_per_threadgroup", "t->threads_per_threadgroup"},
      {"dispatch_threads_per_threadgroup", "t->threads_per_threadgroup"},
      {"threadgroups_per_grid", "t->threadgroups_per_grid"},
      {"threads_per_grid", "t->threads_per_grid"},
      {"thread_index_in_threadgroup", "t->thread_index_in_threadgroup"},
      {"thread_index_in_simdgroup", "t->thread_index_in_simdgroup"},
      {"simdgroup_index_in_threadgroup", "t->simdgroup_index_in_threadgroup"},
      {"simdgroups_per_threadgroup", "t->simdgroups_per_threadgroup"},
      {"dispatch_simdgroups_per_threadgroup", "t->simdgroups_per_threadgroup"},
      {"threads_per_simdgroup", "t->threads_per_simdgroup"},
      {"thread_execution_width", "t->threads_per_simdgroup"},
      {"thread_index_in_quadgroup", "t->thread_index_in_simdgroup % 4"},
      {"quadgroup_index_in_threadgroup", "t->thread_index_in_threadgroup / 4"},
  };
  return names;
}

uint32_t to_index(const Tokens& tokens, const Attribute& attribute, uint32_t limit) {
  const size_t at = attribute.argument_begin;
  if (attribute.argument_end != at + 1 || tokens[at].kind != Token::number) {
    tokens.error(attribute.at, "[[" + attribute.name + "]] needs a number");
  }
  const unsigned long value = std::stoul(tokens[at].spelling, nullptr, 0);
  if (value >= limit) {
    tokens.error(at, "[[" + attribute.name + "(" + std::to_string(value) + ")]] is out of bounds: the last index is " +
                         std::to_string(limit - 1));
  }
  return static_cast<uint32_t>(value);
}

// Returns the end of the parameter that starts at `i`: the next comma or the closing parenthesis.
size_t parameter_end(const Tokens& tokens, size_t i, size_t close) {
  int angles = 0;
  for (; i < close; ++i) {
    if (tokens[i].is("(") || tokens[i].is("[") || tokens[i].is("{")) {
      i = tokens[i].match;
    } else if (tokens[i].is("<")) {
      ++angles;
    } else if (tokens[i].is(">")) {
      --angles;
    } else if (tokens[i].is(",") && angles == 0) {
      return i;
    }
  }
  return close;
}

void read_declaration(const Tokens& tokens, size_t begin, size_t end, KernelParameter& parameter) {
  bool is_pointer = false, is_device = false, is_threadgroup = false;
  for (size_t i = begin; i < end; ++i) {
    if (tokens[i].is("[") && tokens.is(i + 1, "[")) {
      i = tokens[i].match;
      continue;
    }
    is_device |= tokens[i].is("device");
    is_threadgroup |= tokens[i].is("threadgroup");
    parameter.is_constant |= tokens[i].is("constant");
    parameter.is_const |= tokens[i].is("const") && !is_pointer;
    is_pointer |= tokens[i].is("*") || tokens[i].is("&") || tokens[i].is("[");
    parameter.is_reference |= tokens[i].is("&");
    if (tokens[i].kind == Token::identifier) {
      parameter.name = tokens[i].spelling;
      parameter.at = i;
    }
  }
  parameter.is_const |= parameter.is_constant;
  if (is_pointer && !is_device && !is_threadgroup && !parameter.is_constant) {
    tokens.error(parameter.at, "pointer or reference type of kernel parameter '" + parameter.name +
                                   "' must have explicit address space qualifier: device, constant or threadgroup");
  }
  parameter.kind = is_threadgroup ? KernelParameter::threadgroup_memory
                   : is_pointer   ? KernelParameter::buffer
                                  : KernelParameter::builtin;
}

void apply_attribute(const Tokens& tokens, const Attribute& attribute, KernelParameter& parameter) {
  if (attribute.name == "buffer" || attribute.name == "threadgroup") {
    const auto expected = attribute.name == "buffer" ? KernelParameter::buffer : KernelParameter::threadgroup_memory;
    if (parameter.kind != expected) {
      tokens.error(attribute.at, "[[" + attribute.name + "]] does not fit kernel parameter '" + parameter.name + "'");
    }
    parameter.index = to_index(tokens, attribute, kMaxBuffers);
    parameter.is_numbered = true;
  } else if (attribute.name == "function_constant") {
    parameter.gate = attribute.argument;
  } else if (builtins().count(attribute.name)) {
    if (parameter.kind != KernelParameter::builtin) {
      tokens.error(attribute.at, "[[" + attribute.name + "]] does not fit kernel parameter '" + parameter.name + "'");
    }
    parameter.source = builtins().at(attribute.name);
  } else {
    tokens.error(attribute.at, "the simulator does not know the attribute [[" + attribute.name +
                                   "]] of kernel parameter '" + parameter.name + "'");
  }
}

// Parameters without [[buffer(i)]] or [[threadgroup(i)]] take the lowest free numbers in turn.
void number_parameters(const Tokens& tokens, std::vector<KernelParameter>& parameters) {
  for (auto kind : {KernelParameter::buffer, KernelParameter::threadgroup_memory}) {
    std::vector<bool> taken(kMaxBuffers + parameters.size());
    for (const KernelParameter& parameter : parameters) {
      if (parameter.kind != kind || !parameter.is_numbered) continue;
      if (taken[parameter.index] && parameter.gate.empty()) {
        tokens.error(parameter.at, "kernel parameter '" + parameter.name + "': index " +
                                       std::to_string(parameter.index) + " is already used by another parameter");
      }
      taken[parameter.index] = true;
    }
    uint32_t next = 0;
    for (KernelParameter& parameter : parameters) {
      if (parameter.kind != kind || parameter.is_numbered) continue;
      while (taken[next]) ++next;
      if (next >= kMaxBuffers) tokens.error(parameter.at, "a kernel has at most 31 buffers");
      parameter.index = next++;
    }
  }
}

}  // namespace

std::vector<Attribute> take_attributes(Tokens& tokens, size_t begin, size_t end) {
  std::vector<Attribute> attributes;
  for (size_t i = begin; i + 1 < end; ++i) {
    if (!tokens[i].is("[") || !tokens[i + 1].is("[") || tokens[i].match != tokens[i + 1].match + 1) continue;
    const size_t close = tokens[i + 1].match;
    for (size_t at = i + 2; at < close; ++at) {
      if (tokens[at].kind != Token::identifier) continue;
      if (tokens.is(at + 1, "::")) ++at, ++at;
      Attribute attribute;
      attribute.name = tokens[at].spelling;
      attribute.at = at;
      if (tokens.is(at + 1, "(")) {
        attribute.argument_begin = at + 2;
        attribute.argument_end = tokens[at + 1].match;
        attribute.argument = tokens.output(attribute.argument_begin, attribute.argument_end);
        at = attribute.argument_end;
      }
      attributes.push_back(attribute);
    }
    tokens.erase(i, close + 2);
    i = close + 1;
  }
  return attributes;
}

std::vector<KernelParameter> take_parameters(Tokens& tokens, size_t open) {
  std::vector<KernelParameter> parameters;
  const size_t close = tokens[open].match;
  for (size_t begin = open + 1; begin < close;) {
    const size_t end = parameter_end(tokens, begin, close);
    if (end == begin + 1 && tokens[begin].is("void")) break;
    KernelParameter parameter;
    read_declaration(tokens, begin, end, parameter);
    for (const Attribute& attribute : take_attributes(tokens, begin, end))
      apply_attribute(tokens, attribute, parameter);
    if (parameter.kind == KernelParameter::builtin && parameter.source.empty()) {
      tokens.error(parameter.at, "kernel parameter '" + parameter.name +
                                     "' is neither a pointer or reference nor marked with an attribute");
    }
    parameters.push_back(parameter);
    begin = end + 1;
  }
  number_parameters(tokens, parameters);
  return parameters;
}

std::string entry_code(const Entry& entry, const std::string& callee, const std::string& signature) {
  const std::string number = std::to_string(entry.number);
  std::string code = " using simulator_signature_" + number + " = " + signature + ";";
  if (!entry.kernel->max_threads.empty()) {
    // a::f<b, c> becomes a::limit<b, c>().
    const size_t arguments = std::min(callee.find('<'), callee.size());
    const size_t name = callee.rfind("::", arguments) == std::string::npos ? 0 : callee.rfind("::", arguments) + 2;
    code += " static constexpr ::uint simulator_limit_" + number + " = " + callee.substr(0, name) +
            entry.kernel->max_threads + callee.substr(arguments) + "();";
  }
  code += " extern \"C\" SIMULATOR_ENTRY void simulator_run_" + number +
          "(void* const* a, const ::simulator_thread* t) { " + callee + "(";
  for (size_t i = 0; i < entry.kernel->parameters.size(); ++i) {
    const KernelParameter& parameter = entry.kernel->parameters[i];
    const std::string type =
        "::simulator::signature<simulator_signature_" + number + ">::parameter<" + std::to_string(i) + ">";
    if (i > 0) code += ", ";
    if (parameter.kind == KernelParameter::builtin) {
      code += "::simulator::position<" + type + ">::make(" + parameter.source + ")";
    } else {
      code += "::simulator::argument<" + type + ">(a[" + std::to_string(i) + "])";
    }
  }
  code += "); }";
  for (size_t i = 0; i < entry.kernel->parameters.size(); ++i) {
    const std::string& gate = entry.kernel->parameters[i].gate;
    if (gate.empty()) continue;
    code += " extern \"C\" SIMULATOR_ENTRY bool simulator_gate_" + number + "_" + std::to_string(i) + "() { return " +
            gate + "; }";
  }
  return code;
}

}  // namespace simulator
