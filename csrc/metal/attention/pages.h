// Tensors to parameter blocks of the kernels of pages, and how attention's rows and keys are shared out.
#pragma once
#include "metal/parameters.h"
#include "ops/pages.h"
#include "shaders/attention/paged_attention.h"

namespace torch_gdn {

// Of pages, norms [blocks, block_size, H] too.
inline PageStrides page_strides(const Tensor& x) { return {x.stride(0), x.stride(1), x.stride(2)}; }
inline TokenStrides token_strides(const Tensor& x) { return {x.stride(0), x.stride(1)}; }

// From bounds alone, since what the tensors hold is on the device.
struct Plan {
  int64_t rows;    // of a tile
  int64_t tiles;   // of a KV head, at most
  int64_t splits;  // of the keys, at most
  int64_t least_keys;
  bool is_decode;  // by the kernel for few rows, where there is one
};
Plan plan_of(const PagedShape<>& shape, const PagedSequences<int64_t>& sequences, bool has_decode);

// Attention of q to pages, into out, both [T, HQ, D]; tensors that are read are on the device.
struct PagedCall {
  const PagedShape<>& shape;
  Plan plan;
  Tensor q, out;
  Tensor block_table, cu_seqlens, seq_lens;
  optional<Tensor> sinks;
  optional<Tensor> o_partials, m_partials, l_partials;  // of splits: [N, HK, rows, splits, D] and without D
  PagedParameters parameters;

  at::ScalarType q_type() const { return q.scalar_type(); }
  int64_t head_size() const { return shape.D; }
};

struct PagedOptions {
  optional<double> scale;
  optional<Tensor> sinks;
  bool has_decode;
};
PagedCall paged_call(const char* op, const PagedShape<>& shape, const PagedSequences<int64_t>& sequences,
                     const Tensor& q, const Tensor& out, const Tensor& keys, const Tensor& values,
                     const PagedOptions& options);

// Only where there are splits.
Launch launch_paged_attention_merge(const PagedCall& call);

}  // namespace torch_gdn
