// The gradients of the delta rules. A core takes one sequence and key head, and its value heads one after the other. It
// walks forward through the chunks, and keeps what is O(T), a state per segment of chunks, and the states of the last
// segment. Then it walks back: it computes the states of a segment again, and the gradients chunk by chunk. Sums over
// value heads have their order.
#include "cpu/common.h"
#include "cpu/define.h"
#include "cpu/simd/backward_kernels.h"
#include "ops/gdn/gradients.h"

namespace torch_gdn::cpu {

namespace {

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

constexpr int64_t kSegment = 64;  // chunks whose states are kept at a time: 4 MB with K = V = 128

struct Inputs {
  Rows q, k, v, g, beta, d_o;
  StateIo states, gradients;  // the initial states and their gradients; those of the final states
  float scale;
  bool normalise, per_channel;
};

struct Outputs {
  Rows dq, dk, dv, dg, dbeta;
};

auto floats(int64_t count) { return Aligned::floats(std::max<int64_t>(1, count)); }

class BackwardCore {
 public:
  BackwardCore(const ChunkShape<>& s, const std::vector<Sequence>& sequences, int64_t longest, const Inputs& in,
               const Outputs& out)
      : s_(s),
        sequences_(sequences),
        in_(in),
        out_(out),
        tiles_(std::make_unique<BackwardTiles>()),
        K_(padded_to_panel(s.K)),
        V_(padded_to_panel(s.V)),
        records_(ceil_div(longest, kTokens)),
        r_(floats(std::ssize(records_) * kTokens * V_)),
        starts_(floats(ceil_div(std::ssize(records_), kSegment) * K_ * V_)),
        states_(floats((kSegment + 1) * K_ * V_)),
        dstate_(floats(K_ * V_)),
        q_(floats(std::ssize(records_) * kTokens * K_)),
        k_(floats(std::ssize(records_) * kTokens * K_)),
        q_factors_(floats(longest)),
        k_factors_(floats(longest)),
        dq_(floats(s.HV > s.H ? std::ssize(records_) * kTokens * K_ : 0)),
        dk_(floats(s.HV > s.H ? std::ssize(records_) * kTokens * K_ : 0)) {
    tiles_->K = K_, tiles_->V = V_;
  }

  void run(int64_t item) {
    sequence_ = item / s_.H, key_head_ = item % s_.H;
    std::tie(batch_, first_, length_) =
        std::tuple(sequences_[sequence_].batch, sequences_[sequence_].first, sequences_[sequence_].length);
    chunks_ = ceil_div(length_, kTokens);
    read_keys(in_.q, in_.scale, q_.get(), q_factors_.get());
    read_keys(in_.k, 1.0f, k_.get(), k_factors_.get());
    const int64_t group = s_.HV / s_.H;
    for (int64_t i = 0; i < group; ++i) {
      is_first_ = i == 0, is_last_ = i + 1 == group;
      head_ = s_.tiled ? i * s_.H + key_head_ : key_head_ * group + i;
      walk_forward();
      read(in_.gradients, dstate_.get());
      for (int64_t segment = ceil_div(chunks_, kSegment) - 1; segment >= 0; --segment) walk_back(segment);
      for_panels([&](int64_t column, int64_t columns) {
        in_.states.write(sequence_, head_, column, columns, dstate_.get() + column * K_, kColumns);
      });
    }
  }

 private:
  template <typename F>
  void for_panels(const F& f) const {
    for (int64_t j = 0; j < s_.V; j += kColumns) f(j, std::min(kColumns, s_.V - j));
  }

  void read(const StateIo& from, float* state) const {
    std::fill_n(state, K_ * V_, 0.0f);
    for_panels([&](int64_t column, int64_t columns) {
      from.read(sequence_, head_, column, columns, s_.K, state + column * K_, kColumns);
    });
  }

  void read_keys(const Rows& x, float scale, float* out, float* factors) const {
    kernels_.read_keys(x.head(batch_, first_, key_head_), length_, s_.K, in_.normalise, scale, K_, out, factors);
  }

  // Adds the gradients of a chunk's rows to those of the value heads before, and writes those of all heads.
  void keep_keys(int64_t chunk, const float* x, const float* factors, float scale, float* gradients, float* sums,
                 const Rows& out) const {
    const int64_t count = kTokens * K_;
    sums += chunk * count;
    for (int64_t i = 0; !is_first_ && i < count; ++i) gradients[i] += sums[i];
    if (is_last_) {
      kernels_.write_keys(x, factors + chunk * kTokens, tiles_->tokens, s_.K, in_.normalise, scale, gradients, K_,
                          out.head(batch_, token(chunk), key_head_));
    } else {
      std::copy_n(gradients, count, sums);
    }
  }

  int64_t token(int64_t chunk) const { return first_ + chunk * kTokens; }
  float* r(int64_t chunk) const { return r_.get() + chunk * kTokens * V_; }
  float* state(int64_t i) const { return states_.get() + i * K_ * V_; }

  void make_tiles(int64_t chunk, ChunkRecord* record) {
    tiles_->tokens = std::min(kTokens, length_ - chunk * kTokens);
    tiles_->q = q_.get() + chunk * kTokens * K_;
    tiles_->k = k_.get() + chunk * kTokens * K_;
    for (int64_t i = 0; i < kTokens; ++i) {
      tiles_->beta[i] = i < tiles_->tokens ? in_.beta.value(batch_, token(chunk) + i, head_) : 0.0f;
    }
    const auto decay = in_.per_channel ? kernels_.decay_channels : kernels_.decay_head;
    decay(in_.g.head(batch_, token(chunk), head_), s_.K, *tiles_, record);
  }

  void walk_forward() {
    read(in_.states, state(0));
    const int64_t last_segment = (chunks_ - 1) / kSegment * kSegment;
    for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
      const int64_t i = std::max<int64_t>(0, chunk - last_segment), next = chunk < last_segment ? 0 : i + 1;
      if (chunk % kSegment == 0) std::copy_n(state(0), K_ * V_, starts_.get() + chunk / kSegment * K_ * V_);
      ChunkRecord& record = records_[chunk];
      make_tiles(chunk, &record);
      alignas(64) float A[kSquare];
      for (int64_t i = 0; i < kSquare; ++i) A[i] = tiles_->beta[i / kTokens] * record.L[i];
      row_kernels_.invert_unit_lower(A, kTokens, kTokens, kTokens, record.inverse, kTokens);
      kernels_.solve(in_.v.head(batch_, token(chunk), head_), s_.V, record, state(i), r(chunk), *tiles_);
      kernels_.advance(r(chunk), state(i), state(next), *tiles_);
    }
  }

  void walk_back(int64_t segment) {
    const int64_t first = segment * kSegment, last = std::min(chunks_, first + kSegment);
    if (last < chunks_) std::copy_n(starts_.get() + segment * K_ * V_, K_ * V_, state(0));
    for (int64_t chunk = first; last < chunks_ && chunk + 1 < last; ++chunk) {
      make_tiles(chunk, nullptr);
      kernels_.advance(r(chunk), state(chunk - first), state(chunk - first + 1), *tiles_);
    }
    for (int64_t chunk = last - 1; chunk >= first; --chunk) {
      make_tiles(chunk, nullptr);
      kernels_.retreat(in_.d_o.head(batch_, token(chunk), head_), out_.dv.head(batch_, token(chunk), head_), s_.V,
                       records_[chunk], r(chunk), state(chunk - first), dstate_.get(), *tiles_);
      const auto leave = in_.per_channel ? kernels_.leave_channels : kernels_.leave_head;
      leave(records_[chunk], *tiles_);
      keep(chunk);
    }
  }

  void keep(int64_t chunk) const {
    keep_keys(chunk, tiles_->q, q_factors_.get(), in_.scale, tiles_->dq, dq_.get(), out_.dq);
    keep_keys(chunk, tiles_->k, k_factors_.get(), 1.0f, tiles_->dk, dk_.get(), out_.dk);
    for (int64_t i = 0; i < tiles_->tokens; ++i) {
      const float* dg = tiles_->dg + i * (in_.per_channel ? K_ : 1);
      out_.dg.write(batch_, token(chunk) + i, head_, dg);
      out_.dbeta.write(batch_, token(chunk) + i, head_, tiles_->dbeta + i);
    }
  }

  const ChunkShape<>& s_;
  const std::vector<Sequence>& sequences_;
  const Inputs& in_;
  const Outputs& out_;
  const BackwardKernels& kernels_ = backward_kernels();
  const RowKernels& row_kernels_ = row_kernels();
  std::unique_ptr<BackwardTiles> tiles_;
  int64_t K_, V_;
  std::vector<ChunkRecord> records_;  // these two hold every chunk of the longest sequence
  decltype(floats(0)) r_;
  decltype(floats(0)) starts_;  // the state before each segment
  decltype(floats(0)) states_, dstate_, q_, k_, q_factors_, k_factors_;
  decltype(floats(0)) dq_, dk_;  // sums over value heads, if a key head has several
  bool is_first_, is_last_;      // whether head_ is the key head's first or last value head
  int64_t sequence_, key_head_, head_, batch_, first_, length_, chunks_;
};

Rows rows_of(const Tensor& x) { return Rows(as_activation(x)); }

void run(const ChunkedBackward<int64_t>& op, const Gradients& outputs) {
  const auto& s = op.shape;
  const auto& [dq, dk, dv, dg, dbeta, dinitial_state] = outputs;
  const bool per_channel = op.channels.gk.has_value();
  const Inputs in{.q = rows_of(op.q),
                  .k = rows_of(op.k),
                  .v = rows_of(op.v),
                  .g = per_channel ? rows_of(*op.channels.gk) : Rows(op.g->to(at::kFloat)),
                  .beta = Rows(op.beta->to(at::kFloat)),
                  .d_o = rows_of(op.grad_o),
                  .states = StateIo::per_sequence(s, op.initial_state, dinitial_state, op.state_v_first),
                  .gradients = StateIo::per_sequence(s, op.grad_final_state, dinitial_state, op.state_v_first),
                  .scale = static_cast<float>(scale_or_default(op.scale, s.K)),
                  .normalise = op.use_qk_l2norm,
                  .per_channel = per_channel};
  const Outputs out{Rows(dq), Rows(dk), Rows(dv), Rows(dg), Rows(dbeta)};
  const auto sequences = sequences_of(s, op.cu_seqlens);
  int64_t longest = 0;
  for (const auto& each : sequences) longest = std::max(longest, each.length);
  share_work_items(s.N * s.H, at::get_num_threads(), [&](const auto& next) {
    BackwardCore core(s, sequences, longest, in, out);
    for (int64_t i; (i = next()) < s.N * s.H;) core.run(i);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) {
  define<ChunkGatedDeltaRuleBackward, &run>(m);
  define<ChunkKdaBackward, &run>(m);
}

}  // namespace torch_gdn::cpu
