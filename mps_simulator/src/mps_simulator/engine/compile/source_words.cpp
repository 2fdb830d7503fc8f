#include "source_words.h"

#include <algorithm>
#include <cctype>
#include <set>
#include <string>
#include <vector>

namespace simulator {
namespace {

using Words = std::set<std::string>;

Words builtin_types() {
  Words types = {"void",        "size_t",      "ptrdiff_t",    "int8_t",   "int16_t",  "int32_t",
                 "int64_t",     "uint8_t",     "uint16_t",     "uint32_t", "uint64_t", "atomic_int",
                 "atomic_uint", "atomic_bool", "atomic_float", "unsigned", "signed"};
  for (const char* scalar :
       {"bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "bfloat", "float"}) {
    types.insert(scalar);
    for (const char* width : {"2", "3", "4"}) {
      types.insert(std::string(scalar) + width);
      types.insert(std::string("packed_") + scalar + width);
    }
  }
  return types;
}

// The range in which a name is a type: the whole program, or one template.
struct TypeName {
  std::string name;
  size_t begin, end;
};

// Returns the end of the declaration whose template header ends at `angle`.
size_t template_end(const Tokens& tokens, size_t angle) {
  for (size_t i = angle; i < tokens.size(); ++i) {
    if (tokens[i].is(";")) return i;
    if (tokens[i].is("{")) return tokens[i].match;
    if (tokens[i].is("(") || tokens[i].is("[")) i = tokens[i].match;
  }
  return tokens.size();
}

void add_template_types(const Tokens& tokens, size_t header, std::vector<TypeName>& types) {
  const size_t angle = tokens.closing_angle(header + 1), end = template_end(tokens, angle);
  for (size_t i = header + 2; i < angle; ++i) {
    const bool is_type = tokens[i].is("typename") || tokens[i].is("class");
    if (is_type && tokens[i + 1].kind == Token::identifier && !tokens.is(i + 2, "::")) {
      types.push_back({tokens[i + 1].spelling, angle, end});
    }
  }
}

// Returns the names that template headers, `struct S` and `using U =` declare, except those that name an address space.
std::vector<TypeName> declared_types(const Tokens& tokens) {
  std::vector<TypeName> types;
  for (size_t i = 0; i + 2 < tokens.size(); ++i) {
    if (tokens[i].is("template") && tokens[i + 1].is("<")) add_template_types(tokens, i, types);
    const bool is_class = tokens[i].is("struct") && (i == 0 || !tokens[i - 1].is("<"));
    const bool is_alias = tokens[i].is("using") && tokens[i + 2].is("=");
    if (tokens[i + 1].kind != Token::identifier || (!is_alias && !is_class)) continue;
    size_t end = i;
    while (is_alias && end < tokens.size() && !tokens.is(end, ";") && !is_address_space(tokens[end])) ++end;
    if (is_class || tokens.is(end, ";")) types.push_back({tokens[i + 1].spelling, i, tokens.size()});
  }
  return types;
}

bool ends_declaration_start(const Token& token) {
  for (const char* word : {";", "{", "}", "(", ",", "<", ")", "]", "="}) {
    if (token.is(word)) return true;
  }
  return false;
}

// A pointer or reference to a known type, such as `float* p` or `const T& x`, needs an address space.
void check_pointers(const Tokens& tokens) {
  const Words builtin = builtin_types();
  const std::vector<TypeName> declared = declared_types(tokens);
  const auto is_type = [&](size_t i) {
    if (tokens[i].kind != Token::identifier) return false;
    return builtin.count(tokens[i].spelling) ||
           std::any_of(declared.begin(), declared.end(), [&](const TypeName& type) {
             return i > type.begin && i < type.end && type.name == tokens[i].spelling;
           });
  };
  for (size_t i = 0; i + 1 < tokens.size(); ++i) {
    if (!is_type(i)) continue;
    size_t next = i + 1;
    while (tokens.is(next, "const") || tokens.is(next, "volatile")) ++next;
    if (!tokens.is(next, "*") && !tokens.is(next, "&")) continue;
    if (tokens.is(next, "&") && tokens.is(next + 1, "&")) continue;
    if (i > 0 && (tokens[i - 1].is("operator") || tokens[i - 1].is(".") || tokens[i - 1].is("->"))) continue;
    size_t begin = i;
    bool is_qualified = false;
    while (begin > 0 && !ends_declaration_start(tokens[begin - 1])) is_qualified |= is_address_space(tokens[--begin]);
    if (begin > 0 && tokens[begin - 1].is("<")) continue;  // this is a template argument, or a specialisation for T*
    if (is_qualified) continue;
    tokens.error(next, std::string(tokens.is(next, "*") ? "pointer" : "reference") +
                           " type must have explicit address space qualifier");
  }
}

bool starts_lambda(const Tokens& tokens, size_t i) {
  if (!tokens[i].is("[") || tokens.is(i + 1, "[") || i == 0) return false;
  const Token& previous = tokens[i - 1];
  if (previous.is("return")) return true;
  if (previous.kind != Token::punctuation || previous.is("[")) return false;
  return !previous.is(")") && !previous.is("]") && !previous.is(">");
}

const Words& absent_words() {
  static const Words words = {"double",       "throw",  "try",          "catch", "new", "delete", "virtual",
                              "dynamic_cast", "typeid", "thread_local", "goto",  "asm", "__asm__"};
  return words;
}

bool is_bfloat(const std::string& word) {
  static const Words words = {"bfloat",         "bfloat2",        "bfloat3",        "bfloat4",
                              "packed_bfloat2", "packed_bfloat3", "packed_bfloat4", "simdgroup_bfloat8x8"};
  return words.count(word) != 0;
}

bool has_bfloat_suffix(const Token& token) {
  if (token.kind != Token::number || token.spelling.size() < 3 || token.spelling.compare(0, 2, "0x") == 0) return false;
  std::string suffix = token.spelling.substr(token.spelling.size() - 2);
  return suffix == "bf" || suffix == "BF";
}

// Returns the components of a swizzle of two to four letters, or an empty vector for another word.
std::vector<int> swizzle_components(const std::string& word) {
  if (word.size() < 2 || word.size() > 4) return {};
  for (const char* letters : {"xyzw", "rgba"}) {
    std::vector<int> components;
    for (char c : word) {
      size_t component = std::string(letters).find(c);
      if (component == std::string::npos) break;
      components.push_back(static_cast<int>(component));
    }
    if (components.size() == word.size()) return components;
  }
  return {};
}

bool is_assigned(const Tokens& tokens, size_t i) {
  size_t next = i + 1;
  for (const char* op : {"+", "-", "*", "/"}) {
    if (tokens.is(next, op) && tokens.is(next + 1, "=") && tokens[next + 1].before.empty()) return true;
  }
  return tokens.is(next, "=") && !(tokens.is(next + 1, "=") && tokens[next + 1].before.empty());
}

void rewrite_swizzles(Tokens& tokens) {
  Words own;  // words that the program itself declares as members or variables
  for (size_t i = 0; i < tokens.size(); ++i) {
    bool is_access = i > 0 && (tokens[i - 1].is(".") || tokens[i - 1].is("->"));
    if (tokens[i].kind == Token::identifier && !is_access) own.insert(tokens[i].spelling);
  }
  for (size_t i = 1; i < tokens.size(); ++i) {
    if (tokens[i].kind != Token::identifier || !(tokens[i - 1].is(".") || tokens[i - 1].is("->"))) continue;
    std::vector<int> components = swizzle_components(tokens[i].spelling);
    if (components.empty() || own.count(tokens[i].spelling) || tokens.is(i + 1, "(")) continue;
    std::string list;
    for (int component : components) list += (list.empty() ? "" : ",") + std::to_string(component);
    const char* name = is_assigned(tokens, i) ? "template swizzle_reference<" : "template swizzle<";
    tokens[i].output = name + list + ">()";
  }
}

// Returns whether a string literal is passed, returned or assigned to a pointer; it then lies in constant memory.
// Initialisers of arrays, static_assert and attributes stay as they are.
bool is_text_pointer(const Tokens& tokens, size_t i) {
  if (tokens[i].spelling[0] != '"' || i == 0) return false;
  if (tokens[i - 1].is("return") || (i > 1 && tokens[i - 1].is("=") && !tokens[i - 2].is("]"))) return true;
  size_t open = i;
  while (open > 0) {
    --open;
    if (tokens[open].is(")") || tokens[open].is("]") || tokens[open].is("}"))
      open = tokens[open].match;
    else if (tokens[open].is(";") || tokens[open].is("{") || tokens[open].is("}") || tokens[open].is("["))
      return false;
    else if (tokens[open].is("("))
      break;
  }
  if (open == 0 || tokens[open - 1].kind != Token::identifier) return false;
  for (const char* word : {"static_assert", "host_name", "if", "asm", "__attribute__"}) {
    if (tokens[open - 1].is(word)) return false;
  }
  return true;
}

void rewrite_texts(Tokens& tokens) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i].kind != Token::text || !is_text_pointer(tokens, i)) continue;
    if (tokens[i - 1].kind != Token::text) tokens[i].output = "::simulator::constant_text(" + tokens[i].output;
    if (i + 1 >= tokens.size() || tokens[i + 1].kind != Token::text) tokens[i].output += ")";
  }
}

}  // namespace

bool is_address_space(const Token& token) {
  return token.is("device") || token.is("threadgroup") || token.is("constant") || token.is("thread");
}

void check_words(const Tokens& tokens, uint32_t language_version) {
  const bool has_bfloat = language_version >= (3u << 16 | 1);
  for (size_t i = 0; i < tokens.size(); ++i) {
    const Token& token = tokens[i];
    if (token.kind == Token::identifier && absent_words().count(token.spelling)) {
      tokens.error(i, "'" + token.spelling + "' is not supported in Metal");
    }
    if (!has_bfloat && (is_bfloat(token.spelling) || has_bfloat_suffix(token))) {
      tokens.error(i, "'" + token.spelling + "' needs language version 3.1; this library is compiled as " +
                          std::to_string(language_version >> 16) + "." + std::to_string(language_version & 0xffff));
    }
    if (starts_lambda(tokens, i)) tokens.error(i, "lambda expressions are not supported in Metal");
    if (!tokens.includes_metal_header && token.is("metal")) {
      tokens.error(i, "use of undeclared identifier 'metal': no Metal header is included");
    }
  }
  check_pointers(tokens);
}

void rewrite_words(Tokens& tokens) {
  static const Words opencl_only = {"global",     "local",     "generic",        "read_only",   "write_only",
                                    "read_write", "pipe",      "addrspace_cast", "sampler_t",   "event_t",
                                    "queue_t",    "ndrange_t", "reserve_id_t",   "clk_event_t", "vec_step",
                                    "image1d_t",  "image2d_t", "image3d_t"};
  static const Words atomics = {"atomic_int", "atomic_uint", "atomic_bool", "atomic_float", "atomic_ulong"};
  for (size_t i = 0; i < tokens.size(); ++i) {
    Token& token = tokens[i];
    if (token.is("device")) token.output = "__local";
    if (token.is("threadgroup")) token.output = "__attribute__((opencl_global_device))";
    if (token.is("constant")) token.output = "const __global";
    if (token.is("thread")) token.output = "__private";
    if (has_bfloat_suffix(token)) token.output = "bfloat(" + token.spelling.substr(0, token.spelling.size() - 2) + "f)";
    if (token.kind == Token::identifier && opencl_only.count(token.spelling)) token.output += "_";
    if (token.kind == Token::identifier && atomics.count(token.spelling)) token.output = "simulator_" + token.spelling;
    // Metal 3.1 accepts this feature of C++17; MLX compiles with it. We know of no other such feature.
    if (token.is("constexpr") && i > 0 && tokens[i - 1].is("if")) {
      token.output =
          "_Pragma(\"clang diagnostic push\") _Pragma(\"clang diagnostic ignored \\\"-Wpre-c++17-compat\\\"\") "
          "constexpr _Pragma(\"clang diagnostic pop\")";
    }
    if (token.is("__func__") || token.is("__FUNCTION__") || token.is("__PRETTY_FUNCTION__")) {
      token.output = "::simulator::constant_text(" + token.spelling + ")";
    }
  }
  rewrite_swizzles(tokens);
  rewrite_texts(tokens);
}

}  // namespace simulator
