#include "cpu/common.h"

#include <algorithm>

#include "ops/indices.h"

namespace torch_gdn::cpu {

// Looked up once, because Rows asks for them for every row, and not while the library loads, because best_isa() may
// throw.
static const RowKernels& kernels() {
  static const RowKernels& kernels = row_kernels();
  return kernels;
}

std::vector<Sequence> sequences_of(const ChunkShape<>& s, const optional<Tensor>& cu_seqlens) {
  std::vector<Sequence> sequences(s.N);
  if (!s.packed) {
    for (int64_t n = 0; n < s.N; ++n) sequences[n] = {n, 0, s.T};
    return sequences;
  }
  const Tensor boundaries = cu_seqlens->cpu();
  const Indices at(boundaries);
  for (int64_t n = 0; n < s.N; ++n) sequences[n] = {0, at[n], at[n + 1] - at[n]};
  return sequences;
}

std::vector<Chunk> chunks_of(const ChunkShape<>& s, const optional<Tensor>& cu_seqlens) {
  std::vector<Chunk> chunks;
  const auto sequences = sequences_of(s, cu_seqlens);
  for (int64_t n = 0; n < s.N; ++n) {
    const auto& [batch, first, length] = sequences[n];
    const int64_t row = s.packed ? static_cast<int64_t>(chunks.size()) : 0;
    for (int64_t t = 0; t < length; t += s.C) {
      chunks.push_back({n, batch, first + t, std::min(s.C, length - t), row + t / s.C});
    }
  }
  return chunks;
}

namespace {

// Uses blocks of 16 x 16, which keep both sides of a transposing copy in cache.
template <typename In, typename Out>
void copy_matrix(const In* in, int64_t in_row, int64_t in_column, Out* out, int64_t out_row, int64_t out_column,
                 int64_t rows, int64_t columns) {
  constexpr int64_t block = 16;
  for (int64_t i0 = 0; i0 < rows; i0 += block) {
    for (int64_t j0 = 0; j0 < columns; j0 += block) {
      for (int64_t i = i0; i < std::min(rows, i0 + block); ++i) {
        for (int64_t j = j0; j < std::min(columns, j0 + block); ++j) {
          out[i * out_row + j * out_column] = static_cast<Out>(in[i * in_row + j * in_column]);
        }
      }
    }
  }
}

}  // namespace

Rows::Rows(const Tensor& x, const char* name)
    : tensor_(x.dim() == 4 ? unit_last_stride(x, name) : x),
      data_(static_cast<char*>(const_cast<void*>(tensor_.const_data_ptr()))),  // an output is never copy-on-write
      dtype_(x.scalar_type()),
      item_size_(tensor_.element_size()),
      tokens_(x.size(1)),
      heads_(x.size(2)),
      batch_stride_(tensor_.stride(0)),
      token_stride_(tensor_.stride(1)),
      head_stride_(tensor_.stride(2)),
      width_(x.dim() == 4 ? x.size(3) : 1),
      is_dense_(tensor_.is_contiguous()) {}

Rows rows_of(const Tensor& x, const char* name) {
  Tensor rows = unit_last_stride(x, name);
  while (rows.dim() < 4) rows = rows.unsqueeze(0);
  return Rows(rows.dim() > 4 ? rows.reshape({1, -1, 1, x.size(-1)}) : rows);
}

void Rows::read(int64_t batch, int64_t token, int64_t head, float* out) const {
  kernels().upcast(at(batch, token, head), dtype_, width_, out);
}

void Rows::write(int64_t batch, int64_t token, int64_t head, const float* in) const {
  kernels().downcast(in, width_, dtype_, at(batch, token, head));
}

States::States(const Tensor& x, bool v_first)
    : data_(const_cast<void*>(x.const_data_ptr())),
      dtype_(x.scalar_type()),
      batch_stride_(x.dim() == 5 ? x.stride(0) : 0),
      row_stride_(x.stride(-4)),
      head_stride_(x.stride(-3)),
      key_stride_(x.stride(v_first ? -1 : -2)),
      value_stride_(x.stride(v_first ? -2 : -1)),
      K_(x.size(v_first ? -1 : -2)) {}

void States::read(int64_t batch, int64_t row, int64_t head, int64_t first, int64_t columns, float* tile,
                  int64_t tile_stride) const {
  with_element(dtype_, [&]<typename Element>(Element*) {
    copy_matrix(at<Element>(batch, row, head, first), key_stride_, value_stride_, tile, tile_stride, 1, K_, columns);
  });
}

void States::write(int64_t batch, int64_t row, int64_t head, int64_t first, int64_t columns, const float* tile,
                   int64_t tile_stride) const {
  with_element(dtype_, [&]<typename Element>(Element*) {
    copy_matrix(tile, tile_stride, 1, at<Element>(batch, row, head, first), key_stride_, value_stride_, K_, columns);
  });
}

StateIo StateIo::per_sequence(const ChunkShape<>& s, const optional<Tensor>& initial_state, const Tensor& final_state,
                              bool v_first) {
  StateIo state_io{initial_state, final_state, slots_of(s.N, {}), {}, checkpoints_of(s.N, {}), v_first};
  if (initial_state) state_io.source = as_activation(*initial_state);
  return state_io;
}

StateIo StateIo::in_place(const ChunkShape<>& s, const StatePool& pool, bool v_first) {
  return {pool.states, pool.states, slots_of(s.N, pool), token_slots_of(s.N, pool), checkpoints_of(s.N, pool), v_first};
}

bool StateIo::has_null() const {
  return std::ranges::any_of(slots, [](const Slot& slot) { return slot.index < 0; });
}

bool StateIo::has_vector_rows(const ChunkShape<>& s) const {
  const auto fits = [&](const Tensor& x) { return x.scalar_type() == at::kFloat && x.stride(-1) == 1; };
  const bool whole = v_first ? s.K % 16 == 0 && s.V % 4 == 0 : s.V % kColumns == 0;
  return whole && (!source || fits(*source)) && (target.dim() == 1 || fits(target));
}

float* StateIo::rows(const Tensor& states, int64_t slot, int64_t head, int64_t column, int64_t& stride) const {
  stride = states.stride(-2);
  auto* data = const_cast<float*>(states.const_data_ptr<float>());  // neither a pool nor a new tensor is copy-on-write
  return data + slot * states.stride(0) + head * states.stride(1) + column * (v_first ? stride : 1);
}

void StateIo::read(int64_t sequence, int64_t head, int64_t first, int64_t columns, int64_t K, float* tile,
                   int64_t tile_stride) const {
  const auto& [index, has_state] = slots[sequence];
  if (source && index >= 0 && has_state) {
    States(*source, v_first).read(0, index, head, first, columns, tile, tile_stride);
    return;
  }
  for (int64_t i = 0; i < K; ++i) std::fill(tile + i * tile_stride, tile + i * tile_stride + columns, 0.0f);
}

void StateIo::write(int64_t slot, int64_t head, int64_t first, int64_t columns, const float* tile,
                    int64_t tile_stride) const {
  if (target.dim() == 1 || slot < 0) return;
  States(target, v_first).write(0, slot, head, first, columns, tile, tile_stride);
}

Tensor as_activation(const Tensor& x) {
  const auto dtype = x.scalar_type();
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf ? x : x.to(at::kFloat);
}

}  // namespace torch_gdn::cpu
