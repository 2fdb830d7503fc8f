// Between f32, in which the CPU kernels compute, and the dtypes of tensors: loops that every compiler vectorises.
#pragma once
#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

namespace torch_gdn::cpu {

void widen(const c10::BFloat16* in, int64_t count, float* out);
void widen(const c10::Half* in, int64_t count, float* out);
void narrow(const float* in, int64_t count, c10::BFloat16* out);
void narrow(const float* in, int64_t count, c10::Half* out);

// Elements of one of the three dtypes of activations.
void widen(const void* in, at::ScalarType dtype, int64_t count, float* out);
void narrow(const float* in, int64_t count, at::ScalarType dtype, void* out);

// What narrow and widen leave of x.
void round_to(at::ScalarType dtype, float* x, int64_t count);

}  // namespace torch_gdn::cpu
