#include "ops/layers/causal_conv1d.h"

#include <cstring>
#include <memory>

#include "cpu/common.h"
#include "cpu/define.h"
#include "cpu/layers/kernels.h"
#include "cpu/simd/layer_kernels.h"
#include "cpu/slots.h"

namespace torch_gdn {
namespace {

using cpu::kChannels, cpu::kLargestW, cpu::kTransposedChannels, cpu::kTransposedTokens;

constexpr int64_t kTokens = 4;  // tokens at a time; each is a stream to and from memory
// The number of elements that justifies another thread. In a decoding step, elements of the states count too.
constexpr int64_t kTokenGrain = 32768, kStepGrain = 4096;
constexpr int64_t kFewColumns = 8;  // most columns of a state that moves as a whole

// The f32 data of a work item. A work item is some channels of one sequence.
struct Scratch {
  alignas(64) float weight[kLargestW * kChannels], bias[kChannels];
  alignas(64) float before[(kLargestW - 1) * kChannels];            // the tokens before the next one
  alignas(64) float columns[kFewColumns * kChannels];               // a state
  alignas(64) float rows[kTransposedTokens * kTransposedChannels];  // tokens, transposed or one by one
};

// Rows of channels of columns with any strides. These are states, weights or x. The tensor must outlive this object.
class Columns {
 public:
  // Takes the dimensions of rows, channels and columns. A dimension is nullopt if there is only one row or column.
  Columns(const Tensor& x, optional<int64_t> row, int64_t channel, optional<int64_t> column)
      : data_(static_cast<char*>(const_cast<void*>(x.const_data_ptr()))),  // an output is never copy-on-write
        dtype_(x.scalar_type()),
        item_size_(x.element_size()),
        columns_(column ? x.size(*column) : 1),
        row_(row ? x.stride(*row) : 0),
        channel_(x.stride(channel)),
        column_(column ? x.stride(*column) : 1) {}

  void read(int64_t row, int64_t channel, int64_t column, int64_t count, float* out) const {
    const char* in = at(row, channel, column);
    if (channel_ == 1) return cpu::row_kernels().upcast(in, dtype_, count, out);
    cpu::with_element(dtype_, [&]<typename Element>(Element*) {
      const auto* from = reinterpret_cast<const Element*>(in);
      for (int64_t c = 0; c < count; ++c) out[c] = static_cast<float>(from[c * channel_]);
    });
  }

  void write(int64_t row, int64_t channel, int64_t column, int64_t count, const float* in) const {
    char* out = at(row, channel, column);
    if (channel_ == 1) return cpu::row_kernels().downcast(in, count, dtype_, out);
    cpu::with_element(dtype_, [&]<typename Element>(Element*) {
      auto* to = reinterpret_cast<Element*>(out);
      for (int64_t c = 0; c < count; ++c) to[c * channel_] = static_cast<Element>(in[c]);
    });
  }

  // Reads or writes all columns. Their rows are kChannels apart.
  void read_all(int64_t row, int64_t channel, int64_t count, float* out) const {
    if (is_dense()) {
      return cpu::convolution_kernels().read_columns(at(row, channel), dtype_, count, columns_, out);
    }
    for (int64_t column = 0; column < columns_; ++column) read(row, channel, column, count, out + column * kChannels);
  }

  void write_all(int64_t row, int64_t channel, int64_t count, const float* in) const {
    if (is_dense()) {
      return cpu::convolution_kernels().write_columns(in, count, columns_, dtype_, at(row, channel));
    }
    for (int64_t column = 0; column < columns_; ++column) write(row, channel, column, count, in + column * kChannels);
  }

  char* at(int64_t row, int64_t channel, int64_t column = 0) const {
    return data_ + (row * row_ + channel * channel_ + column * column_) * item_size_;
  }

  // Returns whether a row is a dense [D, columns] of this dtype.
  bool is_dense_of(at::ScalarType dtype) const { return dtype_ == dtype && is_dense(); }
  // Returns whether each column has dense channels.
  bool has_dense_channels_of(at::ScalarType dtype) const { return dtype_ == dtype && channel_ == 1 && !is_dense(); }
  int64_t column_stride() const { return column_; }

 private:
  bool is_dense() const { return column_ == 1 && channel_ == columns_ && columns_ >= 2 && columns_ <= kLargestW; }

  char* data_;
  at::ScalarType dtype_;
  int64_t item_size_, columns_, row_, channel_, column_;
};

// seq_idx [B, T]. Undefined without seq_idx.
struct Segments {
  Tensor numbers;

  explicit Segments(const optional<Tensor>& seq_idx) {
    if (seq_idx.has_value()) numbers = seq_idx->to(at::kLong).contiguous();
  }

  bool has_segment(int64_t batch, int64_t t) const { return row(batch)[t] >= 0; }
  bool are_together(int64_t batch, int64_t t, int64_t before) const {
    return before >= 0 && row(batch)[before] == row(batch)[t];
  }

 private:
  const int64_t* row(int64_t batch) const { return numbers.const_data_ptr<int64_t>() + batch * numbers.size(1); }
};

// Returns x, or a copy of x if it is dense neither along D nor along T.
Tensor as_dense_rows_or_columns(const Tensor& x) {
  const bool in_rows = x.size(2) <= 1 || x.stride(2) == 1, in_columns = x.size(1) <= 1 || x.stride(1) == 1;
  return in_rows || in_columns ? x : x.contiguous();
}

Tensor as_dense_rows(const Tensor& x) { return x.size(2) <= 1 || x.stride(2) == 1 ? x : x.contiguous(); }

// A tensor [B, T, D] as raw memory.
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

// One call. Channels are independent of each other, and so are sequences. A work item is some channels of one sequence.
struct Call {
  const CausalConvolution<int64_t>& op;
  Tensor x, residual;  // residual is undefined if the call has no residual
  Elements in, out;
  Columns columns;  // columns of x
  optional<Columns> state, new_state;
  std::vector<cpu::Slot> slots;
  std::vector<int64_t> accepted;  // one count per sequence; empty unless states keep each token
  std::vector<cpu::Checkpoint> checkpoints;
  Columns weight;  // [1, D, W]
  optional<Columns> bias;
  Segments segments;

  bool is_channel_first() const { return in.channel_stride != 1; }
  cpu::Convolve kernel(bool from_f32) const {
    return cpu::convolution_kernels().convolve(x.scalar_type(), from_f32, op.W);
  }

  void load_filter(Scratch& scratch, int64_t channel, int64_t count) const {
    weight.read_all(0, channel, count, scratch.weight);
    if (bias) {
      bias->read(0, channel, 0, count, scratch.bias);
    } else {
      std::fill_n(scratch.bias, count, 0.0f);
    }
  }

  // Returns how many columns of a sequence's state precede its first token. It is S, or less if some tokens of the last
  // step were not accepted.
  int64_t history_end(int64_t n) const { return accepted.empty() ? op.S : accepted[n] + op.W - 2; }

  // Loads the last W - 1 columns of the history, or zeros.
  void load_before(Scratch& scratch, const cpu::Slot& slot, bool has_state, int64_t end, int64_t channel,
                   int64_t count) const {
    const bool moves_whole = has_state && op.S <= kFewColumns;
    if (moves_whole) state->read_all(slot.index, channel, count, scratch.columns);
    for (int64_t row = 0; row < op.W - 1; ++row) {
      float* before = scratch.before + row * kChannels;
      const int64_t column = end - (op.W - 1) + row;
      if (moves_whole) {
        std::copy_n(scratch.columns + column * kChannels, count, before);
      } else if (has_state) {
        state->read(slot.index, channel, column, count, before);
      } else {
        std::fill_n(before, count, 0.0f);
      }
    }
  }

  cpu::ConvolutionRows rows_of(Scratch& scratch, int64_t count) const {
    return {.in = nullptr,
            .in_stride = in.token_stride,
            .out = nullptr,
            .out_stride = out.token_stride,
            .residual = nullptr,
            .residual_stride = residual.defined() ? residual.stride(1) : 0,
            .tokens = 0,
            .channels = count,
            .silu = op.has_silu(),
            .weight = scratch.weight,
            .bias = scratch.bias,
            .before = scratch.before};
  }

  // Returns the address of a token's residual at `channel`, or null if the call has no residual.
  const void* residual_at(const cpu::Sequence& sequence, int64_t token, int64_t channel) const {
    return residual.defined() ? Elements(residual).at(sequence.batch, token, channel) : nullptr;
  }

  void convolve_rows(Scratch& scratch, const cpu::Sequence& sequence, int64_t channel, int64_t count) const {
    const auto convolve = kernel(false);
    auto rows = rows_of(scratch, count);
    for (int64_t t = sequence.first, last = t + sequence.length; t < last; t += rows.tokens) {
      rows.tokens = std::min(kTokens, last - t);
      rows.in = in.at(sequence.batch, t, channel);
      rows.out = out.at(sequence.batch, t, channel);
      rows.residual = residual_at(sequence, t, channel);
      convolve(rows);
    }
  }

  // Processes an x whose tokens are neighbours.
  void convolve_columns(Scratch& scratch, const cpu::Sequence& sequence, int64_t channel, int64_t count) const {
    const auto convolve = kernel(true);
    const auto read_transposed = cpu::convolution_kernels().read_transposed(x.scalar_type());
    auto rows = rows_of(scratch, count);
    rows.in = scratch.rows;
    rows.in_stride = kTransposedChannels;
    for (int64_t t = sequence.first, last = t + sequence.length; t < last; t += rows.tokens) {
      rows.tokens = std::min(kTransposedTokens, last - t);
      read_transposed(in.at(sequence.batch, t, channel), in.channel_stride, rows.tokens, count, scratch.rows);
      rows.out = out.at(sequence.batch, t, channel);
      rows.residual = residual_at(sequence, t, channel);
      convolve(rows);
    }
  }

  // Processes one token at a time. Tokens of other segments count as zeros, and a token without a segment gives zeros.
  void convolve_segments(Scratch& scratch, const cpu::Sequence& sequence, int64_t channel, int64_t count) const {
    const auto convolve = kernel(true);
    auto rows = rows_of(scratch, count);
    rows.tokens = 1;
    rows.in = scratch.rows;
    for (int64_t t = 0; t < sequence.length; ++t) {
      rows.out = out.at(sequence.batch, t, channel);
      if (!segments.has_segment(sequence.batch, t)) {
        std::memset(rows.out, 0, count * out.size);
        continue;
      }
      for (int64_t row = 0; row < op.W - 1; ++row) {
        const int64_t before = t - (op.W - 1) + row;
        if (segments.are_together(sequence.batch, t, before)) {
          columns.read(sequence.batch, channel, before, count, scratch.before + row * kChannels);
        } else {
          std::fill_n(scratch.before + row * kChannels, count, 0.0f);
        }
      }
      columns.read(sequence.batch, channel, t, count, scratch.rows);
      rows.residual = residual_at(sequence, t, channel);
      convolve(rows);
    }
  }

  // Returns whether one token and its states can stay in registers. All must have one dtype, and the states must be
  // dense in one order.
  bool has_step_kernel() const {
    const auto dtype = x.scalar_type();
    const auto both = [&](auto has) { return has(*new_state) && (!state || has(*state)); };
    return op.W == 4 && (op.S == 3 || op.S == 4) && !is_channel_first() && !segments.numbers.defined() && new_state &&
           (both([&](const Columns& x) { return x.is_dense_of(dtype); }) ||
            (both([&](const Columns& x) { return x.has_dense_channels_of(dtype); }) &&
             (!state || state->column_stride() == new_state->column_stride())));
  }

  void step(const Scratch& scratch, const cpu::Sequence& sequence, const cpu::Slot& slot, int64_t channel,
            int64_t count) const {
    const auto dtype = x.scalar_type();
    const cpu::ConvolutionStep step{.x = in.at(sequence.batch, sequence.first, channel),
                                    .weight = scratch.weight,
                                    .bias = scratch.bias,
                                    .before = state && slot.has_state ? state->at(slot.index, channel) : nullptr,
                                    .residual = residual_at(sequence, sequence.first, channel),
                                    .after = new_state->at(slot.index, channel),
                                    .y = out.at(sequence.batch, sequence.first, channel),
                                    .column_stride = new_state->column_stride(),
                                    .channels = count,
                                    .silu = op.has_silu()};
    const bool dense_channels = new_state->has_dense_channels_of(dtype);
    cpu::convolution_kernels().convolve_step(dtype, op.S, dense_channels)(step);
  }

  // Processes channels channel .. channel + count of sequence n. Their filter is already loaded.
  void run(Scratch& scratch, const cpu::Sequence& sequence, int64_t n, int64_t channel, int64_t count) const {
    const auto& slot = slots[n];
    const bool has_state = state.has_value() && slot.has_state;
    load_before(scratch, slot, has_state, history_end(n), channel, count);
    if (segments.numbers.defined()) {
      convolve_segments(scratch, sequence, channel, count);
    } else if (is_channel_first()) {
      convolve_columns(scratch, sequence, channel, count);
    } else {
      convolve_rows(scratch, sequence, channel, count);
    }
    if (new_state && accepted.empty()) {
      if (checkpoints[n].tokens > 0) {
        const cpu::Sequence first_tokens{sequence.batch, sequence.first, checkpoints[n].tokens};
        write_state(scratch, first_tokens, slot, checkpoints[n].index, has_state, channel, count);
        if (has_state && op.S <= kFewColumns) state->read_all(slot.index, channel, count, scratch.columns);
      }
      write_state(scratch, sequence, slot, slot.index, has_state, channel, count);
    } else if (new_state && sequence.length > 0) {
      keep_each(scratch, sequence, slot, has_state, history_end(n), channel, count);
    }
  }

  void write_zeros(const cpu::Sequence& sequence, int64_t channel, int64_t count) const {
    for (int64_t t = sequence.first; t < sequence.first + sequence.length; ++t) {
      std::memset(out.at(sequence.batch, t, channel), 0, count * out.size);
    }
  }

  // Copies from left to right, so that it may overwrite the old state.
  void write_state(Scratch& scratch, const cpu::Sequence& sequence, const cpu::Slot& slot, int64_t target,
                   bool has_state, int64_t channel, int64_t count) const {
    const bool moves_whole = op.S <= kFewColumns;
    for (int64_t column = 0; column < op.S; ++column) {
      const int64_t position = sequence.length - op.S + column;
      float* values = moves_whole ? scratch.columns + column * kChannels : scratch.rows;
      if (position >= 0) {
        columns.read(sequence.batch, channel, sequence.first + position, count, values);
      } else if (!has_state) {
        std::fill_n(values, count, 0.0f);
      } else if (moves_whole) {
        if (sequence.length > 0) std::copy_n(values + sequence.length * kChannels, count, values);
      } else {
        state->read(slot.index, channel, op.S + position, count, values);
      }
      if (!moves_whole) new_state->write(target, channel, column, count, values);
    }
    if (moves_whole) new_state->write_all(target, channel, count, scratch.columns);
  }

  // Writes the last W - 2 columns of the history, then the tokens. The next step can resume after any of them.
  void keep_each(Scratch& scratch, const cpu::Sequence& sequence, const cpu::Slot& slot, bool has_state, int64_t end,
                 int64_t channel, int64_t count) const {
    for (int64_t column = 0; column < op.W - 2 + sequence.length; ++column) {
      const int64_t position = column - (op.W - 2);
      if (position >= 0) {
        columns.read(sequence.batch, channel, sequence.first + position, count, scratch.rows);
      } else if (has_state) {
        state->read(slot.index, channel, end + position, count, scratch.rows);
      } else {
        std::fill_n(scratch.rows, count, 0.0f);
      }
      new_state->write(slot.index, channel, column, count, scratch.rows);
    }
  }

  void run_all() const {
    const auto& [B, T, N] = std::tie(op.shape.B, op.shape.T, op.shape.N);
    const auto sequences = cpu::sequences_of(op.shape, op.cu_seqlens);
    const int64_t channels = is_channel_first() ? kTransposedChannels : kChannels, groups = ceil_div(op.D, channels);
    const int64_t tokens = ceil_div(B * T, std::max<int64_t>(1, N));
    const bool has_steps = has_step_kernel();
    const int64_t grain = has_steps && tokens <= 1 ? kStepGrain : kTokenGrain;
    const int64_t at_least = grain / (channels * std::max<int64_t>(1, tokens)) + 1;
    at::parallel_for(0, N * groups, at_least, [&](int64_t begin, int64_t end) {
      thread_local const auto scratch = std::make_unique_for_overwrite<Scratch>();
      for (int64_t item = begin; item < end; ++item) {
        const int64_t n = item % N, channel = item / N * channels;
        const int64_t count = std::min(channels, op.D - channel);
        if (item == begin || n == 0) load_filter(*scratch, channel, count);
        if (slots[n].index < 0) {
          write_zeros(sequences[n], channel, count);
        } else if (has_steps && accepted.empty() && sequences[n].length == 1 && checkpoints[n].tokens == 0) {
          step(*scratch, sequences[n], slots[n], channel, count);
        } else {
          run(*scratch, sequences[n], n, channel, count);
        }
      }
    });
  }
};

Call call_of(const CausalConvolution<int64_t>& op, const optional<Tensor>& seq_idx, const StatePool& pool,
             const Tensor& y) {
  const Tensor x = as_dense_rows_or_columns(op.x);
  return {.op = op,
          .x = x,
          .residual = op.residual.has_value() ? as_dense_rows(*op.residual) : Tensor(),
          .in = Elements(x),
          .out = Elements(y),
          .columns = Columns(x, 0, 2, 1),
          .state = {},
          .new_state = {},
          .slots = cpu::slots_of(op.shape.N, pool),
          .accepted = pool.num_accepted_tokens ? cpu::accepted_counts(op.shape.N, pool) : std::vector<int64_t>(),
          .checkpoints = cpu::checkpoints_of(op.shape.N, pool),
          .weight = Columns(op.weight, std::nullopt, 0, 1),
          .bias = op.bias.has_value() ? optional(Columns(*op.bias, std::nullopt, 0, std::nullopt)) : std::nullopt,
          .segments = Segments(seq_idx)};
}

void causal_conv1d(const CausalConv1d<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [y, final_state] = outputs;
  Call call = call_of(op, op.seq_idx, {}, y);
  if (op.initial_state.has_value()) call.state.emplace(*op.initial_state, 0, 1, 2);
  if (op.output_final_state) call.new_state.emplace(final_state, 0, 1, 2);
  call.run_all();
}

}  // namespace

void cpu::causal_conv1d_update(const CausalConv1dUpdate<int64_t>& op, const Tensor& y) {
  Call call = call_of(op, std::nullopt, op.pool, op.out.value_or(y));
  call.state.emplace(op.pool.states, 0, 1, 2);
  call.new_state = call.state;
  call.run_all();
}

TORCH_LIBRARY_FRAGMENT(gdn, m) {
  cpu::define<CausalConv1d, &causal_conv1d>(m);
  cpu::define<CausalConv1dUpdate, &cpu::causal_conv1d_update>(m);
}

}  // namespace torch_gdn
