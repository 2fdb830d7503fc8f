#include "ops/layers/causal_conv1d.h"

#include <cstring>
#include <memory>

#include "cpu/common.h"
#include "cpu/define.h"
#include "cpu/layers/kernels.h"
#include "cpu/simd/layer_kernels.h"

namespace torch_gdn::cpu {
namespace {

constexpr int64_t kTokensAtOnce = 4;  // each is a stream to and from memory
// The number of elements that justifies another thread. In a decoding step, elements of the states count too.
constexpr int64_t kTokenGrain = 32768, kStepGrain = 4096;

// The f32 data of a work item.
struct Scratch {
  alignas(64) float weight[kLargestW * kChannels], bias[kChannels];
  alignas(64) float before[(kLargestW - 1) * kChannels];            // the tokens before the next one
  alignas(64) float rows[kTransposedTokens * kTransposedChannels];  // tokens, transposed or one by one
  std::vector<float> old_state, new_state;                          // [S, kChannels]
};

// Rows of channels of columns with any strides. These are states, weights, or x with its tokens as columns. The tensor
// must outlive this object.
class Columns {
 public:
  // Takes the dimensions of rows, channels and columns. A dimension is nullopt if there is only one row or column.
  Columns(const Tensor& x, optional<int64_t> row, int64_t channel, optional<int64_t> column)
      : data_(static_cast<char*>(const_cast<void*>(x.const_data_ptr()))),  // an output is never copy-on-write
        dtype_(x.scalar_type()),
        item_size_(x.element_size()),
        columns_(column ? x.size(*column) : 1),
        row_(row ? x.stride(*row) : 0),
        channel_(x.size(channel) <= 1 ? 1 : x.stride(channel)),
        column_(column ? x.stride(*column) : 1) {}

  void read(int64_t row, int64_t channel, int64_t column, int64_t count, float* out) const {
    const char* in = at(row, channel, column);
    if (channel_ == 1) return row_kernels().upcast(in, dtype_, count, out);
    with_element(dtype_, [&]<typename Element>(Element*) {
      const auto* from = reinterpret_cast<const Element*>(in);
      for (int64_t c = 0; c < count; ++c) out[c] = static_cast<float>(from[c * channel_]);
    });
  }

  void write(int64_t row, int64_t channel, int64_t column, int64_t count, const float* in) const {
    char* out = at(row, channel, column);
    if (channel_ == 1) return row_kernels().downcast(in, count, dtype_, out);
    with_element(dtype_, [&]<typename Element>(Element*) {
      auto* to = reinterpret_cast<Element*>(out);
      for (int64_t c = 0; c < count; ++c) to[c * channel_] = static_cast<Element>(in[c]);
    });
  }

  // Reads or writes all columns. Their rows are kChannels apart.
  void read_all(int64_t row, int64_t channel, int64_t count, float* out) const {
    if (is_dense()) return convolution_kernels().read_columns(at(row, channel), dtype_, count, columns_, out);
    for (int64_t column = 0; column < columns_; ++column) read(row, channel, column, count, out + column * kChannels);
  }

  void write_all(int64_t row, int64_t channel, int64_t count, const float* in) const {
    if (is_dense()) return convolution_kernels().write_columns(in, count, columns_, dtype_, at(row, channel));
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
  int64_t channel_stride() const { return channel_; }

 private:
  bool is_dense() const { return column_ == 1 && channel_ == columns_ && columns_ >= 2 && columns_ <= kLargestW; }

  char* data_;
  at::ScalarType dtype_;
  int64_t item_size_, columns_, row_, channel_, column_;
};

Tensor as_dense_rows(const Tensor& x) { return x.size(2) <= 1 || x.stride(2) == 1 ? x : x.contiguous(); }

// Returns x, or a copy of x if it is dense neither along D nor along T.
Tensor as_dense_rows_or_columns(const Tensor& x) { return x.size(1) <= 1 || x.stride(1) == 1 ? x : as_dense_rows(x); }

// Some channels of one sequence. Channels are independent of each other, and so are sequences.
struct WorkItem {
  int64_t n, batch, first, length;
  int64_t channel, count;
};

// One call.
struct Call {
  const CausalConvolution<int64_t>& op;
  Tensor x, residual;  // residual is undefined if the call has no residual
  Columns in, out;
  optional<Columns> added, state, new_state;  // `added` is the residual
  std::vector<Slot> slots;
  std::vector<int64_t> accepted;  // one count per sequence; empty unless states keep each token
  std::vector<Checkpoint> checkpoints;
  Columns weight;  // [1, D, W]
  optional<Columns> bias;
  optional<Indices> segments;  // seq_idx [B, T]

  bool is_channel_first() const { return in.channel_stride() != 1; }
  bool has_state(int64_t n) const { return state && slots[n].has_state; }

  void load_filter(Scratch& scratch, int64_t channel, int64_t count) const {
    weight.read_all(0, channel, count, scratch.weight);
    if (bias) {
      bias->read(0, channel, 0, count, scratch.bias);
    } else {
      std::fill_n(scratch.bias, count, 0.0f);
    }
  }

  // Reads a token of a sequence, or a column of its history if the position is negative. The history is S columns, or
  // fewer if some tokens of the last step were not accepted. Without a state it is zeros.
  void read(const Scratch& scratch, const WorkItem& item, int64_t position, float* values) const {
    if (position >= 0) {
      in.read(item.batch, item.channel, item.first + position, item.count, values);
    } else if (has_state(item.n)) {
      const int64_t column = (accepted.empty() ? op.S : accepted[item.n] + op.W - 2) + position;
      std::copy_n(scratch.old_state.data() + column * kChannels, item.count, values);
    } else {
      std::fill_n(values, item.count, 0.0f);
    }
  }

  void convolve_sequence(Scratch& scratch, const WorkItem& item) const {
    ConvolutionRows rows{.dtype = x.scalar_type(),
                         .from_f32 = is_channel_first(),
                         .W = op.W,
                         .in = scratch.rows,
                         .in_stride = is_channel_first() ? kTransposedChannels : in.column_stride(),
                         .out = nullptr,
                         .out_stride = out.column_stride(),
                         .residual = nullptr,
                         .residual_stride = added ? added->column_stride() : 0,
                         .tokens = 0,
                         .channels = item.count,
                         .silu = op.has_silu(),
                         .weight = scratch.weight,
                         .bias = scratch.bias,
                         .before = scratch.before};
    for (int64_t t = item.first, last = t + item.length; t < last; t += rows.tokens) {
      rows.tokens = std::min(is_channel_first() ? kTransposedTokens : kTokensAtOnce, last - t);
      const void* from = in.at(item.batch, item.channel, t);
      if (is_channel_first()) {
        convolution_kernels().read_transposed(from, rows.dtype, in.channel_stride(), rows.tokens, item.count,
                                              scratch.rows);
      } else {
        rows.in = from;
      }
      rows.out = out.at(item.batch, item.channel, t);
      rows.residual = added ? added->at(item.batch, item.channel, t) : nullptr;
      convolution_kernels().convolve(rows);
    }
  }

  // Adjacent tokens of one segment form a sequence. Tokens of other segments before it count as zeros. Tokens without a
  // segment give zeros.
  void convolve_segments(Scratch& scratch, const WorkItem& item) const {
    WorkItem run = item;
    for (; run.first < item.length; run.first += run.length) {
      const auto segment_at = [&](int64_t t) { return segments->at(item.batch, t); };
      const int64_t segment = segment_at(run.first);
      int64_t end = run.first + 1;
      while (end < item.length && segment_at(end) == segment) ++end;
      run.length = end - run.first;
      if (segment < 0) {
        write_zeros(run);
        continue;
      }
      for (int64_t row = 0; row < op.W - 1; ++row) {
        const int64_t before = run.first - (op.W - 1) + row;
        float* values = scratch.before + row * kChannels;
        if (before >= 0 && segment_at(before) == segment) {
          in.read(item.batch, item.channel, before, item.count, values);
        } else {
          std::fill_n(values, item.count, 0.0f);
        }
      }
      convolve_sequence(scratch, run);
    }
  }

  // Returns whether one token and its states can stay in registers. All must have one dtype, and the states must be
  // dense in one order.
  bool has_step_kernel() const {
    const auto dtype = x.scalar_type();
    const auto both = [&](auto has) { return has(*new_state) && (!state || has(*state)); };
    return op.W == 4 && (op.S == 3 || op.S == 4) && !is_channel_first() && !segments && new_state &&
           (both([&](const Columns& x) { return x.is_dense_of(dtype); }) ||
            (both([&](const Columns& x) { return x.has_dense_channels_of(dtype); }) &&
             (!state || state->column_stride() == new_state->column_stride())));
  }

  void step(const Scratch& scratch, const WorkItem& item) const {
    const int64_t slot = slots[item.n].index;
    convolution_kernels().convolve_step({.dtype = x.scalar_type(),
                                         .S = op.S,
                                         .dense_channels = new_state->has_dense_channels_of(x.scalar_type()),
                                         .x = in.at(item.batch, item.channel, item.first),
                                         .weight = scratch.weight,
                                         .bias = scratch.bias,
                                         .before = has_state(item.n) ? state->at(slot, item.channel) : nullptr,
                                         .residual = added ? added->at(item.batch, item.channel, item.first) : nullptr,
                                         .after = new_state->at(slot, item.channel),
                                         .y = out.at(item.batch, item.channel, item.first),
                                         .column_stride = new_state->column_stride(),
                                         .channels = item.count,
                                         .silu = op.has_silu()});
  }

  // Processes channels whose filter is loaded.
  void run(Scratch& scratch, const WorkItem& item) const {
    const int64_t slot = slots[item.n].index, checkpoint = checkpoints[item.n].tokens;
    scratch.old_state.resize(op.S * kChannels);
    if (has_state(item.n)) state->read_all(slot, item.channel, item.count, scratch.old_state.data());
    for (int64_t row = 0; row < op.W - 1; ++row) {
      read(scratch, item, row - (op.W - 1), scratch.before + row * kChannels);
    }
    if (segments) {
      convolve_segments(scratch, item);
    } else {
      convolve_sequence(scratch, item);
    }
    if (!new_state) return;
    if (!accepted.empty()) return keep_each(scratch, item, slot);
    if (checkpoint > 0) write_state(scratch, item, checkpoint, checkpoints[item.n].index);
    write_state(scratch, item, item.length, slot);
  }

  void write_zeros(const WorkItem& item) const {
    for (int64_t t = item.first; t < item.first + item.length; ++t) {
      std::memset(out.at(item.batch, item.channel, t), 0, item.count * x.element_size());
    }
  }

  // Writes the state after some tokens.
  void write_state(Scratch& scratch, const WorkItem& item, int64_t tokens, int64_t slot) const {
    scratch.new_state.resize(op.S * kChannels);
    for (int64_t column = 0; column < op.S; ++column) {
      read(scratch, item, tokens - op.S + column, scratch.new_state.data() + column * kChannels);
    }
    new_state->write_all(slot, item.channel, item.count, scratch.new_state.data());
  }

  // Writes the last W - 2 columns of the history, then the tokens. The next step can resume after any of them.
  void keep_each(Scratch& scratch, const WorkItem& item, int64_t slot) const {
    for (int64_t column = 0; item.length > 0 && column < op.W - 2 + item.length; ++column) {
      read(scratch, item, column - (op.W - 2), scratch.rows);
      new_state->write(slot, item.channel, column, item.count, scratch.rows);
    }
  }

  void run_all() const {
    const auto& [B, T, N] = std::tie(op.shape.B, op.shape.T, op.shape.N);
    const auto sequences = sequences_of(op.shape, op.cu_seqlens);
    const int64_t channels = is_channel_first() ? kTransposedChannels : kChannels, groups = ceil_div(op.D, channels);
    const int64_t tokens = ceil_div(B * T, std::max<int64_t>(1, N));
    const bool has_steps = has_step_kernel();
    const int64_t grain = has_steps && tokens <= 1 ? kStepGrain : kTokenGrain;
    const int64_t at_least = grain / (channels * std::max<int64_t>(1, tokens)) + 1;
    at::parallel_for(0, N * groups, at_least, [&](int64_t begin, int64_t end) {
      thread_local const auto scratch = std::make_unique_for_overwrite<Scratch>();
      for (int64_t i = begin; i < end; ++i) {
        const int64_t n = i % N, channel = i / N * channels;
        const auto& [batch, first, length] = sequences[n];
        const WorkItem item{n, batch, first, length, channel, std::min(channels, op.D - channel)};
        if (i == begin || n == 0) load_filter(*scratch, channel, item.count);
        if (slots[n].index < 0) {
          write_zeros(item);
        } else if (has_steps && accepted.empty() && length == 1 && checkpoints[n].tokens == 0) {
          step(*scratch, item);
        } else {
          run(*scratch, item);
        }
      }
    });
  }
};

Call call_of(const CausalConvolution<int64_t>& op, const optional<Tensor>& seq_idx, const StatePool& pool,
             const Tensor& y) {
  const Tensor x = as_dense_rows_or_columns(op.x);
  const Tensor residual = op.residual.has_value() ? as_dense_rows(*op.residual) : Tensor();
  return {.op = op,
          .x = x,
          .residual = residual,
          .in = Columns(x, 0, 2, 1),
          .out = Columns(y, 0, 2, 1),
          .added = residual.defined() ? optional(Columns(residual, 0, 2, 1)) : std::nullopt,
          .state = {},
          .new_state = {},
          .slots = slots_of(op.shape.N, pool),
          .accepted = pool.num_accepted_tokens ? accepted_counts(op.shape.N, pool) : std::vector<int64_t>(),
          .checkpoints = checkpoints_of(op.shape.N, pool),
          .weight = Columns(op.weight, std::nullopt, 0, 1),
          .bias = op.bias.has_value() ? optional(Columns(*op.bias, std::nullopt, 0, std::nullopt)) : std::nullopt,
          .segments = seq_idx.has_value() ? optional<Indices>(*seq_idx) : std::nullopt};
}

void run(const CausalConv1d<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [y, final_state] = outputs;
  Call call = call_of(op, op.seq_idx, {}, y);
  if (op.initial_state.has_value()) call.state.emplace(*op.initial_state, 0, 1, 2);
  if (op.output_final_state) call.new_state.emplace(final_state, 0, 1, 2);
  call.run_all();
}

}  // namespace

void causal_conv1d_update(const CausalConv1dUpdate<int64_t>& op, const Tensor& y) {
  Call call = call_of(op, std::nullopt, op.pool, op.out.value_or(y));
  call.state.emplace(op.pool.states, 0, 1, 2);
  call.new_state = call.state;
  call.run_all();
}

TORCH_LIBRARY_FRAGMENT(gdn, m) {
  define<CausalConv1d, &run>(m);
  define<CausalConv1dUpdate, &causal_conv1d_update>(m);
}

}  // namespace torch_gdn::cpu
