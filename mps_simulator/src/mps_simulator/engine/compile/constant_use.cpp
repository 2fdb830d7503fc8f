#include "constant_use.h"

namespace simulator {

std::set<std::string> ConstantUse::required(const Tokens& tokens, const std::string& name,
                                            const std::set<std::string>& constants) const {
  std::set<std::string> optional, found, visited = {name};
  for (size_t i = 0; i + 2 < tokens.size(); ++i) {
    if (tokens[i].is("is_function_constant_defined")) optional.insert(tokens[tokens[i + 1].match - 1].spelling);
  }
  std::vector<std::string> open = {name};
  while (!open.empty()) {
    const auto [first, last] = definitions_.equal_range(open.back());
    open.pop_back();
    for (auto definition = first; definition != last; ++definition) {
      for (size_t i = definition->second.first; i < definition->second.second; ++i) {
        const std::string& word = tokens[i].spelling;
        if (tokens[i].kind != Token::identifier) continue;
        if (constants.count(word) && !optional.count(word)) found.insert(word);
        if (visited.insert(word).second) open.push_back(word);
      }
    }
  }
  return found;
}

}  // namespace simulator
