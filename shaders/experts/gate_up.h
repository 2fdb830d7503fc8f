// The two gate-and-up kernels share this code.
#pragma once
#include "experts/parameters.h"
#include "experts/weights.h"

METAL_FUNC float silu_product(float gate, float up) { return gate / (1.0f + exp(-gate)) * up; }
