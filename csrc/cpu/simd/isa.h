// ISA variants: gdn_kernels.cpp and layer_kernels.cpp include the kernels once for each, into a namespace of its own.
// at::vec would need a library for each. Include nothing else between BEGIN and END: its inline functions would be
// compiled for that ISA too, and the linker may keep that copy for everybody.
#pragma once

#if defined(__x86_64__) && defined(__linux__)
#include <immintrin.h>
#define TORCH_GDN_HAS_X86_ISAS 1
#else
#define TORCH_GDN_HAS_X86_ISAS 0
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

#define TORCH_GDN_INLINE [[gnu::always_inline]] inline

namespace torch_gdn::cpu {

enum class Isa { kBaseline, kAvx2, kAvx512, kAvx512Bf16 };  // each has what those before it have

// As torch chooses, so that ATEN_CPU_CAPABILITY, which limits torch, limits these as well.
Isa best_isa();

}  // namespace torch_gdn::cpu
