// The parts of the source transformation that look at tokens and their neighbours only.
#pragma once
#include <cstdint>

#include "tokens.h"

namespace simulator {

// `device`, `threadgroup`, `constant` or `thread`.
bool is_address_space(const Token& token);

// Refuses what Metal does not have and clang's C++ for OpenCL would take.
void check_words(const Tokens& tokens, uint32_t language_version);

// Address spaces, literals, swizzles, names that are keywords of OpenCL only, text.
void rewrite_words(Tokens& tokens);

}  // namespace simulator
