// The parts of the source transformation that need no parser.
#pragma once
#include <cstdint>

#include "tokens.h"

namespace simulator {

bool is_address_space(const Token& token);

// Rejects what clang's C++ for OpenCL accepts and Metal does not.
void check_words(const Tokens& tokens, uint32_t language_version);

// Rewrites address spaces, literals, swizzles, names that are keywords only in OpenCL, and string literals.
void rewrite_words(Tokens& tokens);

}  // namespace simulator
