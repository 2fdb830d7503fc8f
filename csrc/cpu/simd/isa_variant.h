// Compiles vectors.h and the file TORCH_GDN_PER_ISA in the namespace TORCH_GDN_ISA. It has no include guard.
namespace torch_gdn::cpu::TORCH_GDN_ISA {
namespace {
#include "cpu/simd/vectors.h"
#include TORCH_GDN_PER_ISA
}  // namespace
}  // namespace torch_gdn::cpu::TORCH_GDN_ISA
#undef TORCH_GDN_ISA
