#include "ops/layers/causal_conv1d.h"

#include <torch/library.h>

#include <cstring>
#include <memory>

#include "cpu/common.h"
#include "cpu/convert.h"
#include "cpu/outputs.h"
#include "cpu/simd/layer_kernels.h"
#include "cpu/slots.h"

namespace torch_gdn {
namespace {

using cpu::kChannels, cpu::kLargestW, cpu::kTransposedChannels, cpu::kTransposedTokens;

// Channels are independent of each other: one work_item of work is some channels of one sequence, kTokens tokens at a time,
// whose rows are then as many streams in and out of memory.
constexpr int64_t kTokens = 4;
constexpr int64_t kFewColumns = 8;  // of a state that is moved as a whole

struct Piece {
  alignas(64) float weight[kLargestW * kChannels], bias[kChannels];
  alignas(64) float before[(kLargestW - 1) * kChannels];    // the tokens before the next one
  alignas(64) float columns[kFewColumns * kChannels];       // a state
  alignas(64) float rows[kTransposedTokens * kTransposedChannels];  // tokens that were transposed or are looked at singly
};

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

  char* at(int64_t row, int64_t channel, int64_t column = 0) const {
    return data_ + (row * row_ + channel * channel_ + column * column_) * item_size_;
  }

  // Whether they are of a dtype, and a row's columns, and then the next row's, lie next to each other.
  bool are(at::ScalarType dtype, int64_t columns) const {
    return dtype_ == dtype && columns_ == columns && (columns == 1 || column_ == 1) && channel_ == columns;
  }

 private:
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

  // Whether token t has a run, and which tokens before it are of the same one.
  bool has_run(int64_t batch, int64_t t) const { return row(batch)[t] >= 0; }
  bool are_together(int64_t batch, int64_t t, int64_t before) const {
    return before >= 0 && row(batch)[before] == row(batch)[t];
  }

 private:
  const int64_t* row(int64_t batch) const { return numbers.const_data_ptr<int64_t>() + batch * numbers.size(1); }
};

// x itself, or a copy of one whose elements lie next to each other neither along D nor along T.
Tensor in_rows_or_columns(const Tensor& x) {
  const bool in_rows = x.size(2) <= 1 || x.stride(2) == 1, in_columns = x.size(1) <= 1 || x.stride(1) == 1;
  return in_rows || in_columns ? x : x.contiguous();
}

// [B, T, D] as raw memory.
struct Elements {
  char* data;
  int64_t size, batch_stride, token_stride, channel_stride;

  explicit Elements(const Tensor& x)
      : data(static_cast<char*>(const_cast<void*>(x.const_data_ptr()))),  // an output is never copy-on-write
        size(x.element_size()),
        batch_stride(x.stride(0)),
        token_stride(x.stride(1)),
        channel_stride(x.size(2) <= 1 ? 1 : x.stride(2)) {}
  char* at(int64_t batch, int64_t token, int64_t channel) const {
    return data + (batch * batch_stride + token * token_stride + channel * channel_stride) * size;
  }
};

struct Convolution {
  ConvolutionShape shape;
  Tensor x, y;
  Elements in, out;
  Columns columns;  // of x
  optional<Columns> state, new_state;
  std::vector<cpu::Slot> slots;
  Columns weight;  // [1, D, W]
  optional<Columns> bias;
  Runs runs;

  bool is_turned() const { return in.channel_stride != 1; }
  cpu::Convolve kernel(bool staged) const { return cpu::convolve_kernel(x.scalar_type(), staged, shape.W, shape.silu); }

  void load_filter(Piece& work_item, int64_t channel, int64_t count) const {
    weight.read_all(0, channel, count, work_item.weight);
    if (bias) {
      bias->read(0, channel, 0, count, work_item.bias);
    } else {
      std::fill_n(work_item.bias, count, 0.0f);
    }
  }

  // The state's last W - 1 columns, or zeros.
  void load_before(Piece& work_item, const cpu::Slot& slot, bool has_state, int64_t channel, int64_t count) const {
    const bool moves_whole = has_state && shape.S <= kFewColumns;
    if (moves_whole) state->read_all(slot.index, channel, count, work_item.columns);
    for (int64_t row = 0; row < shape.W - 1; ++row) {
      float* before = work_item.before + row * kChannels;
      const int64_t column = shape.S - (shape.W - 1) + row;
      if (moves_whole) {
        std::copy_n(work_item.columns + column * kChannels, count, before);
      } else if (has_state) {
        state->read(slot.index, channel, column, count, before);
      } else {
        std::fill_n(before, count, 0.0f);
      }
    }
  }

  cpu::ConvolutionRows rows_of(Piece& work_item, int64_t count) const {
    return {.in = nullptr,
            .in_stride = in.token_stride,
            .out = nullptr,
            .out_stride = out.token_stride,
            .tokens = 0,
            .channels = count,
            .weight = work_item.weight,
            .bias = work_item.bias,
            .before = work_item.before};
  }

  void convolve_rows(Piece& work_item, const cpu::Sequence& sequence, int64_t channel, int64_t count) const {
    const auto convolve = kernel(false);
    auto rows = rows_of(work_item, count);
    for (int64_t t = sequence.first, last = t + sequence.length; t < last; t += rows.tokens) {
      rows.tokens = std::min(kTokens, last - t);
      rows.in = in.at(sequence.batch, t, channel);
      rows.out = out.at(sequence.batch, t, channel);
      convolve(rows);
    }
  }

  // Tokens that lie next to each other are first transposed into rows.
  void convolve_columns(Piece& work_item, const cpu::Sequence& sequence, int64_t channel, int64_t count) const {
    const auto convolve = kernel(true);
    const auto read_transposed = cpu::read_transposed_kernel(x.scalar_type());
    auto rows = rows_of(work_item, count);
    rows.in = work_item.rows;
    rows.in_stride = kTransposedChannels;
    for (int64_t t = sequence.first, last = t + sequence.length; t < last; t += rows.tokens) {
      rows.tokens = std::min(kTransposedTokens, last - t);
      read_transposed(in.at(sequence.batch, t, channel), in.channel_stride, rows.tokens, count, work_item.rows);
      rows.out = out.at(sequence.batch, t, channel);
      convolve(rows);
    }
  }

  // One token at a time: of those before it, the ones of its own run; zeros for a token without a run.
  void convolve_runs(Piece& work_item, const cpu::Sequence& sequence, int64_t channel, int64_t count) const {
    const auto convolve = kernel(true);
    auto rows = rows_of(work_item, count);
    rows.tokens = 1;
    rows.in = work_item.rows;
    for (int64_t t = 0; t < sequence.length; ++t) {
      rows.out = out.at(sequence.batch, t, channel);
      if (!runs.has_run(sequence.batch, t)) {
        std::memset(rows.out, 0, count * out.size);
        continue;
      }
      for (int64_t row = 0; row < shape.W - 1; ++row) {
        const int64_t before = t - (shape.W - 1) + row;
        if (runs.are_together(sequence.batch, t, before)) {
          columns.read(sequence.batch, channel, before, count, work_item.before + row * kChannels);
        } else {
          std::fill_n(work_item.before + row * kChannels, count, 0.0f);
        }
      }
      columns.read(sequence.batch, channel, t, count, work_item.rows);
      convolve(rows);
    }
  }

  // Whether tokens are convolved one by one, in registers: all of one dtype, and dense.
  bool takes_steps() const {
    const auto dtype = x.scalar_type();
    return shape.W == 4 && (shape.S == 3 || shape.S == 4) && !is_turned() && !runs.numbers.defined() &&
           weight.are(dtype, 4) && (!bias || bias->are(dtype, 1)) && (!state || state->are(dtype, shape.S)) &&
           new_state && new_state->are(dtype, shape.S);
  }

  void step(const cpu::Sequence& sequence, const cpu::Slot& slot, int64_t channel, int64_t count) const {
    const cpu::ConvolutionStep step{.x = in.at(sequence.batch, sequence.first, channel),
                                    .weight = weight.at(0, channel),
                                    .bias = bias ? bias->at(0, channel) : nullptr,
                                    .before = state && slot.has_state ? state->at(slot.index, channel) : nullptr,
                                    .after = new_state->at(slot.index, channel),
                                    .y = out.at(sequence.batch, sequence.first, channel),
                                    .channels = count};
    cpu::convolve_step_kernel(x.scalar_type(), shape.S, shape.silu)(step);
  }

  // Channels channel .. channel + count of one sequence.
  void run(Piece& work_item, const cpu::Sequence& sequence, const cpu::Slot& slot, int64_t channel, int64_t count) const {
    const bool has_state = state.has_value() && slot.has_state;
    load_filter(work_item, channel, count);
    load_before(work_item, slot, has_state, channel, count);
    if (runs.numbers.defined()) {
      convolve_runs(work_item, sequence, channel, count);
    } else if (is_turned()) {
      convolve_columns(work_item, sequence, channel, count);
    } else {
      convolve_rows(work_item, sequence, channel, count);
    }
    if (new_state) write_state(work_item, sequence, slot, has_state, channel, count);
  }

  void write_zeros(const cpu::Sequence& sequence, int64_t channel, int64_t count) const {
    for (int64_t t = sequence.first; t < sequence.first + sequence.length; ++t) {
      std::memset(out.at(sequence.batch, t, channel), 0, count * out.size);
    }
  }

  // The last S of the columns before and the tokens. From left to right, so that it may lie where the state before lay.
  void write_state(Piece& work_item, const cpu::Sequence& sequence, const cpu::Slot& slot, bool has_state, int64_t channel,
                   int64_t count) const {
    const bool moves_whole = shape.S <= kFewColumns;
    for (int64_t column = 0; column < shape.S; ++column) {
      const int64_t position = sequence.length - shape.S + column;
      float* values = moves_whole ? work_item.columns + column * kChannels : work_item.rows;
      if (position >= 0) {
        columns.read(sequence.batch, channel, sequence.first + position, count, values);
      } else if (!has_state) {
        std::fill_n(values, count, 0.0f);
      } else if (moves_whole) {
        if (sequence.length > 0) std::copy_n(values + sequence.length * kChannels, count, values);
      } else {
        state->read(slot.index, channel, shape.S + position, count, values);
      }
      if (!moves_whole) new_state->write(slot.index, channel, column, count, values);
    }
    if (moves_whole) new_state->write_all(slot.index, channel, count, work_item.columns);
  }

  void run_all(const std::vector<cpu::Sequence>& sequences) const {
    const int64_t at_once = is_turned() ? kTransposedChannels : kChannels, work_items = ceil_div(shape.D, at_once);
    const int64_t tokens = ceil_div(shape.sequence.B * shape.sequence.T, std::max<int64_t>(1, shape.sequence.N));
    const int64_t at_least = 32768 / (at_once * std::max<int64_t>(1, tokens)) + 1;
    const bool steps = takes_steps();
    at::parallel_for(0, shape.sequence.N * work_items, at_least, [&](int64_t begin, int64_t end) {
      const auto work_item = std::make_unique_for_overwrite<Piece>();
      for (int64_t work = begin; work < end; ++work) {
        const int64_t n = work / work_items, channel = work % work_items * at_once;
        const int64_t count = std::min(at_once, shape.D - channel);
        if (slots[n].index >= 0 && steps && sequences[n].length == 1) {
          step(sequences[n], slots[n], channel, count);
        } else if (slots[n].index >= 0) {
          run(*work_item, sequences[n], slots[n], channel, count);
        } else {
          write_zeros(sequences[n], channel, count);
        }
      }
    });
  }
};

Convolution convolution_of(const ConvolutionShape& shape, const Tensor& x_any, const Tensor& weight,
                           const optional<Tensor>& bias, const optional<Tensor>& seq_idx) {
  const Tensor x = in_rows_or_columns(x_any);
  const Tensor y = cpu::empty_output({shape.sequence.B, shape.sequence.T, shape.D}, x.options());
  return {.shape = shape,
          .x = x,
          .y = y,
          .in = Elements(x),
          .out = Elements(y),
          .columns = Columns(x.transpose(1, 2)),
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
