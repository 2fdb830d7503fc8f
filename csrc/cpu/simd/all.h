// All kernels of one instruction set, in the order in which they need each other.
// clang-format off
#include "cpu/simd/products.h"
#include "cpu/simd/rows.h"
#include "cpu/simd/chunk.h"
#include "cpu/simd/recurrent.h"
// clang-format on
