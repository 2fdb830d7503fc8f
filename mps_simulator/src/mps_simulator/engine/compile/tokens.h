// Splits preprocessed Metal source into tokens that can be rewritten.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

namespace simulator {

struct Token {
  enum Kind { identifier, number, text, punctuation } kind;
  std::string before;    // white space, line markers and pragmas before the token
  std::string spelling;  // as in the source
  std::string output;    // what the token becomes
  size_t file = 0, line = 0, column = 0;
  size_t match = 0;  // index of the matching bracket, for ( ) [ ] { }

  bool is(const char* word) const { return spelling == word && kind != text; }
};

struct Tokens {
  std::vector<Token> list;
  std::vector<std::string> files;
  std::string after;                   // white space after the last token
  bool includes_metal_header = false;  // whether a <metal_...> header was included

  const Token& operator[](size_t i) const { return list[i]; }
  Token& operator[](size_t i) { return list[i]; }
  size_t size() const { return list.size(); }
  bool is(size_t i, const char* word) const { return i < list.size() && list[i].is(word); }

  // Throws a CompileError at a token, in the format of clang's messages.
  [[noreturn]] void error(size_t at, const std::string& message) const;
  // Removes tokens [begin, end) from the output. Keeps their white space, so that lines keep their numbers.
  void erase(size_t begin, size_t end);
  // Returns the output of tokens [begin, end) on one line.
  std::string output(size_t begin, size_t end) const;
  std::string output() const;
  // Returns the '>' that closes the '<' at `open`.
  size_t closing_angle(size_t open) const;
};

// Throws a CompileError if brackets do not match. closing_angle finds the end of a template argument list. Each '<' and
// each '>' is its own token.
Tokens tokenize(const std::string& preprocessed);

}  // namespace simulator
