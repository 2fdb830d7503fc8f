#include "cpu/define.h"
#include "cpu/layers/partial_sums.h"
#include "cpu/simd/layer_kernels.h"
#include "ops/layers/causal_conv1d.h"

namespace torch_gdn::cpu {
namespace {

constexpr int64_t kBlockTokens = 1024;  // whose gradients of the weight are summed in f32

// Returns columns of states [N, D, S] as f32 rows [N, columns, D].
Tensor columns_as_rows(const Tensor& states, int64_t first, int64_t columns) {
  return states.narrow(2, first, columns).transpose(1, 2).to(at::kFloat).contiguous();
}

// Returns the taps that each token reads, [B, T], as a bit for each: those with the token's number in seq_idx.
Tensor taps_of(const Tensor& seq_idx, int64_t W) {
  const Tensor numbers = seq_idx.to(at::kLong).contiguous(), taps = at::zeros(numbers.sizes(), at::kByte);
  const int64_t T = numbers.size(1);
  const auto* number = numbers.const_data_ptr<int64_t>();
  auto* bits = taps.mutable_data_ptr<uint8_t>();
  for (int64_t i = 0; i < numbers.numel(); ++i) {
    for (int64_t back = 0; back < W && back <= i % T && number[i] >= 0; ++back) {
      bits[i] |= (number[i - back] == number[i]) << (W - 1 - back);
    }
  }
  return taps;
}

// The parameters of some channels, and the sums of their gradients.
struct Filter {
  alignas(64) float weight[kLargestW * kChannels], bias[kChannels];
  alignas(64) float dweight[kLargestW * kChannels], dbias[kChannels];
  alignas(64) float before[kLargestW * kChannels], dbefore[kLargestW * kChannels];
};

// One call. A work item is some channels of a block of tokens.
struct Backward {
  const CausalConv1dBwd<int64_t>& op;
  int64_t D, W, S;
  Tensor dx, dy, x, weight, bias;  // the weight is f32 [W, D]
  Tensor state, dstate, dfinal;    // f32 [N, W - 1, D] twice, and [N, S, D]; undefined without them
  Tensor taps;
  Tensor dweight, dbias;  // partial sums [blocks, D, W] and [blocks, D]

  char* at(const Tensor& tensor, int64_t batch, int64_t token, int64_t channel) const {
    const int64_t element = (batch * op.shape.T + token) * D + channel;
    return static_cast<char*>(const_cast<void*>(tensor.const_data_ptr())) + element * tensor.element_size();
  }

  void load(Filter& filter, const Chunk& chunk, int64_t offset, int64_t channel, int64_t count) const {
    for (int64_t tap = 0; tap < W; ++tap) {
      std::copy_n(weight.const_data_ptr<float>() + tap * D + channel, count, filter.weight + tap * kChannels);
    }
    std::fill_n(filter.dweight, W * kChannels, 0.0f);
    std::fill_n(filter.dbias, kChannels, 0.0f);
    std::fill_n(filter.bias, kChannels, 0.0f);
    if (bias.defined()) std::copy_n(bias.const_data_ptr<float>() + channel, count, filter.bias);
    for (int64_t row = 0; row < W - 1; ++row) {
      float* before = filter.before + row * kChannels;
      const int64_t position = offset - (W - 1) + row;  // in the sequence
      if (position >= 0) {
        row_kernels().upcast(at(x, chunk.batch, chunk.first - offset + position, channel), x.scalar_type(), count,
                             before);
      } else if (state.defined()) {
        std::copy_n(state.const_data_ptr<float>() + (chunk.sequence * (W - 1) + W - 1 + position) * D + channel, count,
                    before);
      } else {
        std::fill_n(before, count, 0.0f);
      }
    }
  }

  void run(Filter& filter, const Chunk& chunk, const Sequence& sequence, int64_t block, int64_t channel,
           int64_t count) const {
    const int64_t offset = chunk.first - sequence.first;
    load(filter, chunk, offset, channel, count);
    const bool writes_state = dstate.defined() && offset == 0;
    convolution_kernels().convolve_bwd(
        {.dtype = x.scalar_type(),
         .W = W,
         .dy = at(dy, chunk.batch, chunk.first, channel),
         .x = at(x, chunk.batch, chunk.first, channel),
         .dx = at(dx, chunk.batch, chunk.first, channel),
         .stride = D,
         .tokens = chunk.length,
         .after = sequence.length - offset - chunk.length,
         .channels = count,
         .weight = filter.weight,
         .bias = filter.bias,
         .before = filter.before,
         .dbefore = writes_state ? filter.dbefore : nullptr,
         .taps = taps.defined() ? taps.const_data_ptr<uint8_t>() + chunk.batch * op.shape.T + chunk.first : nullptr,
         .dfinal = dfinal.defined() ? dfinal.const_data_ptr<float>() + chunk.sequence * S * D + channel : nullptr,
         .dfinal_stride = D,
         .kept = sequence.length - S - offset,
         .silu = op.has_silu(),
         .dweight = filter.dweight,
         .dbias = filter.dbias});
    for (int64_t row = 0; writes_state && row < W - 1; ++row) {
      std::copy_n(filter.dbefore + row * kChannels, count,
                  dstate.mutable_data_ptr<float>() + (chunk.sequence * (W - 1) + row) * D + channel);
    }
    if (!dweight.defined()) return;
    float* sums = dweight.mutable_data_ptr<float>() + (block * D + channel) * W;
    for (int64_t i = 0; i < count * W; ++i) sums[i] = filter.dweight[i % W * kChannels + i / W];
    std::copy_n(filter.dbias, count, dbias.mutable_data_ptr<float>() + block * D + channel);
  }
};

// Writes the gradient of the initial state: the convolution's, and that of columns which stay in the final state.
void write_dstate(const Backward& call, const std::vector<Sequence>& sequences, const Tensor& dinitial_state) {
  const int64_t S = call.S, W = call.W;
  const Tensor sum = at::zeros(dinitial_state.sizes(), at::kFloat);
  sum.narrow(2, S - (W - 1), W - 1).add_(call.dstate.transpose(1, 2));
  for (size_t n = 0; call.dfinal.defined() && n < sequences.size(); ++n) {
    const int64_t kept = S - sequences[n].length;
    if (kept > 0) sum[n].narrow(1, S - kept, kept).add_(call.dfinal[n].narrow(0, 0, kept).transpose(0, 1));
  }
  dinitial_state.copy_(sum);
}

void run(const CausalConv1dBwd<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor, Tensor>& outputs) {
  const auto& [dx, dweight, dbias, dinitial_state] = outputs;
  const int64_t D = op.D, W = op.W, S = op.S;
  auto shape = op.shape;
  shape.C = kBlockTokens;
  shape.NT = ceil_div(shape.T, shape.C);
  const auto chunks = chunks_of(shape, op.cu_seqlens);
  const auto sequences = sequences_of(shape, op.cu_seqlens);
  const int64_t blocks = chunks.size();
  Backward call{op, D, W, S, dx, op.dy.contiguous(), op.x.contiguous(), op.weight.to(at::kFloat).t().contiguous()};
  if (op.bias.has_value()) call.bias = op.bias->to(at::kFloat).contiguous();
  if (op.initial_state.has_value()) {
    call.state = columns_as_rows(*op.initial_state, S - (W - 1), W - 1);
    call.dstate = at::zeros(call.state.sizes(), at::kFloat);
  }
  if (op.dfinal_state.has_value()) call.dfinal = columns_as_rows(*op.dfinal_state, 0, S);
  if (op.seq_idx.has_value()) call.taps = taps_of(*op.seq_idx, W);
  if (op.output_dweight) call.dweight = partial_sums(blocks, D * W), call.dbias = partial_sums(blocks, D);
  const int64_t groups = ceil_div(D, kChannels);
  at::parallel_for(0, blocks * groups, 1, [&](int64_t begin, int64_t end) {
    const auto filter = std::make_unique_for_overwrite<Filter>();
    for (int64_t item = begin; item < end; ++item) {
      const int64_t block = item / groups, channel = item % groups * kChannels;
      const auto& chunk = chunks[block];
      call.run(*filter, chunk, sequences[chunk.sequence], block, channel, std::min(kChannels, D - channel));
    }
  });
  if (op.output_dweight) add_partial_sums(call.dweight, dweight), add_partial_sums(call.dbias, dbias);
  if (op.initial_state.has_value()) write_dstate(call, sequences, dinitial_state);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { define<CausalConv1dBwd, &run>(m); }

}  // namespace torch_gdn::cpu
