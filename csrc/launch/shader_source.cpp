#include <c10/util/Exception.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "launch/launch.h"

namespace torch_gdn {

namespace {

// Returns the name in `#include "name"`, or an empty string for another line.
std::string included_file(const std::string& line) {
  const std::string directive = "#include \"";
  if (line.compare(0, directive.size(), directive) != 0) return "";
  return line.substr(directive.size(), line.find('"', directive.size()) - directive.size());
}

void append_file(const std::string& file, std::set<std::string>& seen, std::string& text) {
  if (!seen.insert(file).second) return;
  const std::filesystem::path path = std::filesystem::path(shader_directory()) / file;  // an absolute file is itself
  std::ifstream stream(path);
  TORCH_CHECK(stream.good(), "torch_gdn: cannot read the shader ", path.string());
  text += "#line 1 \"" + file + "\"\n";
  int number = 0;
  for (std::string line; std::getline(stream, line);) {
    ++number;
    const std::string included = included_file(line);
    if (!included.empty()) {
      append_file(included, seen, text);
      text += "#line " + std::to_string(number + 1) + " \"" + file + "\"\n";
    } else if (line != "#pragma once") {
      text += line + "\n";
    }
  }
}

std::string instantiation(const Variant& variant) {
  std::ostringstream instance;
  instance << variant.kernel << "<";
  for (size_t i = 0; i < variant.arguments.size(); ++i) instance << (i == 0 ? "" : ", ") << variant.arguments[i];
  instance << ">";
  return "template [[host_name(\"" + variant.name() + "\")]] [[kernel]] decltype(" + instance.str() + ") " +
         instance.str() + ";\n";
}

}  // namespace

std::string shader_source(c10::ArrayRef<Variant> variants) {
  // Metal 3.1 is C++14. Apple's compiler accepts `if constexpr`, but would warn about it in every variant.
  std::string text = "#pragma clang diagnostic ignored \"-Wc++17-extensions\"\n";
  std::set<std::string> seen;
  append_file(variants.front().file, seen, text);
  for (const auto& variant : variants) text += instantiation(variant);
  return text;
}

}  // namespace torch_gdn
