// Compiles the file TORCH_GDN_PER_ISA once per ISA variant, in a namespace of its own, after vectors.h. It has no
// include guard. That file has no guard either, and may include nothing: the inline functions of a header would be
// compiled for that ISA, and the linker may keep that copy for all callers. The unnamed namespaces keep the variants of
// one file apart from those of another file. TORCH_GDN_HAS_BF16_VARIANTS adds AVX-512 with products of bf16, and AMX
// with the same products; on arm64 it adds bfmmla.
#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <bit>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "cpu/simd/isa.h"

#define TORCH_GDN_INLINE [[gnu::always_inline]] inline

// Vectors are parameters only of functions that are always inlined, so no caller depends on how they are passed.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

#define TORCH_GDN_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define TORCH_GDN_BEGIN_ISA(name) \
  TORCH_GDN_PRAGMA(clang attribute push(__attribute__((target(name))), apply_to = function))
#define TORCH_GDN_END_ISA TORCH_GDN_PRAGMA(clang attribute pop)
#else
#define TORCH_GDN_BEGIN_ISA(name) TORCH_GDN_PRAGMA(GCC push_options) TORCH_GDN_PRAGMA(GCC target(name))
#define TORCH_GDN_END_ISA TORCH_GDN_PRAGMA(GCC pop_options)
#endif

#if TORCH_GDN_HAS_X86_ISAS
#include <immintrin.h>

#define TORCH_GDN_REGISTERS 32
#define TORCH_GDN_LANES 16
#ifdef TORCH_GDN_HAS_BF16_VARIANTS
#define TORCH_GDN_ISA_HAS_BF16 1
#define TORCH_GDN_ISA_HAS_AMX 1
#define TORCH_GDN_ISA amx
TORCH_GDN_BEGIN_ISA("arch=x86-64-v4,avx512bf16,amx-tile,amx-bf16")
#include "cpu/simd/isa_variant.h"
TORCH_GDN_END_ISA
#undef TORCH_GDN_ISA_HAS_AMX

#define TORCH_GDN_ISA avx512_bf16
TORCH_GDN_BEGIN_ISA("arch=x86-64-v4,avx512bf16")
#include "cpu/simd/isa_variant.h"
TORCH_GDN_END_ISA
#undef TORCH_GDN_ISA_HAS_BF16
#endif

#define TORCH_GDN_ISA avx512
TORCH_GDN_BEGIN_ISA("arch=x86-64-v4")
#include "cpu/simd/isa_variant.h"
TORCH_GDN_END_ISA
#undef TORCH_GDN_LANES
#undef TORCH_GDN_REGISTERS

#define TORCH_GDN_REGISTERS 16
#define TORCH_GDN_LANES 8
#define TORCH_GDN_ISA avx2
TORCH_GDN_BEGIN_ISA("arch=x86-64-v3")
#include "cpu/simd/isa_variant.h"
TORCH_GDN_END_ISA
#undef TORCH_GDN_LANES
#undef TORCH_GDN_REGISTERS
#endif

#if TORCH_GDN_HAS_ARM_ISAS && defined(TORCH_GDN_HAS_BF16_VARIANTS)
#include <arm_neon.h>

#define TORCH_GDN_REGISTERS 32
#define TORCH_GDN_LANES 4
#define TORCH_GDN_ISA_HAS_BFMMLA 1
#define TORCH_GDN_ISA bfmmla
TORCH_GDN_BEGIN_ISA("arch=armv8.2-a+bf16")
#include "cpu/simd/isa_variant.h"
TORCH_GDN_END_ISA
#undef TORCH_GDN_ISA_HAS_BFMMLA
#undef TORCH_GDN_LANES
#undef TORCH_GDN_REGISTERS
#endif

// Every processor of this kind has these instructions.
#if defined(__x86_64__)
#define TORCH_GDN_REGISTERS 16
#else
#define TORCH_GDN_REGISTERS 32
#endif
#define TORCH_GDN_LANES 4
#define TORCH_GDN_ISA baseline
#include "cpu/simd/isa_variant.h"
