// What the kernels on rows and the copies share with their hosts.
#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kActAndMulMostThreads = 256;  // per threadgroup

struct ActAndMulParameters {
  int32_t rows, tokens, heads;  // the rows are [B, T, H]
  int32_t D;                    // per row
  RowStrides x, up;             // x is the tensor of the gate
  int32_t threads;              // per threadgroup
  int32_t has_sigmoid;          // if 0, the gate is silu
};

GDN_CONSTANT int kL2NormRows = 4;      // per threadgroup, one per simdgroup
GDN_CONSTANT int kL2NormBlock = 1024;  // elements in the registers of a simdgroup, 32 per lane

struct L2NormParameters {
  int32_t rows, tokens, heads;  // the rows are [B, T, H]
  int32_t has_rstd;
  RowStrides x;
  int64_t D;  // elements per row
  float eps;
};

GDN_CONSTANT int kRmsNormLargestRow = 16384;

// Each row has one threadgroup. A thread owns 16 elements of the row, or more if there are 256 threads.
inline constexpr int rms_norm_threads(int D) { return D >= 4096 ? 256 : (D + 511) / 512 * 32; }

struct RmsNormParameters {
  int32_t rows, tokens, heads;  // the rows are [B, T, H]
  RowStrides x, residual;
  float eps;
  int32_t has_weight, has_residual;
  int32_t zero_centered;  // if 1, the factor is 1 + weight
  int32_t round_norm;     // if 1, rounds to x's type before the product with the weight
};

GDN_CONSTANT int kRmsNormGatedRows = 4;           // per threadgroup, one per simdgroup
GDN_CONSTANT int kRmsNormGatedLargestRow = 1024;  // a lane holds 32 elements in registers

struct RmsNormGatedParameters {
  int32_t rows, tokens, heads;  // the rows are [B, T, H]
  RowStrides x, gate;
  float eps;
  int32_t has_weight, has_sigmoid;    // if has_sigmoid is 0, the gate is silu
  int32_t round_norm, round_product;  // 1 to round to x's type before and after the product with the weight
};

GDN_CONSTANT int kRotatedRows = 4;  // heads per threadgroup, one per simdgroup

struct Rotation {
  RowStrides cos, sin;  // [B, T, 1, P]
  int32_t D, pairs;     // elements of a head; pairs to rotate
  float eps;
  int32_t has_norm, zero_centered;  // if 1, there is a norm; if 1, its factor is 1 + weight
};

struct QkNormRopeParameters {
  int32_t rows, tokens, heads;  // [B, T, HQ + HK]
  int32_t q_heads;              // HQ
  RowStrides q, k;
  RowStrides q_out, k_out;
  Rotation rotation;
};

GDN_CONSTANT int kNormBwdLargestRow = 12288;

// A thread owns 16 elements of a row. From D of 6144 on it owns up to 32, because 128 registers leave room for 384
// threads.
inline constexpr int norm_bwd_threads(int D) { return D >= 6144 ? 384 : (D + 511) / 512 * 32; }

struct NormBwdParameters {
  int32_t rows, tokens, heads;  // the rows are [B, T, H]
  RowStrides x, dy, gate, dh;
  float eps, count;  // rstd is rsqrt(sum of x^2 / count + eps)
  int32_t rows_of_group;
  int32_t has_weight, has_gate, has_sigmoid, has_dh, has_dweight;
  int32_t zero_centered;  // if 1, the factor is 1 + weight
};

GDN_CONSTANT int kSumRows = 8;  // simdgroups per threadgroup

struct SumPartialsParameters {
  int32_t rows, elements;  // of partials [rows, elements, columns]
  int32_t columns;
};

GDN_CONSTANT int kCopyThreads = 256;  // per threadgroup
GDN_CONSTANT int kCopyUnits = 4;      // per thread, which loads all of them before it stores one

struct BatchCopyParameters {
  int64_t pool_bytes;
  int64_t source_stride, destination_stride, size_stride;  // strides of the three vectors, in their elements
  int32_t source_bytes, destination_bytes, size_bytes;     // size of a number: 4 or 8
  int32_t misalignment;                                    // the pool's address modulo 16
  OpName op;
};

GDN_CONSTANT int kHostCopyThreads = 256;  // per threadgroup

struct CopyFromHostParameters {
  int64_t first;  // first byte of dst to write
  int32_t bytes;
};
