// Turns tensors into parameter blocks for kernels that use pages, and divides rows and keys among threadgroups.
#pragma once
#include "metal/parameters.h"
#include "ops/pages.h"
#include "shaders/attention/paged_attention.h"

namespace torch_gdn {

// Also takes the norms of pages, [blocks, block_size, H].
inline PageStrides page_strides(const Tensor& x) { return {x.stride(0), x.stride(1), x.stride(2)}; }
inline TokenStrides token_strides(const Tensor& x) { return {x.stride(0), x.stride(1)}; }

// Sets the parameters that a kernel needs to find the tokens of sequences in pages. The tensors are on the device.
void set_sequences(PagedParameters& parameters, const PagedShape<>& shape, const PagedSequences<int64_t>& sequences,
                   const Tensor& block_table, const Tensor& cu_seqlens, const Tensor& seq_lens);

// Depends only on shapes and upper bounds, because the contents of the tensors are on the device.
struct Plan {
  int64_t rows;    // rows per tile
  int64_t tiles;   // most tiles of a KV head
  int64_t splits;  // most splits of the keys
  int64_t least_keys;

  bool is_decode() const { return rows == kDecodeRows; }  // true if all rows of a sequence are in one tile
};

// Attention of q to pages, written to `out`. Both are [T, HQ, D]. All tensors that the kernels read are on the device.
struct PagedCall {
  const PagedShape<>& shape;
  Plan plan;
  Tensor q, out;
  Tensor block_table, cu_seqlens, seq_lens;
  optional<Tensor> sinks;
  optional<Tensor> o_partials, m_partials, l_partials;  // o_partials are [N, HK, rows, splits, D]; the others have no D
  PagedParameters parameters;

  at::ScalarType q_type() const { return q.scalar_type(); }
  int64_t head_size() const { return shape.D; }
};

struct PagedOptions {
  optional<double> scale;
  optional<Tensor> sinks;
};
PagedCall paged_call(const char* op, const PagedShape<>& shape, const PagedSequences<int64_t>& sequences,
                     const Tensor& q, const Tensor& out, const Tensor& keys, const Tensor& values,
                     const PagedOptions& options);

// Call this only if the keys are split.
Launch launch_paged_attention_merge(const PagedCall& call);

}  // namespace torch_gdn
