#include "ops/kda/chunk_kda.h"

#include "cpu/define.h"
#include "cpu/gates.h"
#include "cpu/gdn/chunked.h"
#include "cpu/gdn/recurrence.h"
#include "cpu/simd/channel_kernels.h"

namespace torch_gdn {

namespace {

struct Inputs {
  cpu::Rows q, k, v, g, beta;
  float scale;
  bool normalise;
  cpu::ChannelGateValues gate;

  cpu::ChannelGates gates(int64_t batch, int64_t token, int64_t head) const {
    auto gates = gate.of_head(head, g.head(batch, token, head, 0));
    const auto betas = beta.head(batch, token, head, 0);
    gates.beta = reinterpret_cast<const float*>(betas.data);
    gates.beta_stride = betas.stride / static_cast<int64_t>(sizeof(float));
    return gates;
  }
};

// One decay a key channel.
class ChannelDecayRule {
 public:
  using Operand = float;
  ChannelDecayRule(const Inputs& in, int64_t K)
      : in_(in), kernels_(cpu::channel_kernels()), tiles_(std::make_unique<Tiles>()), width_(K) {
    tiles_->keys.K = padded_keys(K);
  }

  static int64_t padded_keys(int64_t K) { return cpu::padded_channels(K); }

  void read_keys(int64_t batch, int64_t token, int64_t key_head, int64_t tokens) {
    auto& keys = tiles_->keys;
    keys.tokens = tokens;
    keys.rows = cpu::padded(tokens);
    kernels_.read_keys(in_.q.head(batch, token, key_head, 0), in_.k.head(batch, token, key_head, 0), width_,
                       in_.normalise, in_.scale, keys);
  }

  void make_head(int64_t batch, int64_t token, int64_t head) {
    kernels_.make_head(tiles_->keys, in_.gates(batch, token, head), tiles_->head);
  }

  void advance(int64_t batch, int64_t token, int64_t head, int64_t column, int64_t columns, const cpu::Rows& o,
               float* state, float*) {
    kernels_.advance(tiles_->head, in_.v.head(batch, token, head, column), o.head(batch, token, head, column), columns,
                     state, tiles_->panel);
  }

 private:
  struct Tiles {
    cpu::ChannelKeys keys;
    cpu::ChannelTiles head;
    cpu::PanelTiles<float> panel;
  };

  const Inputs& in_;
  const cpu::ChannelKernels& kernels_;
  std::unique_ptr<Tiles> tiles_;
  int64_t width_;
};

void run_chunks(const ChunkedKda<int64_t>& op, const cpu::ChunkedWork& work, const cpu::StateIo& state_io,
                const cpu::ChunkedOutputs& outputs) {
  const auto& s = op.shape;
  const Tensor q = unit_last_stride(op.q, "q"), k = unit_last_stride(op.k, "k"), v = unit_last_stride(op.v, "v");
  const Tensor g = unit_last_stride(cpu::as_activation(op.required_g), "g");
  const Tensor betas = cpu::betas_of(s, op.beta, op.gates);
  const Inputs in{.q = cpu::Rows(q),
                  .k = cpu::Rows(k),
                  .v = cpu::Rows(v),
                  .g = cpu::Rows(g),
                  .beta = cpu::Rows(betas),
                  .scale = static_cast<float>(scale_or_default(op.scale, s.K)),
                  .normalise = op.use_qk_l2norm,
                  .gate = {s.HV, s.K, op.channel_gate}};
  cpu::run_chunks(work, state_io, outputs, [&] { return ChannelDecayRule(in, s.K); });
}

void run_chunked(const ChunkedKda<int64_t>& op, const cpu::StateIo& state_io, const cpu::ChunkedOutputs& outputs) {
  const cpu::ChunkedWork work(op.shape, op.cu_seqlens, cpu::few_tokens_of(op));
  if (!work.order.empty()) run_chunks(op, work, state_io, outputs);
  const ChannelDecays channels{.gk = op.required_g, .gv = std::nullopt, .gate = op.channel_gate};
  cpu::run_recurrence_of(work.short_ones, op, channels, state_io, outputs.o);
}

void run(const ChunkKda<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor>& outputs) {
  const auto& [o, final_state, h] = outputs;
  run_chunked(op, cpu::StateIo::of_sequences(op.shape, op.initial_state, final_state, op.state_v_first), {o, h});
}

void run_in_place(const ChunkKdaInPlace<int64_t>& op, const Tensor& o) {
  run_chunked(op, cpu::StateIo::in_place(op.shape, op.pool, op.state_v_first), {op.out.value_or(o), op.chunk_states()});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) {
  cpu::define<ChunkKda, &run>(m);
  cpu::define<ChunkKdaInPlace, &run_in_place>(m);
}

}  // namespace torch_gdn
