// The CPU kernels share these parts: chunks, and rows and states of f32 that are read from and written to tensors with
// any strides.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <atomic>
#include <memory>
#include <new>
#include <vector>

#include "cpu/simd/gdn_kernels.h"
#include "cpu/simd/row_kernels.h"
#include "cpu/slots.h"
#include "ops/chunk_shape.h"

namespace torch_gdn::cpu {

struct Chunk {
  int64_t sequence;      // from 0 to N - 1
  int64_t batch, first;  // its tokens start at x[batch, first]
  int64_t length;        // from 1 to C
  int64_t row;           // h[batch, row]
};

// Returns the chunks in the order of h, sequence by sequence.
std::vector<Chunk> chunks_of(const ChunkShape<>& s, const optional<Tensor>& cu_seqlens);

// The batch row, start and length of a sequence, packed or not.
struct Sequence {
  int64_t batch, first, length;
};
std::vector<Sequence> sequences_of(const ChunkShape<>& s, const optional<Tensor>& cu_seqlens);

// Returns the key head that a value head reads.
inline int64_t key_head_of(const ChunkShape<>& s, int64_t head) { return s.tiled ? head % s.H : head / (s.HV / s.H); }

// Calls f with a null pointer to the element type, for the three dtypes of activations.
template <typename F>
void with_element(at::ScalarType dtype, const F& f) {
  if (dtype == at::kFloat) return f(static_cast<float*>(nullptr));
  if (dtype == at::kBFloat16) return f(static_cast<c10::BFloat16*>(nullptr));
  f(static_cast<c10::Half*>(nullptr));
}

// A tensor [B, T, heads, D], or [B, T, heads] with D = 1, with any strides. It is copied if the elements of a row are
// not adjacent, which warns once if it has a name.
class Rows {
 public:
  explicit Rows(const Tensor& x, const char* name = nullptr);
  // Reads or writes the row of one token and head, as f32.
  void read(int64_t batch, int64_t token, int64_t head, float* out) const;
  void write(int64_t batch, int64_t token, int64_t head, const float* in) const;
  // Returns one head's rows from one token and column on.
  HeadRows head(int64_t batch, int64_t token, int64_t head, int64_t column = 0) const {
    return {at(batch, token, head, column), token_stride_ * item_size_, dtype_};
  }
  // Returns row i of all heads and tokens in order. `evenly_spaced` says how many of `count` rows from there on are
  // `spacing` elements apart.
  char* row(int64_t i) const {
    return is_dense_ ? data_ + i * width_ * item_size_ : at(i / heads_ / tokens_, i / heads_ % tokens_, i % heads_);
  }
  int64_t evenly_spaced(int64_t i, int64_t count) const {
    return is_dense_ ? count : std::min(count, heads_ - i % heads_);
  }
  int64_t spacing() const { return is_dense_ ? width_ : head_stride_; }
  // Reads an f32 of [B, T, heads].
  float value(int64_t batch, int64_t token, int64_t head) const {
    return *reinterpret_cast<const float*>(at(batch, token, head));
  }

 private:
  char* at(int64_t batch, int64_t token, int64_t head, int64_t column = 0) const {
    return data_ + (batch * batch_stride_ + token * token_stride_ + head * head_stride_ + column) * item_size_;
  }
  Tensor tensor_;
  char* data_;
  at::ScalarType dtype_;
  int64_t item_size_, tokens_, heads_, batch_stride_, token_stride_, head_stride_, width_;
  bool is_dense_;
};

constexpr int64_t kElementsPerCore = 16384;  // at least, for ops that compute row by row

// Returns the rows of a tensor of any number of dimensions, of which the last has the elements of a row.
Rows rows_of(const Tensor& x, const char* name);

// States [N, HV, K, V] or h [B, NT, HV, K, V], or [..., V, K] if v_first, with any strides.
class States {
 public:
  States(const Tensor& x, bool v_first);
  // Reads or writes columns first .. first + columns (of V) of one state. Rows of the tile are tile_stride floats
  // apart.
  void read(int64_t batch, int64_t row, int64_t head, int64_t first, int64_t columns, float* tile,
            int64_t tile_stride) const;
  void write(int64_t batch, int64_t row, int64_t head, int64_t first, int64_t columns, const float* tile,
             int64_t tile_stride) const;

 private:
  template <typename Element>
  Element* at(int64_t batch, int64_t row, int64_t head, int64_t column) const {
    return static_cast<Element*>(data_) + batch * batch_stride_ + row * row_stride_ + head * head_stride_ +
           column * value_stride_;
  }
  void* data_;
  at::ScalarType dtype_;
  int64_t batch_stride_, row_stride_, head_stride_, key_stride_, value_stride_, K_;
};

// Returns x, or x in f32 if Rows and States cannot read its dtype.
Tensor as_activation(const Tensor& x);

// Says where states are read and written: either in two tensors, with one state per sequence, or in a pool.
struct StateIo {
  optional<Tensor> source;
  Tensor target;            // one-dimensional if it was not requested
  std::vector<Slot> slots;  // where a sequence's state is read, and written unless there are token_slots
  TokenSlots token_slots;   // where the state after each token is written
  std::vector<Checkpoint> checkpoints;
  bool v_first;

  static StateIo per_sequence(const ChunkShape<>& s, const optional<Tensor>& initial_state, const Tensor& final_state,
                              bool v_first);
  static StateIo in_place(const ChunkShape<>& s, const StatePool& pool, bool v_first);
  bool has_null() const;
  // Returns whether all states are f32 and have rows (of V, or of K if v_first) that are a whole number of vectors.
  bool has_vector_rows(const ChunkShape<>& s) const;
  // Returns the first row of a state in one of the two tensors, from one column of V on. Sets the distance between
  // rows.
  float* rows(const Tensor& states, int64_t slot, int64_t head, int64_t column, int64_t& stride) const;
  // Reads columns of V of one state, or zeros if there is no earlier state. write() writes them back if the state is
  // kept.
  void read(int64_t sequence, int64_t head, int64_t first, int64_t columns, int64_t K, float* tile,
            int64_t tile_stride) const;
  void write(int64_t slot, int64_t head, int64_t first, int64_t columns, const float* tile, int64_t tile_stride) const;
};

// Calls f(next) on as many threads as there is work for. next() hands out the work items 0 .. count - 1, each to one
// thread, and then returns `count`. Items may differ in length.
template <typename F>
void share_work_items(int64_t count, int64_t threads, const F& f) {
  std::atomic<int64_t> handed_out = 0;
  const auto next = [&] { return std::min(handed_out.fetch_add(1, std::memory_order_relaxed), count); };
  at::parallel_for(0, std::min(count, threads), 1, [&](int64_t, int64_t) { f(next); });
}

// An array of floats with the alignment of vectors.
struct Aligned {
  struct Delete {
    void operator()(float* x) const { operator delete(x, std::align_val_t(64)); }
  };
  static std::unique_ptr<float[], Delete> floats(int64_t count) {
    void* memory = operator new(count * sizeof(float), std::align_val_t(64));  // macOS may lack the form for new[]
    return std::unique_ptr<float[], Delete>(static_cast<float*>(memory));
  }
};

}  // namespace torch_gdn::cpu
