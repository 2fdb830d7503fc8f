#include "ops/layers/causal_conv1d.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "metal/slots.h"

namespace torch_gdn {

namespace {

constexpr int64_t kThreads = 128;
// Sequences up to this length are convolved by the kernel that writes the state too: one dispatch for decoding and for
// the few tokens of a speculative step. Longer ones are spread over more threadgroups.
constexpr int64_t kFewTokens = 16;

// One call as its kernels see it. Absent tensors are undefined.
struct Call {
  ConvolutionShape shape;
  Tensor x, weight, bias, seq_idx;
  optional<Tensor> cu_seqlens;
  Tensor state, new_state;  // before the first tokens, and behind the last
  Slots slots;
  Tensor y;
};

ColumnStrides column_strides(const Tensor& state) { return {state.stride(0), state.stride(1), state.stride(2)}; }

// Rows of 4 elements that can be moved at once.
bool is_in_fours(const Tensor& x) {
  return x.defined() && x.size(-1) == 4 && x.stride(-1) == 1 && vector_width({x}) == "4";
}

ConvolutionParameters parameters_of(const Call& call) {
  ConvolutionParameters parameters{};
  parameters.sequence = sequence_parameters(call.shape.sequence);
  parameters.slots = call.slots.parameters;
  parameters.x = row_strides(call.x);
  parameters.weight_channel = call.weight.stride(0);
  parameters.weight_tap = call.weight.stride(1);
  parameters.channels = int32_t(call.shape.D);
  parameters.columns = int32_t(call.shape.S);
  parameters.has_bias = call.bias.defined();
  parameters.has_silu = call.shape.silu;
  parameters.has_state = call.state.defined();
  parameters.has_tap_vectors = is_in_fours(call.weight);
  parameters.has_column_vectors = is_in_fours(call.new_state) && (!call.state.defined() || is_in_fours(call.state));
  if (call.state.defined()) parameters.state = column_strides(call.state);
  if (call.new_state.defined()) parameters.new_state = column_strides(call.new_state);
  if (call.seq_idx.defined()) {
    parameters.segment_batch = call.seq_idx.stride(0);
    parameters.segment_token = call.seq_idx.stride(1);
    parameters.segment_bytes = int32_t(call.seq_idx.element_size());
  }
  return parameters;
}

Tensor or_weight(const Tensor& tensor, const Call& call) {
  return or_dummy(tensor.defined() ? optional(tensor) : std::nullopt, call.weight);
}

// Of the states, or of x where there are none.
std::string state_type(const Call& call) {
  const Tensor& state = call.new_state.defined() ? call.new_state : call.state;
  return metal_type((state.defined() ? state : call.x).scalar_type());
}

// 4 channels at once where they lie next to each other, from a multiple of 4 on.
std::string channel_vector_width(const Call& call) {
  const bool neighbours = call.x.stride(2) == 1 && call.shape.D % 4 == 0;
  return neighbours ? vector_width({call.x}) : "1";
}

std::vector<std::string> arguments_of(const Call& call) {
  return {metal_type(call.x.scalar_type()), metal_type(call.weight.scalar_type()), state_type(call),
          std::to_string(call.shape.W), channel_vector_width(call)};
}

size_t channel_groups(const Call& call, const std::string& packet) {
  return size_t(ceil_div(call.shape.D, kThreads * std::stoi(packet)));
}

std::vector<Binding> convolution_bindings(const Call& call, const ConvolutionParameters& parameters) {
  return {call.x,
          call.weight,
          or_weight(call.bias, call),
          or_weight(call.state, call),
          or_dummy(call.slots.indices, call.weight),
          or_dummy(call.slots.flags, call.weight),
          or_dummy(call.cu_seqlens, call.weight),
          or_weight(call.seq_idx, call),
          call.y,
          Binding::error_log(),
          Binding::values(parameters)};
}

Launch launch_causal_conv1d(const Call& call) {
  const auto arguments = arguments_of(call);
  const auto& s = call.shape.sequence;
  return {"causal_conv1d",
          "layers/causal_conv1d.metal",
          arguments,
          convolution_bindings(call, parameters_of(call)),
          {channel_groups(call, arguments.back()), size_t(s.NT), size_t(s.B)},
          kThreads};
}

// The tokens of a channel are neighbours.
bool is_channel_first(const Tensor& x) { return x.stride(1) == 1 && x.stride(2) != 1; }

Launch launch_causal_conv1d_channel_first(const Call& call) {
  constexpr int64_t kTokens = 64, kChannels = 32;  // of a threadgroup
  const auto& s = call.shape.sequence;
  auto parameters = parameters_of(call);
  parameters.sequence.chunks = int32_t(ceil_div(s.T, kTokens) + (s.packed ? s.N : 0));
  auto arguments = arguments_of(call);
  arguments.pop_back();
  return {"causal_conv1d_channel_first",
          "layers/causal_conv1d_channel_first.metal",
          arguments,
          convolution_bindings(call, parameters),
          {size_t(ceil_div(call.shape.D, kChannels)), size_t(parameters.sequence.chunks), size_t(s.B)},
          kThreads};
}

Launch launch_causal_conv1d_update(const Call& call) {
  auto arguments = arguments_of(call);
  arguments.pop_back();  // one channel a thread
  return {"causal_conv1d_update",
          "layers/causal_conv1d_update.metal",
          arguments,
          {call.x, call.weight, or_weight(call.bias, call), or_weight(call.state, call),
           or_dummy(call.slots.indices, call.weight), or_dummy(call.slots.flags, call.weight),
           or_dummy(call.cu_seqlens, call.weight), call.y, call.new_state, Binding::error_log(),
           Binding::values(parameters_of(call))},
          {channel_groups(call, "1"), 1, size_t(call.shape.sequence.N)},
          kThreads};
}

Launch launch_causal_conv1d_state(const Call& call) {
  return {"causal_conv1d_state",
          "layers/causal_conv1d_state.metal",
          {metal_type(call.x.scalar_type()), state_type(call)},
          {or_weight(call.x.numel() > 0 ? call.x : Tensor(), call), or_weight(call.state, call),
           or_dummy(call.slots.indices, call.weight), or_dummy(call.slots.flags, call.weight),
           or_dummy(call.cu_seqlens, call.weight), call.new_state, Binding::error_log(),
           Binding::values(parameters_of(call))},
          {channel_groups(call, "1"), 1, size_t(call.shape.sequence.N)},
          kThreads};
}

void run(const Call& call) {
  const int64_t tokens = call.shape.sequence.T;
  std::vector<Launch> launches;
  if (call.new_state.defined() && tokens > 0 && tokens <= kFewTokens) {
    launches = {launch_causal_conv1d_update(call)};
  } else {
    if (tokens > 0) {
      launches.push_back(is_channel_first(call.x) ? launch_causal_conv1d_channel_first(call)
                                                  : launch_causal_conv1d(call));
    }
    if (call.new_state.defined()) launches.push_back(launch_causal_conv1d_state(call));
  }
  launcher().run(launches);
}

Call call_of(const ConvolutionShape& shape, const Tensor& x, const Tensor& weight, const optional<Tensor>& bias,
             const optional<Tensor>& cu_seqlens) {
  Call call;
  call.shape = shape;
  call.x = x;
  call.weight = weight;
  if (bias.has_value()) call.bias = bias->contiguous();
  call.cu_seqlens = cu_seqlens_on(x.device(), cu_seqlens);
  call.y = at::empty({shape.sequence.B, shape.sequence.T, shape.D}, x.options());
  return call;
}

std::tuple<Tensor, Tensor> causal_conv1d(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias,
                                         const optional<Tensor>& initial_state, bool output_final_state,
                                         optional<int64_t> state_width, optional<c10::string_view> activation,
                                         const optional<Tensor>& cu_seqlens, const optional<Tensor>& seq_idx) {
  const auto shape = check_causal_conv1d(x, weight, bias, initial_state, output_final_state, state_width, activation,
                                         cu_seqlens, seq_idx);
  Call call = call_of(shape, x, weight, bias, cu_seqlens);
  call.seq_idx = seq_idx.value_or(Tensor());
  call.state = initial_state.value_or(Tensor());
  const auto options = (initial_state.has_value() ? *initial_state : x).options();
  if (output_final_state) call.new_state = at::empty({shape.sequence.N, shape.D, shape.S}, options);
  run(call);
  return {call.y, output_final_state ? call.new_state : at::empty({0}, options)};
}

Tensor causal_conv1d_update_(const Tensor& x, const Tensor& weight, const Tensor& state_pool,
                             const optional<Tensor>& state_indices, const optional<Tensor>& has_initial_state,
                             int64_t null_index, const optional<Tensor>& bias, optional<c10::string_view> activation,
                             const optional<Tensor>& cu_seqlens) {
  const auto shape = check_causal_conv1d_update_(x, weight, state_pool, state_indices, has_initial_state, null_index,
                                                 bias, activation, cu_seqlens);
  Call call = call_of(shape, x, weight, bias, cu_seqlens);
  call.state = call.new_state = state_pool;
  call.slots = slots_on(x.device(), state_pool, state_indices, has_initial_state, null_index);
  run(call);
  return call.y;
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) {
  m.impl("causal_conv1d", causal_conv1d);
  m.impl("causal_conv1d_update_", causal_conv1d_update_);
}

}  // namespace torch_gdn
