#include "source_transform.h"

#include <deque>
#include <map>
#include <set>
#include <vector>

#include "constant_use.h"
#include "kernel_entry.h"
#include "mps_simulator/engine/engine.h"
#include "program_tables.h"
#include "source_words.h"
#include "tokens.h"

namespace simulator {
namespace {

class Transformer {
 public:
  explicit Transformer(Tokens tokens) : tokens_(std::move(tokens)) {}

  std::string run() {
    rewrite_words(tokens_);
    rewrite_is_defined();
    scope(0, tokens_.size(), "");
    refuse_threadgroup_variables();
    take_attributes(tokens_, 0, tokens_.size());  // also drops those of other functions' parameters
    for (Kernel& kernel : kernels_) require_constants(kernel);
    return tokens_.output() + program_tables(entries_, constants_, initialisers_);
  }

 private:
  // One declaration in a namespace: tokens [begin, end). `end` is after the semicolon or the body.
  struct Declaration {
    size_t begin = 0, end = 0;
    size_t open = 0;      // opening parenthesis of a function's parameters
    size_t body = 0;      // opening brace of a function's body
    size_t assigned = 0;  // '=' of an initialiser
    bool is_class = false;
    size_t class_body = 0;
  };

  bool is(size_t i, const char* word) const { return tokens_.is(i, word); }

  size_t skip_template(size_t i) const {
    while (is(i, "template") && is(i + 1, "<")) i = tokens_.closing_angle(i + 1) + 1;
    return i;
  }

  size_t skip_attributes(size_t i) const {
    for (;;) {
      if (is(i, "[") && is(i + 1, "[")) {
        i = tokens_[i].match + 1;
      } else if (is(i, "__attribute__") || is(i, "alignas")) {
        i = tokens_[i + 1].match + 1;
      } else {
        return i;
      }
    }
  }

  // Returns the opening parenthesis of the parameters of the operator at `i`.
  size_t operator_parameters(size_t i) const {
    if (is(i + 1, "(") && is(i + 2, ")")) return i + 3;
    while (i < tokens_.size() && !is(i, "(")) ++i;
    return i;
  }

  // Returns whether the parenthesis at `i` follows the name of a function.
  bool opens_parameters(size_t i, size_t begin) const {
    return i > begin && !is(i - 1, "decltype") && (tokens_[i - 1].kind == Token::identifier || is(i - 1, ">"));
  }

  Declaration read_declaration(size_t begin, size_t limit) const {
    Declaration d;
    d.begin = begin;
    bool has_initialisers = false;  // of a constructor's members
    size_t i = skip_template(begin);
    while (i < limit) {
      const size_t next = skip_attributes(i);
      if (next != i) {
        i = next;
      } else if (is(i, ";")) {
        d.end = i + 1;
        return d;
      } else if (is(i, "{")) {
        const size_t close = tokens_[i].match;
        const bool is_member = has_initialisers && !is(i - 1, ")") && !is(i - 1, "}");
        if (d.is_class && !d.open) {
          d.class_body = i;
        } else if (d.open && !d.assigned && !is_member) {
          d.body = i;
          d.end = close + 1;
          return d;
        }
        i = close + 1;
      } else {
        if (!d.open && (is(i, "struct") || is(i, "class") || is(i, "union") || is(i, "enum"))) d.is_class = true;
        if (is(i, "operator") && !d.assigned) {
          d.open = operator_parameters(i);
          i = tokens_[d.open].match + 1;
          continue;
        }
        if (is(i, "=") && !d.assigned) d.assigned = i;
        if (is(i, "(") && !d.open && !d.assigned && opens_parameters(i, begin)) d.open = i;
        if (is(i, ":") && d.open && !d.assigned) has_initialisers = true;
        i = is(i, "(") || is(i, "[") ? tokens_[i].match + 1 : i + 1;
      }
    }
    d.end = limit;
    return d;
  }

  void scope(size_t i, size_t end, const std::string& path) {
    while (i < end) {
      if (is(i, ";")) {
        ++i;
      } else if (is(i, "namespace") || (is(i, "inline") && is(i + 1, "namespace"))) {
        i = namespace_scope(i, path);
      } else if (is(i, "extern") && is(i + 2, "{")) {
        scope(i + 3, tokens_[i + 2].match, path);
        i = tokens_[i + 2].match + 1;
      } else {
        const Declaration d = read_declaration(i, end);
        declaration(d, path);
        i = d.end;
      }
    }
  }

  size_t namespace_scope(size_t i, const std::string& path) {
    std::string inner = path;
    for (; !is(i, "{"); ++i) {
      if (is(i, ";") || i + 1 >= tokens_.size()) return i + 1;  // an alias
      if (tokens_[i].kind == Token::identifier && !is(i, "namespace") && !is(i, "inline")) {
        inner += "::" + tokens_[i].spelling;
      }
    }
    scope(i + 1, tokens_[i].match, inner);
    return tokens_[i].match + 1;
  }

  bool is_other(size_t first) const {
    return is(first, "using") || is(first, "typedef") || is(first, "static_assert") || is(first, "friend");
  }

  void declaration(const Declaration& d, const std::string& path) {
    const size_t first = skip_attributes(skip_template(d.begin));
    if (is_other(first)) return;
    define(d);
    if (is(d.begin, "template") && !is(d.begin + 1, "<")) {
      explicit_instantiation(d, path);
    } else if (d.class_body) {
      class_scope(d);
    } else if (d.open && is_kernel(d.begin, d.open)) {
      kernel(d, path);
    } else if (d.open) {
      if (is_member(d)) member_function(d);
    } else if (!d.is_class) {
      variable(d, path);
    }
    if (!d.body) return;
    refuse_static_variables(d.body);
    choose_checks(d);
  }

  // This check doubles the compile time, so only programs with a pointer to private memory get it.
  void choose_checks(const Declaration& d) {
    for (size_t i = d.begin; i < d.end; ++i) {
      if (!is(i, "thread")) continue;
      for (++i; !is(i, ")") && !is(i, "(") && !is(i, ";") && !is(i, "=") && !is(i, "{"); ++i) {
        if (is(i, "*")) return;
      }
    }
    std::string& head = tokens_[skip_attributes(skip_template(d.begin))].output;
    head = "__attribute__((no_sanitize(\"object-size\"))) " + head;
  }

  void define(const Declaration& d) {
    const size_t stop = d.assigned ? d.assigned : d.end - 1;
    const std::string name = d.class_body ? class_name(d) : tokens_[d.open ? d.open - 1 : stop - 1].spelling;
    use_.define(name, d.begin, d.end);
  }

  void require_constants(Kernel& kernel) const {
    std::set<std::string> names;
    for (const FunctionConstant& constant : constants_) names.insert(constant.name);
    const std::set<std::string> required = use_.required(tokens_, kernel.name, names);
    for (size_t i = 0; i < constants_.size(); ++i) {
      if (required.count(constants_[i].name)) kernel.required_constants.push_back(i);
    }
  }

  // Returns true for a member function that is defined outside its class, `T A::f() {` or `T A<B>::f() {`, but false
  // for a constructor.
  bool is_member(const Declaration& d) const {
    return d.body && is(d.open - 2, "::") && !is(d.open - 3, tokens_[d.open - 1].spelling.c_str());
  }

  // ---- kernels -------------------------------------------------------------------------------------------------

  bool is_kernel(size_t begin, size_t end) const {
    for (size_t i = begin; i < end; ++i) {
      if (is(i, "kernel")) return true;
    }
    return false;
  }

  // Reads the attributes before the name and after the parameters, and erases `kernel`.
  struct FunctionAttributes {
    std::string host_name;
    std::string max_threads;
  };

  FunctionAttributes take_function_attributes(size_t begin, size_t end) {
    FunctionAttributes result;
    for (size_t i = begin; i < end; ++i) {
      if (!is(i, "[") || !is(i + 1, "[")) {
        if (is(i, "kernel")) tokens_.erase(i, i + 1);
        continue;
      }
      const size_t close = tokens_[i].match;
      for (const Attribute& attribute : take_attributes(tokens_, i, close + 1)) {
        if (attribute.name == "host_name") result.host_name = text(attribute);
        if (attribute.name == "max_total_threads_per_threadgroup") result.max_threads = attribute.argument;
      }
      i = close;
    }
    return result;
  }

  std::string text(const Attribute& attribute) const {
    std::string result;
    for (size_t i = attribute.argument_begin; i < attribute.argument_end; ++i) {
      const std::string& piece = tokens_[i].spelling;
      if (tokens_[i].kind != Token::text) tokens_.error(i, "[[host_name]] needs a string literal");
      result += piece.substr(1, piece.size() - 2);
    }
    return result;
  }

  void kernel(const Declaration& d, const std::string& path) {
    const size_t close = tokens_[d.open].match;
    const size_t behind = d.body ? d.body : d.end - 1;
    if (!is(d.open - 2, "void")) tokens_.error(d.open - 1, "a kernel must return void");
    std::string header = tokens_.output(d.begin, skip_template(d.begin));
    FunctionAttributes attributes = take_function_attributes(d.begin, d.open);
    FunctionAttributes trailing = take_function_attributes(close + 1, behind);
    if (!trailing.max_threads.empty()) attributes.max_threads = trailing.max_threads;
    if (!d.body) {
      take_attributes(tokens_, d.open, close);  // a declaration; only the definition says what the parameters are
      return;
    }
    std::vector<KernelParameter> parameters = take_parameters(tokens_, d.open);

    kernels_.push_back({tokens_[d.open - 1].spelling, header, "", std::move(parameters), {}});
    Kernel& kernel = kernels_.back();
    threadgroup_variables(d.body + 1, tokens_[d.body].match);
    std::string& after = tokens_[d.end - 1].output;
    if (!attributes.max_threads.empty()) {
      kernel.max_threads = "simulator_max_threads_" + std::to_string(kernels_.size());
      after +=
          " " + header + " constexpr ::uint " + kernel.max_threads + "() { return " + attributes.max_threads + "; }";
    }
    if (header.empty()) {
      const std::string& host_name = attributes.host_name.empty() ? kernel.name : attributes.host_name;
      after += add_entry(d.open - 1, host_name, path, kernel, kernel.name, "decltype(" + kernel.name + ")");
    }
  }

  std::string add_entry(size_t at, const std::string& host_name, const std::string& path, const Kernel& kernel,
                        const std::string& callee, const std::string& signature) {
    if (!host_names_.insert(host_name).second) {
      tokens_.error(at, "two kernels have the name '" + host_name + "'");
    }
    entries_.push_back({host_name, path, &kernel, entries_.size()});
    return entry_code(entries_.back(), callee, signature);
  }

  // Handles these forms:
  //     template [[host_name("x")]] [[kernel]] decltype(f<a>) f<a>;
  //     template [[host_name("x")]] kernel void f<a>(...);
  void explicit_instantiation(const Declaration& d, const std::string& path) {
    if (!is_kernel(d.begin, d.end)) return;
    const FunctionAttributes attributes = take_function_attributes(d.begin, d.open ? d.open : d.end);
    const size_t end = d.open ? d.open : d.end - 1;  // the token after f<a>
    size_t name = end - 1;
    if (is(name, ">")) {
      int depth = 0;
      for (;; --name) {
        if (is(name, ")") || is(name, "]")) name = tokens_[name].match;
        depth += is(name, ">") ? 1 : is(name, "<") ? -1 : 0;
        if (depth == 0) break;
        if (name == d.begin) tokens_.error(end - 1, "expected the name of a kernel");
      }
      --name;
    }
    const Kernel& kernel = find_kernel(name, d);
    size_t qualified = name;
    while (is(qualified - 1, "::")) {
      --qualified;
      if (tokens_[qualified - 1].kind != Token::identifier || is(qualified - 1, "void")) break;
      --qualified;
    }
    const std::string callee = tokens_.output(qualified, end);
    std::string signature = "decltype(" + callee + ")";
    if (d.open) {
      take_attributes(tokens_, d.open, tokens_[d.open].match);
      signature = "void" + tokens_.output(d.open, tokens_[d.open].match + 1);
    }
    const std::string host_name = attributes.host_name.empty() ? kernel.name : attributes.host_name;
    tokens_.erase(d.begin, d.end);
    tokens_[d.end - 1].output = add_entry(name, host_name, path, kernel, callee, signature);
  }

  const Kernel& find_kernel(size_t name, const Declaration& d) const {
    size_t count = 0;
    for (size_t i = d.open + 1; d.open && i < tokens_[d.open].match; ++i) {
      if (is(i, "(") || is(i, "[") || is(i, "{"))
        i = tokens_[i].match;
      else if (is(i, "<"))
        i = tokens_.closing_angle(i);
      else if (is(i, ","))
        ++count;
    }
    const Kernel* found = nullptr;
    for (const Kernel& kernel : kernels_) {
      if (kernel.name != tokens_[name].spelling) continue;
      if (!found || (d.open && kernel.parameters.size() == count + 1)) found = &kernel;
    }
    if (!found) tokens_.error(name, "no kernel template has the name '" + tokens_[name].spelling + "'");
    return *found;
  }

  // ---- threadgroup variables -----------------------------------------------------------------------------------

  bool starts_statement(size_t i) const {
    return is(i - 1, ";") || is(i - 1, "{") || is(i - 1, "}") || is(i - 1, ")") || is(i - 1, "else");
  }

  // Returns the declarator's name in `threadgroup T name[...]`, or 0 if the statement declares a pointer or a
  // reference.
  size_t threadgroup_declarator(size_t i) const {
    for (++i; i < tokens_.size(); ++i) {
      if (is(i, "<")) {
        i = tokens_.closing_angle(i);
      } else if (is(i, "[") && is(i + 1, "[")) {
        i = tokens_[i].match;
      } else if (tokens_[i].kind == Token::identifier) {
        if (is(i + 1, "[") || is(i + 1, ";") || is(i + 1, ",") || is(i + 1, "=")) return i;
      } else if (!is(i, "::")) {
        return 0;
      }
    }
    return 0;
  }

  // Takes `alignas(n)` before `threadgroup` as one more argument, and erases it, because the declaration becomes a
  // typedef.
  std::string take_alignment(size_t i) {
    if (!is(i - 1, ")") || !is(tokens_[i - 1].match - 1, "alignas")) return "";
    const size_t open = tokens_[i - 1].match;
    const std::string alignment = tokens_.output(open + 1, i - 1);
    tokens_.erase(open - 1, i);
    return ", " + alignment;
  }

  void threadgroup_variables(size_t begin, size_t end) {
    std::map<std::string, int> used;
    for (size_t i = begin; i < end; ++i) {
      if (!is(i, "threadgroup") || !starts_statement(i)) continue;
      size_t name = threadgroup_declarator(i);
      if (!name) continue;
      const std::string type = tokens_.output(i + 1, name);
      const std::string alignment = take_alignment(i);
      std::string code;
      size_t at = name;
      for (;;) {
        size_t stop = at + 1;
        while (is(stop, "[")) stop = tokens_[stop].match + 1;
        if (is(stop, "=")) tokens_.error(stop, "a threadgroup variable cannot have an initialiser");
        if (!is(stop, ",") && !is(stop, ";")) tokens_.error(stop, "expected ';' after a threadgroup variable");
        const std::string& spelled = tokens_[at].spelling;
        const int copies = used[spelled]++;
        const std::string key = copies == 0 ? spelled : spelled + "#" + std::to_string(copies + 1);
        const std::string alias = "simulator_type_" + std::to_string(++alias_count_);
        code += "typedef " + type + " " + alias + tokens_.output(at + 1, stop) +
                "; __attribute__((opencl_global_device)) " + alias + "& " + spelled +
                " = ::simulator::threadgroup_variable<" + alias + ">(SIMULATOR_NAME(\"" + key + "\")" + alignment + ")";
        at = stop + 1;
        if (is(stop, ";")) break;
        code += "; ";
      }
      tokens_.erase(i, at - 1);
      tokens_[i].output = code;
      accepted_.insert(i);
    }
  }

  void refuse_threadgroup_variables() const {
    for (size_t i = 1; i < tokens_.size(); ++i) {
      if (!is(i, "threadgroup") || !starts_statement(i) || accepted_.count(i)) continue;
      if (size_t name = threadgroup_declarator(i)) {
        tokens_.error(name, "threadgroup variable '" + tokens_[name].spelling + "' can only be declared in a kernel");
      }
    }
  }

  // ---- classes -------------------------------------------------------------------------------------------------

  void class_scope(const Declaration& d) {
    const std::string name = class_name(d);
    std::set<std::string> seen;
    size_t i = d.class_body + 1;
    const size_t end = tokens_[d.class_body].match;
    while (i < end) {
      while (is(i, ";") || (is(i + 1, ":") && (is(i, "public") || is(i, "private") || is(i, "protected")))) {
        i += is(i, ";") ? 1 : 2;
      }
      if (i >= end) return;
      const Declaration member = read_declaration(i, end);
      const size_t first = skip_attributes(skip_template(i));
      if (member.body) choose_checks(member);
      if (member.class_body) {
        class_scope(member);
      } else if (member.open && is(member.open - 1, name.c_str())) {
        constructor(member, seen);
      } else if (member.open && !is_other(first)) {
        member_function(member);
      }
      if (member.body) refuse_static_variables(member.body);
      i = member.end;
    }
  }

  std::string class_name(const Declaration& d) const {
    for (size_t i = skip_template(d.begin); i < d.class_body; ++i) {
      if (!is(i, "struct") && !is(i, "class") && !is(i, "union")) continue;
      const size_t name = skip_attributes(i + 1);
      return tokens_[name].kind == Token::identifier ? tokens_[name].spelling : "";
    }
    return "";
  }

  // Metal overloads constructors by the address space of the object. Here one constructor reaches all spaces, so the
  // first of such overloads stands for all of them.
  void constructor(const Declaration& d, std::set<std::string>& seen) {
    const size_t close = tokens_[d.open].match;
    const bool is_new = seen.insert(tokens_.output(d.begin, close + 1)).second;
    size_t i = close + 1;
    bool is_qualified = false;
    for (; i < d.end && is_address_space(tokens_[i]); ++i) {
      is_qualified = true;
      tokens_.erase(i, i + 1);
    }
    if (is_qualified && !is_new) tokens_.erase(d.begin, d.end);
  }

  // A member function reaches objects in thread memory unless it names another address space. clang cannot spell
  // `threadgroup` there. Such a function reaches all spaces, and overload resolution prefers more exact ones.
  void member_function(const Declaration& d) {
    for (size_t i = d.begin; i < d.open; ++i) {
      if (is(i, "static")) return;
    }
    bool is_qualified = false;
    for (size_t i = tokens_[d.open].match + 1; i < d.end; ++i) {
      if (is_address_space(tokens_[i])) {
        is_qualified = true;
        if (is(i, "threadgroup")) tokens_.erase(i, i + 1);
        if (is(i, "constant")) tokens_[i].output = "__global";
      } else if (!is(i, "const") && !is(i, "volatile") && !is(i, "noexcept")) {
        break;
      }
    }
    if (!is_qualified) tokens_[tokens_[d.open].match].output += " __private";
  }

  // Metal allows static variables only if they are constants.
  void refuse_static_variables(size_t body) const {
    for (size_t i = body + 1; i < tokens_[body].match; ++i) {
      if (!is(i, "static") || !starts_statement(i)) continue;
      bool is_constant = false;
      for (size_t k = i; !is(k, ";") && !is(k, "=") && !is(k, "{"); ++k) is_constant |= is(k, "constant");
      if (!is_constant) tokens_.error(i, "static variable must reside in constant address space");
    }
  }

  // ---- program scope -------------------------------------------------------------------------------------------

  void variable(const Declaration& d, const std::string& path) {
    bool is_constant = false, is_extern = false;
    const size_t stop = d.assigned ? d.assigned : d.end - 1;
    for (size_t i = d.begin; i < stop; ++i) {
      is_constant |= is(i, "constant");
      is_extern |= is(i, "extern");
    }
    if (is_extern || stop == d.begin) return;
    const std::vector<Attribute> attributes = function_constant_attribute(d.begin, stop);
    if (!attributes.empty()) {
      function_constant(d, attributes.front(), path);
    } else if (!is_constant) {
      tokens_.error(stop - 1, "program scope variable must reside in constant address space");
    } else if (d.assigned && mentions_function_constant(d.assigned, d.end)) {
      derived_constant(d, path);
    }
  }

  std::vector<Attribute> function_constant_attribute(size_t begin, size_t end) {
    std::vector<Attribute> result;
    for (size_t i = begin; i + 2 < end; ++i) {
      if (is(i, "[") && is(i + 1, "[") && is(i + 2, "function_constant")) {
        result.push_back({"function_constant", i + 4, tokens_[i + 3].match, "", i + 2});
      }
    }
    return result;
  }

  // Returns the type in `constant T name` without qualifiers.
  std::string variable_type(size_t begin, size_t name) const {
    std::string type;
    for (size_t i = begin; i < name; ++i) {
      if (is(i, "constant") || is(i, "static") || is(i, "constexpr") || is(i, "const")) continue;
      type += tokens_[i].output + " ";
    }
    return type;
  }

  // The program reads a constant reference. Program::bind writes the value that it refers to.
  void function_constant(const Declaration& d, const Attribute& attribute, const std::string& path) {
    const size_t at = attribute.argument_begin;
    if (attribute.argument_end != at + 1 || tokens_[at].kind != Token::number) {
      tokens_.error(attribute.at, "[[function_constant]] needs a number");
    }
    const size_t name = attribute.at - 3;
    const std::string& spelled = tokens_[name].spelling;
    const std::string type = variable_type(d.begin, name);
    constants_.push_back({spelled, path, static_cast<uint32_t>(std::stoul(tokens_[at].spelling, nullptr, 0))});
    depends_on_constants_.insert(spelled);
    tokens_.erase(d.begin, d.end);
    tokens_[d.begin].output = "__global " + type + " simulator_value_" + spelled +
                              "; __global bool simulator_defined_" + spelled + "; static const __global " + type +
                              "& " + spelled + " = simulator_value_" + spelled + ";";
  }

  bool mentions_function_constant(size_t begin, size_t end) const {
    for (size_t i = begin; i < end; ++i) {
      if (tokens_[i].kind == Token::identifier && depends_on_constants_.count(tokens_[i].spelling)) return true;
    }
    return false;
  }

  // A program-scope constant that is computed from function constants is recomputed when they change.
  void derived_constant(const Declaration& d, const std::string& path) {
    const size_t name = d.assigned - 1;
    const std::string& spelled = tokens_[name].spelling;
    if (tokens_[name].kind != Token::identifier) {
      tokens_.error(name, "an array cannot be computed from function constants in the simulator");
    }
    const std::string type = variable_type(d.begin, name);
    const std::string function = "simulator_initialise_" + std::to_string(initialisers_.size());
    const std::string code = "__global " + type + " simulator_value_" + spelled + "; static const __global " + type +
                             "& " + spelled + " = simulator_value_" + spelled + "; extern \"C\" SIMULATOR_ENTRY void " +
                             function + "() { simulator_value_" + spelled + " = " +
                             tokens_.output(d.assigned + 1, d.end) + " }";
    initialisers_.push_back(path + "::" + function);
    depends_on_constants_.insert(spelled);
    tokens_.erase(d.begin, d.end);
    tokens_[d.begin].output = code;
  }

  void rewrite_is_defined() {
    for (size_t i = 0; i + 3 < tokens_.size(); ++i) {
      if (!is(i, "is_function_constant_defined") || !is(i + 1, "(")) continue;
      const size_t name = tokens_[i + 1].match - 1;
      tokens_.erase(i, i + 1);
      tokens_[name].output = "simulator_defined_" + tokens_[name].spelling;
    }
  }

  Tokens tokens_;
  std::deque<Kernel> kernels_;  // entries point into it
  std::vector<Entry> entries_;
  std::set<std::string> host_names_;
  std::vector<FunctionConstant> constants_;
  std::vector<std::string> initialisers_;
  std::set<std::string> depends_on_constants_;
  std::set<size_t> accepted_;  // threadgroup variables of kernels
  ConstantUse use_;
  int alias_count_ = 0;
};

}  // namespace

std::string transform_source(const std::string& preprocessed, uint32_t language_version) {
  Tokens tokens = tokenize(preprocessed);
  check_words(tokens, language_version);
  return Transformer(std::move(tokens)).run();
}

}  // namespace simulator
