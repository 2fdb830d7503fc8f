#include "cpu/define.h"
#include "cpu/gates.h"
#include "cpu/gdn/chunked.h"
#include "cpu/gdn/recurrence.h"
#include "cpu/simd/channel_kernels.h"
#include "ops/gdn/kda.h"

namespace torch_gdn {

namespace {

struct ChunkInputs {
  cpu::Rows q, k, v, g, beta;
  float scale;
  bool normalise;
};

template <typename Keys>
Keys& with_tokens(Keys& keys, int64_t tokens) {
  keys.tokens = tokens;
  keys.rows = cpu::padded(tokens);
  return keys;
}

// The rule with one decay per value head.
template <typename Operand_>
class HeadDecayRule {
 public:
  using Operand = Operand_;
  HeadDecayRule(const ChunkInputs& in, int64_t K, const cpu::ChunkKernels<Operand>& kernels)
      : in_(in), kernels_(kernels), tiles_(std::make_unique<Tiles>()), width_(K) {
    tiles_->keys.K = padded_keys(K);
  }

  static int64_t padded_keys(int64_t K) { return cpu::padded(K); }

  void read_keys(int64_t batch, int64_t token, int64_t key_head, int64_t tokens) {
    kernels_.read_keys(in_.q.head(batch, token, key_head, 0), in_.k.head(batch, token, key_head, 0), width_,
                       in_.normalise, with_tokens(tiles_->keys, tokens));
  }

  void make_head(int64_t batch, int64_t token, int64_t head) {
    const auto g = in_.g.head(batch, token, head, 0), beta = in_.beta.head(batch, token, head, 0);
    constexpr int64_t size = sizeof(float);
    const cpu::HeadGates gates{reinterpret_cast<const float*>(g.data), reinterpret_cast<const float*>(beta.data),
                               g.stride / size, beta.stride / size, in_.scale};
    kernels_.make_head(tiles_->keys, gates, tiles_->head);
  }

  void advance(int64_t batch, int64_t token, int64_t head, int64_t column, int64_t columns, const cpu::Rows& o,
               float* state, Operand* operand) {
    kernels_.advance(tiles_->keys, tiles_->head, in_.v.head(batch, token, head, column),
                     o.head(batch, token, head, column), columns, state, operand, tiles_->panel);
  }

  void make_operand(const float* state, int64_t K, Operand* operand) const { kernels_.make_operand(state, K, operand); }

 private:
  struct Tiles {
    cpu::KeyTiles<Operand> keys;
    cpu::HeadTiles<Operand> head;
    cpu::PanelTiles<Operand> panel;
  };

  const ChunkInputs& in_;
  const cpu::ChunkKernels<Operand>& kernels_;
  std::unique_ptr<Tiles> tiles_;
  int64_t width_;
};

// The rule with one decay per key channel.
class ChannelDecayRule {
 public:
  using Operand = float;
  ChannelDecayRule(const ChunkInputs& in, int64_t K, const cpu::ChannelGateValues& gate)
      : in_(in), gate_(gate), kernels_(cpu::channel_kernels()), tiles_(std::make_unique<Tiles>()), width_(K) {
    tiles_->keys.K = padded_keys(K);
  }

  static int64_t padded_keys(int64_t K) { return cpu::padded_channels(K); }

  void read_keys(int64_t batch, int64_t token, int64_t key_head, int64_t tokens) {
    kernels_.read_keys(in_.q.head(batch, token, key_head, 0), in_.k.head(batch, token, key_head, 0), width_,
                       in_.normalise, in_.scale, with_tokens(tiles_->keys, tokens));
  }

  void make_head(int64_t batch, int64_t token, int64_t head) {
    auto gates = gate_.for_head(head, in_.g.head(batch, token, head, 0));
    const auto beta = in_.beta.head(batch, token, head, 0);
    gates.beta = reinterpret_cast<const float*>(beta.data);
    gates.beta_stride = beta.stride / static_cast<int64_t>(sizeof(float));
    kernels_.make_head(tiles_->keys, gates, tiles_->head);
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

  const ChunkInputs& in_;
  const cpu::ChannelGateValues& gate_;
  const cpu::ChannelKernels& kernels_;
  std::unique_ptr<Tiles> tiles_;
  int64_t width_;
};

void run_chunks(const ChunkedRule<int64_t>& op, const cpu::ChunkedWork& work, const cpu::StateIo& state_io,
                const cpu::ChunkedOutputs& outputs) {
  const auto& s = op.shape;
  const Tensor q = unit_last_stride(op.q, "q"), k = unit_last_stride(op.k, "k"), v = unit_last_stride(op.v, "v");
  const auto& [gk, gv, gk_name, gate] = op.channels;
  const Tensor g = gk ? unit_last_stride(cpu::as_activation(*gk), gk_name) : cpu::log_decays_of(s, op.g, op.gates);
  const Tensor betas = cpu::betas_of(s, op.beta, op.gates);
  const ChunkInputs in{.q = cpu::Rows(q),
                       .k = cpu::Rows(k),
                       .v = cpu::Rows(v),
                       .g = cpu::Rows(g),
                       .beta = cpu::Rows(betas),
                       .scale = static_cast<float>(scale_or_default(op.scale, s.K)),
                       .normalise = op.use_qk_l2norm};
  if (gk) {
    const cpu::ChannelGateValues gate_values(s.HV, s.K, gate);
    return cpu::run_chunks(work, state_io, outputs, [&] { return ChannelDecayRule(in, s.K, gate_values); });
  }
  // Pairs of bf16 would round a v of another dtype.
  const bool is_bfloat16 = op.has_one_dtype() && q.scalar_type() == at::kBFloat16;
  const auto* pair_kernels = is_bfloat16 ? cpu::chunk_kernels_of_pairs() : nullptr;
  if (pair_kernels) {
    cpu::run_chunks(work, state_io, outputs, [&] { return HeadDecayRule(in, s.K, *pair_kernels); });
  } else {
    cpu::run_chunks(work, state_io, outputs, [&] { return HeadDecayRule(in, s.K, cpu::chunk_kernels()); });
  }
}

void run_chunked(const ChunkedRule<int64_t>& op, const cpu::StateIo& state_io, const cpu::ChunkedOutputs& outputs) {
  const cpu::ChunkedWork work(op.shape, op.cu_seqlens, cpu::few_tokens_of(op));
  if (!work.order.empty()) run_chunks(op, work, state_io, outputs);
  cpu::run_recurrence_of(work.short_ones, op, state_io, outputs.o);
}

void run(const ChunkedCall<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor>& outputs) {
  const auto& [o, final_state, h] = outputs;
  run_chunked(op, cpu::StateIo::per_sequence(op.shape, op.initial_state, final_state, op.state_v_first), {o, h});
}

void run_in_place(const ChunkedCallInPlace<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [o, h] = outputs;
  run_chunked(op, cpu::StateIo::in_place(op.shape, op.pool, op.state_v_first), {op.out.value_or(o), h});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) {
  cpu::define<ChunkGatedDeltaRule, &run>(m);
  cpu::define<ChunkGatedDeltaRuleInPlace, &run_in_place>(m);
  cpu::define<ChunkKda, &run>(m);
  cpu::define<ChunkKdaInPlace, &run_in_place>(m);
}

}  // namespace torch_gdn
