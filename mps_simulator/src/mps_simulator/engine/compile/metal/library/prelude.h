// The Metal library as a precompiled header. Metal programs are compiled as C++ for OpenCL for the host's processor.
// This is clang's only mode in which address spaces work with templates, overloads and member functions. On the host,
// all address spaces are one memory:
//   thread       __private
//   device       __local
//   threadgroup  __global_device
//   constant     const __global     the only space for program-scope variables, and the only one that `this` may point
//   to
// No space converts to another, with one exception: a threadgroup pointer becomes a constant pointer unnoticed.
#pragma once
#pragma clang system_header
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable

#define thread __private
#define device __local
#define threadgroup __attribute__((opencl_global_device))
#define constant const __global

// clang-format off: each header uses those before it
#include "scalars.h"
#include "traits.h"
#include "vector.h"
#include "math.h"
#include "integer.h"
#include "collective.h"
#include "simdgroup.h"
#include "simdgroup_matrix.h"
#include "atomic.h"
#include "compute.h"
#include "intrinsics.h"
#include "entry.h"
// clang-format on

#undef thread
#undef device
#undef threadgroup
#undef constant
