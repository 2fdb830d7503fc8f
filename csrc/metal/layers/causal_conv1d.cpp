#include "metal/layers/causal_conv1d.h"

#include "metal/implement.h"
#include "metal/layers/rows.h"
#include "ops/layers/causal_conv1d.h"
#include "shaders/layers/convolution.h"

namespace torch_gdn {

namespace {

// Up to this many tokens (decoding, speculation), one dispatch convolves and writes the state. For more tokens, the
// work is divided among threadgroups.
constexpr int64_t kFewTokens = 16;

struct Call {
  const CausalConvolution<int64_t>& op;
  optional<Tensor> bias, seq_idx, cu_seqlens;
  Tensor state, new_state;  // the state before the first token and the state after the last; undefined if absent
  Slots slots;
  Checkpoints checkpoints;
  ChannelOrder order;
  Tensor y;
};

ColumnStrides column_strides(const Tensor& state) { return {state.stride(0), state.stride(1), state.stride(2)}; }

bool has_vector_rows(const Tensor& x) {
  return x.defined() && x.size(-1) == 4 && x.stride(-1) == 1 && vector_width({x}) == 4;
}

// `tokens` is the number per threadgroup. 0 means a whole sequence.
ConvolutionParameters parameters_of(const Call& call, int64_t tokens) {
  const auto& op = call.op;
  auto shape = op.shape;
  if (tokens > 0) shape.NT = ceil_div(shape.T, tokens) + (shape.packed ? shape.N : 0);
  ConvolutionParameters parameters{};
  parameters.sequence = sequence_parameters(shape, call.cu_seqlens);
  parameters.slots = call.slots.parameters;
  parameters.checkpoints = call.checkpoints.parameters;
  parameters.x = row_strides(op.x);
  if (op.residual.has_value()) parameters.residual = row_strides(*op.residual);
  parameters.y_batch = call.y.stride(0);
  parameters.y_token = call.y.stride(1);
  parameters.weight_channel = op.weight.stride(0);
  parameters.weight_tap = op.weight.stride(1);
  parameters.order = call.order;
  parameters.channels = int32_t(op.D);
  parameters.columns = int32_t(op.S);
  parameters.has_bias = call.bias.has_value();
  parameters.has_residual = op.residual.has_value();
  parameters.has_silu = op.has_silu();
  parameters.has_state = call.state.defined();
  parameters.has_tap_vectors = has_vector_rows(op.weight);
  parameters.keeps_each = call.slots.accepted.has_value();
  parameters.has_column_vectors = !parameters.keeps_each && has_vector_rows(call.new_state) &&
                                  (!call.state.defined() || has_vector_rows(call.state));
  if (call.state.defined()) parameters.state = column_strides(call.state);
  if (call.new_state.defined()) parameters.new_state = column_strides(call.new_state);
  parameters.has_new_state = call.new_state.defined();
  if (call.seq_idx.has_value()) {
    parameters.segment_batch = call.seq_idx->stride(0);
    parameters.segment_token = call.seq_idx->stride(1);
    parameters.segment_bytes = int32_t(call.seq_idx->element_size());
  }
  return parameters;
}

// Returns the dtype of the states, or of x without states.
at::ScalarType state_type(const Call& call) {
  const Tensor& state = call.new_state.defined() ? call.new_state : call.state;
  return (state.defined() ? state : call.op.x).scalar_type();
}

// Returns the template arguments that the three convolution kernels have in common.
TemplateArguments arguments_of(const Call& call) {
  return {call.op.x.scalar_type(), call.op.weight.scalar_type(), state_type(call), call.op.W};
}

int channel_vector_width(const Call& call) {
  const auto& x = call.op.x;
  const Tensor& residual = call.op.residual.value_or(x);
  const bool neighbours = x.stride(2) == 1 && residual.stride(2) == 1 && call.op.D % 4 == 0;
  return neighbours ? vector_width({x, residual, call.y}) : 1;
}

Bindings convolution_bindings(const Call& call, const ConvolutionParameters& parameters) {
  return {call.op.x,       call.op.weight, call.bias,        call.state, call.slots.indices,   call.slots.flags,
          call.cu_seqlens, call.seq_idx,   call.op.residual, call.y,     Binding::error_log(), parameters};
}

Launch launch_causal_conv1d(const Call& call) {
  const auto parameters = parameters_of(call, kConvolutionTokens);
  const auto width = channel_vector_width(call);
  auto arguments = arguments_of(call);
  arguments[4] = width;
  return {"layers/causal_conv1d",
          arguments,
          convolution_bindings(call, parameters),
          {ceil_div(call.op.D, kConvolutionThreads * width), parameters.sequence.chunks, call.op.shape.B},
          kConvolutionThreads};
}

// Returns whether the tokens of a channel are neighbours.
bool is_channel_first(const Tensor& x) { return x.stride(1) == 1 && x.stride(2) != 1; }

Launch launch_causal_conv1d_channel_first(const Call& call) {
  const auto parameters = parameters_of(call, kChannelFirstTokens);
  return {"layers/causal_conv1d_channel_first",
          arguments_of(call),
          convolution_bindings(call, parameters),
          {ceil_div(call.op.D, kChannelFirstChannels), parameters.sequence.chunks, call.op.shape.B},
          kConvolutionThreads};
}

// Returns the threadgroups of kernels that process whole sequences, with one channel per thread.
Grid sequence_threadgroups(const Call& call) { return {ceil_div(call.op.D, kConvolutionThreads), 1, call.op.shape.N}; }

Launch launch_update(const Call& call) {
  return {"layers/causal_conv1d_update",
          arguments_of(call),
          {call.op.x, call.op.weight, call.bias, call.slots.source(call.state), call.slots.indices, call.slots.flags,
           call.slots.accepted, call.cu_seqlens, call.op.residual, call.y, call.new_state, Binding::error_log(),
           parameters_of(call, 0)},
          sequence_threadgroups(call),
          kConvolutionThreads};
}

Launch launch_causal_conv1d_state(const Call& call) {
  return {"layers/causal_conv1d_state",
          {call.op.x.scalar_type(), state_type(call)},
          {call.op.x, call.slots.source(call.state), call.slots.indices, call.slots.flags, call.cu_seqlens,
           call.checkpoints.offsets, call.checkpoints.indices, call.new_state, Binding::error_log(),
           parameters_of(call, 0)},
          sequence_threadgroups(call),
          kConvolutionThreads};
}

void launch(const Call& call) {
  const int64_t tokens = call.op.shape.T;
  const bool keeps_each = call.slots.accepted.has_value();            // few tokens per sequence, however many in total
  const bool has_checkpoints = call.checkpoints.offsets.has_value();  // only causal_conv1d_state writes checkpoints
  if (call.new_state.defined() && tokens > 0 && !has_checkpoints && (tokens <= kFewTokens || keeps_each)) {
    return launcher().run(launch_update(call));
  }
  if (tokens > 0) {
    launcher().run(is_channel_first(call.op.x) ? launch_causal_conv1d_channel_first(call) : launch_causal_conv1d(call));
  }
  if (call.new_state.defined()) launcher().run(launch_causal_conv1d_state(call));
}

Call call_of(const CausalConvolution<int64_t>& op, const Tensor& y) {
  return {.op = op,
          .bias = contiguous(op.bias),
          .seq_idx = {},
          .cu_seqlens = index_array(op.x.device(), op.cu_seqlens),
          .state = {},
          .new_state = {},
          .slots = {},
          .checkpoints = {},
          .order = {},
          .y = y};
}

void causal_conv1d(const CausalConv1d<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [y, final_state] = outputs;
  Call call = call_of(op, y);
  call.seq_idx = op.seq_idx;
  call.state = op.initial_state.value_or(Tensor());
  if (op.output_final_state) call.new_state = final_state;
  launch(call);
}

void causal_conv1d_update_(const CausalConv1dUpdate<int64_t>& op, const Tensor& y) {
  Call call = call_of(op, op.out.value_or(y));
  call.state = call.new_state = op.pool.states;
  call.slots = slots_on(op.x.device(), op.pool);
  call.checkpoints = checkpoints_on(op.x.device(), op.pool, 1);
  launch(call);
}

// The kernels read dy as the residual, and the gradient of the final state as the new state.
void causal_conv1d_bwd(const CausalConv1dBwd<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor, Tensor>& outputs) {
  const auto& [dx, dweight, dbias, dinitial_state] = outputs;
  CausalConvolution<int64_t> forward = op;
  forward.residual = op.dy;
  Call call = call_of(forward, dx);
  call.seq_idx = op.seq_idx;
  call.state = op.initial_state.value_or(Tensor());
  call.new_state = op.dfinal_state.value_or(Tensor());
  auto parameters = parameters_of(call, kConvolutionBwdTokens);
  const int64_t blocks = op.output_dweight ? op.shape.B * parameters.sequence.chunks : 0;
  parameters.has_partials = op.output_dweight;
  const Tensor dweight_partials = partial_sums(op.x, blocks, op.D * op.W);
  const Tensor dbias_partials = partial_sums(op.x, dbias.numel() > 0 ? blocks : 0, op.D);
  const int64_t groups = ceil_div(op.D, kConvolutionThreads);
  launcher().run({{"layers/causal_conv1d_bwd",
                   arguments_of(call),
                   {op.dy, op.x, op.weight, call.bias, call.state, call.new_state, call.cu_seqlens, call.seq_idx, dx,
                    dweight_partials, dbias_partials, Binding::error_log(), parameters},
                   {groups, parameters.sequence.chunks, op.shape.B},
                   kConvolutionThreads}});
  if (dweight.numel() > 0) launcher().run({launch_sum_partials(dweight_partials, dweight)});
  if (dbias.numel() > 0) launcher().run({launch_sum_partials(dbias_partials, dbias)});
  if (dinitial_state.numel() == 0) return;
  launcher().run(
      {{"layers/causal_conv1d_bwd_state",
        arguments_of(call),
        {op.dy, op.x, op.weight, call.bias, call.state, call.new_state, call.cu_seqlens, dinitial_state, parameters},
        sequence_threadgroups(call),
        kConvolutionThreads}});
}

}  // namespace

Launch launch_causal_conv1d_update(const CausalConv1dUpdate<int64_t>& op, const Slots& slots, const ChannelOrder& order,
                                   const Tensor& y) {
  Call call = call_of(op, y);
  call.state = call.new_state = op.pool.states;
  call.slots = slots;
  call.order = order;
  return launch_update(call);
}

TORCH_LIBRARY_IMPL(gdn, MPS, m) {
  metal::implement<CausalConv1d, &causal_conv1d>(m);
  metal::implement<CausalConv1dUpdate, &causal_conv1d_update_>(m);
  metal::implement<CausalConv1dBwd, &causal_conv1d_bwd>(m);
}

}  // namespace torch_gdn
