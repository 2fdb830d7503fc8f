#include "tokens.h"

#include <cctype>
#include <utility>

#include "mps_simulator/engine/engine.h"

namespace simulator {
namespace {

bool starts_identifier(char c) { return std::isalpha(static_cast<unsigned char>(c)) || c == '_'; }
bool continues_identifier(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

class Tokenizer {
 public:
  explicit Tokenizer(const std::string& source) : source_(source) { tokens_.files.push_back("program_source"); }

  Tokens run() {
    while (skip_blank()) take();
    tokens_.after = std::move(blank_);
    match_brackets();
    return std::move(tokens_);
  }

 private:
  char at(size_t ahead = 0) const { return position_ + ahead < source_.size() ? source_[position_ + ahead] : '\0'; }

  void advance(std::string& into, size_t count = 1) {
    for (; count > 0 && position_ < source_.size(); --count) {
      char c = source_[position_++];
      into += c;
      column_ = c == '\n' ? 1 : column_ + 1;
      line_ += c == '\n';
    }
  }

  // Returns false at the end of the source.
  bool skip_blank() {
    while (position_ < source_.size()) {
      if (at() == '#' && only_blank_before()) {
        take_directive();
      } else if (std::isspace(static_cast<unsigned char>(at()))) {
        advance(blank_);
      } else {
        return true;
      }
    }
    return false;
  }

  bool only_blank_before() const {
    for (size_t i = position_; i > 0 && source_[i - 1] != '\n'; --i) {
      if (!std::isspace(static_cast<unsigned char>(source_[i - 1]))) return false;
    }
    return true;
  }

  // Reads a line marker or a pragma. The preprocessor has already handled all other directives.
  void take_directive() {
    std::string directive;
    while (position_ < source_.size() && at() != '\n') advance(directive);
    if (directive == "#pragma simulator_metal_header") {
      tokens_.includes_metal_header = true;
      return;
    }
    blank_ += directive;
    size_t digit = directive.find_first_of("0123456789");
    size_t quote = directive.find('"'), end = directive.rfind('"');
    if (directive.compare(0, 7, "#pragma") == 0 || digit == std::string::npos || quote == std::string::npos) return;
    line_ = std::stoul(directive.substr(digit)) - 1;  // the newline after the marker adds one
    set_file(directive.substr(quote + 1, end - quote - 1));
  }

  void set_file(const std::string& name) {
    for (file_ = 0; file_ < tokens_.files.size(); ++file_) {
      if (tokens_.files[file_] == name) return;
    }
    tokens_.files.push_back(name);
  }

  void take() {
    Token token;
    token.before = std::move(blank_);
    blank_.clear();
    token.file = file_, token.line = line_, token.column = column_;
    if (starts_identifier(at())) {
      token.kind = Token::identifier;
      while (continues_identifier(at())) advance(token.spelling);
      if ((at() == '"' || at() == '\'') && token.spelling.size() <= 2) take_quoted(token);
    } else if (std::isdigit(static_cast<unsigned char>(at())) ||
               (at() == '.' && std::isdigit(static_cast<unsigned char>(at(1))))) {
      take_number(token);
    } else if (at() == '"' || at() == '\'') {
      take_quoted(token);
    } else {
      token.kind = Token::punctuation;
      bool pair = (at() == ':' && at(1) == ':') || (at() == '-' && at(1) == '>');
      advance(token.spelling, pair ? 2 : 1);
    }
    token.output = token.spelling;
    tokens_.list.push_back(std::move(token));
  }

  void take_number(Token& token) {
    token.kind = Token::number;
    bool hexadecimal = at() == '0' && (at(1) == 'x' || at(1) == 'X');
    for (;;) {
      char c = at();
      bool exponent = hexadecimal ? c == 'p' || c == 'P' : c == 'e' || c == 'E';
      if (exponent && (at(1) == '+' || at(1) == '-')) {
        advance(token.spelling, 2);
      } else if (continues_identifier(c) || c == '.' || (c == '\'' && continues_identifier(at(1)))) {
        advance(token.spelling);
      } else {
        return;
      }
    }
  }

  void take_quoted(Token& token) {
    token.kind = Token::text;
    char quote = at();
    advance(token.spelling);
    while (position_ < source_.size() && at() != quote && at() != '\n') advance(token.spelling, at() == '\\' ? 2 : 1);
    advance(token.spelling);
  }

  void match_brackets() {
    std::vector<size_t> open;
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if (tokens_[i].kind != Token::punctuation) continue;
      char c = tokens_[i].spelling[0];
      if (c == '(' || c == '[' || c == '{') {
        open.push_back(i);
      } else if (c == ')' || c == ']' || c == '}') {
        char expected = c == ')' ? '(' : c == ']' ? '[' : '{';
        if (open.empty() || tokens_[open.back()].spelling[0] != expected) {
          tokens_.error(i, std::string("extraneous or mismatched '") + c + "'");
        }
        tokens_[i].match = open.back();
        tokens_[open.back()].match = i;
        open.pop_back();
      }
    }
    if (!open.empty()) tokens_.error(open.back(), "unterminated '" + tokens_[open.back()].spelling + "'");
  }

  const std::string& source_;
  Tokens tokens_;
  std::string blank_;
  size_t position_ = 0, file_ = 0, line_ = 1, column_ = 1;
};

}  // namespace

Tokens tokenize(const std::string& preprocessed) { return Tokenizer(preprocessed).run(); }

void Tokens::error(size_t at, const std::string& message) const {
  std::string where = "program_source";
  if (at < list.size()) {
    const Token& token = list[at];
    where = files[token.file] + ":" + std::to_string(token.line) + ":" + std::to_string(token.column);
  }
  throw CompileError(where + ": error: " + message + "\n");
}

void Tokens::erase(size_t begin, size_t end) {
  for (size_t i = begin; i < end; ++i) list[i].output.clear();
}

std::string Tokens::output(size_t begin, size_t end) const {
  std::string result;
  for (size_t i = begin; i < end; ++i) {
    if (list[i].output.empty()) continue;
    if (!result.empty() && !list[i].before.empty()) result += ' ';
    result += list[i].output;
  }
  return result;
}

std::string Tokens::output() const {
  std::string result;
  for (const Token& token : list) result += token.before + token.output;
  return result + after;
}

size_t Tokens::closing_angle(size_t open) const {
  size_t depth = 0;
  for (size_t i = open; i < list.size(); ++i) {
    const Token& token = list[i];
    // After a token that is not a name, '<' is a comparison: `sizeof(T) < 8`.
    if (token.is("<") && (i == open || list[i - 1].kind == Token::identifier)) ++depth;
    if (token.is(">") && --depth == 0) return i;
    if (token.is("(") || token.is("[") || token.is("{")) i = token.match;
    if (token.is(";")) break;
  }
  error(open, "no '>' closes this '<'");
}

}  // namespace simulator
