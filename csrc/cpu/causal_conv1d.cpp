#include "../checks/causal_conv1d.h"

#include <torch/library.h>

#include <cmath>
#include <memory>

#include "common.h"
#include "convert.h"
#include "exponential.h"
#include "slots.h"

namespace torch_gdn {
namespace {

// Channels are independent of each other: one piece of work is kChannels of them for one sequence, kTokens tokens at a
// time, as f32 with the W - 1 tokens before them: 64 KB, which the caches next to a core hold.
constexpr int64_t kChannels = 512, kTokens = 8, kLargestW = 4;
constexpr int64_t kFewColumns = 8;  // of a state that is moved as a whole

struct Piece {
  alignas(64) float rows[(kTokens + kLargestW - 1) * kChannels];
  alignas(64) float out[kTokens * kChannels];
  alignas(64) float weight[kLargestW * kChannels], bias[kChannels];
  alignas(64) float columns[kFewColumns * kChannels];  // a state
};

template <int W>
[[gnu::always_inline]] inline void convolve_rows(const float* rows, const Piece& piece, int64_t tokens, int64_t count,
                                                 float* out) {
  for (int64_t t = 0; t < tokens; ++t) {
#pragma omp simd
    for (int64_t c = 0; c < count; ++c) {
      float sum = piece.bias[c];
      for (int64_t tap = 0; tap < W; ++tap) sum += piece.weight[tap * kChannels + c] * rows[(t + tap) * kChannels + c];
      out[t * kChannels + c] = sum;
    }
  }
}

// `rows` are those of the first token's window; `count` channels.
TORCH_GDN_VECTORISED void convolve(const float* rows, const Piece& piece, int64_t W, int64_t tokens, int64_t count,
                                   float* out) {
  if (W == 4) return convolve_rows<4>(rows, piece, tokens, count, out);
  if (W == 3) return convolve_rows<3>(rows, piece, tokens, count, out);
  convolve_rows<2>(rows, piece, tokens, count, out);
}

// [count, S] <-> S rows that are kChannels apart.
template <int S>
[[gnu::always_inline]] inline void split(const float* in, int64_t count, float* out) {
#pragma omp simd
  for (int64_t c = 0; c < count; ++c) {
    for (int64_t column = 0; column < S; ++column) out[column * kChannels + c] = in[c * S + column];
  }
}

template <int S>
[[gnu::always_inline]] inline void join(const float* in, int64_t count, float* out) {
#pragma omp simd
  for (int64_t c = 0; c < count; ++c) {
    for (int64_t column = 0; column < S; ++column) out[c * S + column] = in[column * kChannels + c];
  }
}

TORCH_GDN_VECTORISED void split_columns(const float* in, int64_t count, int64_t S, float* out) {
  if (S == 4) return split<4>(in, count, out);
  if (S == 3) return split<3>(in, count, out);
  split<2>(in, count, out);
}

TORCH_GDN_VECTORISED void join_columns(const float* in, int64_t count, int64_t S, float* out) {
  if (S == 4) return join<4>(in, count, out);
  if (S == 3) return join<3>(in, count, out);
  join<2>(in, count, out);
}

TORCH_GDN_VECTORISED void silu(float* x, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) x[i] = x[i] / (1.0f + cpu::exponential(-x[i]));
}

template <typename Element>
void read_column(const Element* in, int64_t stride, int64_t count, float* out) {
  for (int64_t c = 0; c < count; ++c) out[c] = static_cast<float>(in[c * stride]);
}

template <typename Element>
void write_column(const float* in, int64_t stride, int64_t count, Element* out) {
  for (int64_t c = 0; c < count; ++c) out[c * stride] = static_cast<Element>(in[c]);
}

// Something [rows, D, columns] with any strides: states, weights, or x by channels. The tensor must outlive it.
class Columns {
 public:
  explicit Columns(const Tensor& x)
      : data_(static_cast<char*>(const_cast<void*>(x.const_data_ptr()))),  // an output is never copy-on-write
        dtype_(x.scalar_type()),
        item_size_(x.element_size()),
        columns_(x.size(2)),
        row_(x.stride(0)),
        channel_(x.stride(1)),
        column_(x.stride(2)) {}

  void read(int64_t row, int64_t channel, int64_t column, int64_t count, float* out) const {
    const char* in = at(row, channel, column);
    if (channel_ == 1) return cpu::widen(in, dtype_, count, out);
    if (dtype_ == at::kFloat) return read_column(reinterpret_cast<const float*>(in), channel_, count, out);
    if (dtype_ == at::kHalf) return read_column(reinterpret_cast<const c10::Half*>(in), channel_, count, out);
    read_column(reinterpret_cast<const c10::BFloat16*>(in), channel_, count, out);
  }

  void write(int64_t row, int64_t channel, int64_t column, int64_t count, const float* in) const {
    char* out = at(row, channel, column);
    if (channel_ == 1) return cpu::narrow(in, count, dtype_, out);
    if (dtype_ == at::kFloat) return write_column(in, channel_, count, reinterpret_cast<float*>(out));
    if (dtype_ == at::kHalf) return write_column(in, channel_, count, reinterpret_cast<c10::Half*>(out));
    write_column(in, channel_, count, reinterpret_cast<c10::BFloat16*>(out));
  }

  // All columns, into or out of rows that are kChannels apart.
  void read_all(int64_t row, int64_t channel, int64_t count, float* out) const {
    if (is_dense()) {
      alignas(64) float whole[kChannels * kLargestW];
      cpu::widen(at(row, channel, 0), dtype_, count * columns_, whole);
      return split_columns(whole, count, columns_, out);
    }
    for (int64_t column = 0; column < columns_; ++column) read(row, channel, column, count, out + column * kChannels);
  }

  void write_all(int64_t row, int64_t channel, int64_t count, const float* in) const {
    if (is_dense()) {
      alignas(64) float whole[kChannels * kLargestW];
      join_columns(in, count, columns_, whole);
      return cpu::narrow(whole, count * columns_, dtype_, at(row, channel, 0));
    }
    for (int64_t column = 0; column < columns_; ++column) write(row, channel, column, count, in + column * kChannels);
  }

 private:
  char* at(int64_t row, int64_t channel, int64_t column) const {
    return data_ + (row * row_ + channel * channel_ + column * column_) * item_size_;
  }
  bool is_dense() const { return column_ == 1 && channel_ == columns_ && columns_ >= 2 && columns_ <= kLargestW; }

  char* data_;
  at::ScalarType dtype_;
  int64_t item_size_, columns_, row_, channel_, column_;
};

// The numbers of the runs [B, T] (seq_idx).
struct Runs {
  Tensor numbers;

  explicit Runs(const optional<Tensor>& seq_idx) {
    if (seq_idx.has_value()) numbers = seq_idx->to(at::kLong).contiguous();
  }

  // Sets `kept` to the window of token t where it is of the same run, else to zero; false for a run without a number.
  bool keep(int64_t batch, int64_t t, int64_t W, const float* rows, float* kept) const {
    const int64_t* at = numbers.const_data_ptr<int64_t>() + batch * numbers.size(1);
    for (int64_t tap = 0; tap < W; ++tap) {
      const int64_t there = t - (W - 1) + tap;
      const bool is_same = there >= 0 && at[there] == at[t];
      if (is_same) std::copy_n(rows + tap * kChannels, kChannels, kept + tap * kChannels);
      if (!is_same) std::fill_n(kept + tap * kChannels, kChannels, 0.0f);
    }
    return at[t] >= 0;
  }
};

// As f32, tokens after tokens, of x [B, T, D] with any strides.
class Tokens {
 public:
  explicit Tokens(const Tensor& x) : in_rows_(x.stride(2) == 1), rows_(x.unsqueeze(2)), columns_(x.transpose(1, 2)) {}

  void read(int64_t batch, int64_t first, int64_t tokens, int64_t channel, int64_t count, float* out) const {
    for (int64_t t = 0; t < tokens; ++t, out += kChannels) {
      if (in_rows_) {
        rows_.read(batch, first + t, 0, channel, count, out);
      } else {
        columns_.read(batch, channel, first + t, count, out);
      }
    }
  }

 private:
  bool in_rows_;
  cpu::Rows rows_;
  Columns columns_;
};

struct Convolution {
  ConvolutionShape shape;
  Tokens x;
  Tensor y;
  cpu::Rows out;
  optional<Columns> state, new_state;
  std::vector<cpu::Slot> slots;
  Columns weight;  // [1, D, W]
  optional<Columns> bias;
  Runs runs;

  void load_filter(Piece& piece, int64_t channel, int64_t count) const {
    std::fill_n(piece.bias, kChannels, 0.0f);
    weight.read_all(0, channel, count, piece.weight);
    if (bias) bias->read(0, channel, 0, count, piece.bias);
  }

  void convolve_tokens(Piece& piece, int64_t batch, int64_t first, int64_t tokens, int64_t count) const {
    if (!runs.numbers.defined()) {
      convolve(piece.rows, piece, shape.W, tokens, count, piece.out);
    } else {
      alignas(64) float kept[kLargestW * kChannels];
      for (int64_t t = 0; t < tokens; ++t) {
        float* out = piece.out + t * kChannels;
        if (runs.keep(batch, first + t, shape.W, piece.rows + t * kChannels, kept)) {
          convolve(kept, piece, shape.W, 1, count, out);
        } else {
          std::fill_n(out, kChannels, 0.0f);
        }
      }
    }
    for (int64_t t = 0; shape.silu && t < tokens; ++t) silu(piece.out + t * kChannels, count);
  }

  // Channels channel .. channel + count of one sequence.
  void run(Piece& piece, const cpu::Sequence& sequence, const cpu::Slot& slot, int64_t channel, int64_t count) const {
    const bool has_state = state.has_value() && slot.has_state;
    load_filter(piece, channel, count);
    const bool moves_whole = has_state && shape.S <= kFewColumns;
    if (moves_whole) state->read_all(slot.index, channel, count, piece.columns);
    for (int64_t row = 0; row < shape.W - 1; ++row) {
      float* history = piece.rows + row * kChannels;
      const int64_t column = shape.S - (shape.W - 1) + row;
      if (moves_whole) {
        std::copy_n(piece.columns + column * kChannels, count, history);
      } else if (has_state) {
        state->read(slot.index, channel, column, count, history);
      } else {
        std::fill_n(history, kChannels, 0.0f);
      }
    }
    const int64_t last = sequence.first + sequence.length;
    for (int64_t first = sequence.first; first < last; first += kTokens) {
      const int64_t tokens = std::min(kTokens, last - first);
      x.read(sequence.batch, first, tokens, channel, count, piece.rows + (shape.W - 1) * kChannels);
      convolve_tokens(piece, sequence.batch, first, tokens, count);
      for (int64_t t = 0; t < tokens; ++t) {
        out.write(sequence.batch, first + t, 0, channel, count, piece.out + t * kChannels);
      }
      for (int64_t row = 0; row < shape.W - 1; ++row) {
        std::copy_n(piece.rows + (tokens + row) * kChannels, count, piece.rows + row * kChannels);
      }
    }
    if (new_state) write_state(piece, sequence, slot, has_state, channel, count);
  }

  void write_zeros(Piece& piece, const cpu::Sequence& sequence, int64_t channel, int64_t count) const {
    std::fill_n(piece.out, count, 0.0f);
    for (int64_t t = sequence.first; t < sequence.first + sequence.length; ++t) {
      out.write(sequence.batch, t, 0, channel, count, piece.out);
    }
  }

  // The last S of the columns before and the tokens. From left to right, so that it may lie where the state before lay.
  void write_state(Piece& piece, const cpu::Sequence& sequence, const cpu::Slot& slot, bool has_state, int64_t channel,
                   int64_t count) const {
    const bool moves_whole = shape.S <= kFewColumns;
    for (int64_t column = 0; column < shape.S; ++column) {
      const int64_t position = sequence.length - shape.S + column;
      float* values = moves_whole ? piece.columns + column * kChannels : piece.out;
      if (position >= 0) {
        x.read(sequence.batch, sequence.first + position, 1, channel, count, values);
      } else if (!has_state) {
        std::fill_n(values, count, 0.0f);
      } else if (moves_whole) {
        if (sequence.length > 0) std::copy_n(values + sequence.length * kChannels, count, values);
      } else {
        state->read(slot.index, channel, shape.S + position, count, values);
      }
      if (!moves_whole) new_state->write(slot.index, channel, column, count, values);
    }
    if (moves_whole) new_state->write_all(slot.index, channel, count, piece.columns);
  }

  void run_all(const std::vector<cpu::Sequence>& sequences) const {
    const int64_t pieces = ceil_div(shape.D, kChannels);
    const int64_t tokens = ceil_div(shape.sequence.B * shape.sequence.T, std::max<int64_t>(1, shape.sequence.N));
    const int64_t at_least = 32768 / (kChannels * std::max<int64_t>(1, tokens)) + 1;
    at::parallel_for(0, shape.sequence.N * pieces, at_least, [&](int64_t begin, int64_t end) {
      const auto piece = std::make_unique<Piece>();
      for (int64_t work = begin; work < end; ++work) {
        const int64_t n = work / pieces, channel = work % pieces * kChannels;
        const int64_t count = std::min(kChannels, shape.D - channel);
        const auto& sequence = sequences[n];
        if (slots[n].index >= 0) {
          run(*piece, sequence, slots[n], channel, count);
        } else {
          write_zeros(*piece, sequence, channel, count);
        }
      }
    });
  }
};

Convolution convolution_of(const ConvolutionShape& shape, const Tensor& x, const Tensor& weight,
                           const optional<Tensor>& bias, const optional<Tensor>& seq_idx) {
  const Tensor y = at::empty({shape.sequence.B, shape.sequence.T, shape.D}, x.options());
  return {.shape = shape,
          .x = Tokens(x),
          .y = y,
          .out = cpu::Rows(y.unsqueeze(2)),
          .state = {},
          .new_state = {},
          .slots = {},
          .weight = Columns(weight.unsqueeze(0)),
          .bias = bias.has_value() ? optional(Columns(bias->unsqueeze(0).unsqueeze(2))) : std::nullopt,
          .runs = Runs(seq_idx)};
}

std::tuple<Tensor, Tensor> causal_conv1d(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias,
                                         const optional<Tensor>& initial_state, bool output_final_state,
                                         optional<int64_t> state_width, optional<c10::string_view> activation,
                                         const optional<Tensor>& cu_seqlens, const optional<Tensor>& seq_idx) {
  const auto shape = check_causal_conv1d(x, weight, bias, initial_state, output_final_state, state_width, activation,
                                         cu_seqlens, seq_idx);
  auto convolution = convolution_of(shape, x, weight, bias, seq_idx);
  const auto options = (initial_state.has_value() ? *initial_state : x).options();
  const Tensor final_state =
      output_final_state ? at::empty({shape.sequence.N, shape.D, shape.S}, options) : at::empty({0}, options);
  if (initial_state.has_value()) convolution.state.emplace(*initial_state);
  if (output_final_state) convolution.new_state.emplace(final_state);
  convolution.slots = cpu::slots_of(shape.sequence.N, std::nullopt, std::nullopt, -1);
  convolution.run_all(cpu::sequences_of(shape.sequence, cu_seqlens));
  return {convolution.y, final_state};
}

Tensor causal_conv1d_update_(const Tensor& x, const Tensor& weight, const Tensor& state_pool,
                             const optional<Tensor>& state_indices, const optional<Tensor>& has_initial_state,
                             int64_t null_index, const optional<Tensor>& bias, optional<c10::string_view> activation,
                             const optional<Tensor>& cu_seqlens) {
  const auto shape = check_causal_conv1d_update_(x, weight, state_pool, state_indices, has_initial_state, null_index,
                                                 bias, activation, cu_seqlens);
  auto convolution = convolution_of(shape, x, weight, bias, std::nullopt);
  convolution.state.emplace(state_pool);
  convolution.new_state.emplace(state_pool);
  convolution.slots = cpu::slots_of(shape.sequence.N, state_indices, has_initial_state, null_index);
  convolution.run_all(cpu::sequences_of(shape.sequence, cu_seqlens));
  return convolution.y;
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, CPU, m) {
  m.impl("causal_conv1d", &causal_conv1d);
  m.impl("causal_conv1d_update_", &causal_conv1d_update_);
}

}  // namespace torch_gdn
