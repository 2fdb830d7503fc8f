// The chunked ops. A core takes the chunks of a sequence one after the other, and computes the panels of its states.
#include <algorithm>
#include <functional>

#include "cpu/define.h"
#include "cpu/gates.h"
#include "cpu/gdn/recurrence.h"
#include "ops/gdn/rules.h"

namespace torch_gdn::cpu {

namespace {

struct ChunkedInputs {
  Rows q, k, v, g, beta;
  float scale;
  bool normalise;
  optional<ChannelGateValues> channel_gate;  // if channels of K have decays

  Gates gates(int64_t batch, int64_t token, int64_t head) const {
    const HeadRows log_decays = g.head(batch, token, head);
    Gates gates = channel_gate ? channel_gate->for_head(head, log_decays) : Gates{.g = log_decays};
    gates.beta = beta.head(batch, token, head);
    return gates;
  }
};

struct ChunkedOutputs {
  Tensor o, h;  // h has no elements if it was not requested
};

// Each sequence and key head has panels: those of its value heads, one after the other. A work item is some of these
// panels for a whole sequence, and runs on one core. Panels share the products of the key head's q and k, so items are
// only as small as the number of cores requires.
struct ChunkedWork {
  ChunkShape<> s;
  int64_t step;            // tokens at a time, at most a chunk; NaN may spread from the start of a step
  int64_t panels_of_head;  // ceil(V / 32)
  int64_t panels;          // panels per key head
  int64_t panels_of_item;
  int64_t items_of_key_head;
  std::vector<Sequence> sequences;
  std::vector<int64_t> first_rows;  // first row of h for each sequence
  std::vector<int64_t> order;       // sequences with more than `few` tokens, longest first
  std::vector<int64_t> short_ones;  // the other sequences, which the recurrence processes

  ChunkedWork(const ChunkShape<>& s, const optional<Tensor>& cu_seqlens, int64_t few);
  int64_t work_items() const { return std::ssize(order) * s.H * items_of_key_head; }
  // Starting another thread takes some microseconds, so each thread must have at least that much work.
  int64_t threads() const {
    const int64_t tokens = s.B * s.T + s.N;
    return std::clamp<int64_t>(tokens * s.HV * s.K * s.V >> 18, 1, at::get_num_threads());
  }
  int64_t value_head(int64_t key_head, int64_t panel) const {
    const int64_t i = panel / panels_of_head;
    return s.tiled ? i * s.H + key_head : key_head * (s.HV / s.H) + i;
  }
};

// The most panels in a work item. With K = 128, their state fills half of a 1 MB second-level cache.
constexpr int64_t kMostPanels = 32;

ChunkedWork::ChunkedWork(const ChunkShape<>& shape, const optional<Tensor>& cu_seqlens, int64_t few)
    : s(shape),
      step(std::min(s.C, kTokens)),
      panels_of_head(ceil_div(s.V, kColumns)),
      panels(panels_of_head * (s.HV / s.H)),
      sequences(sequences_of(s, cu_seqlens)),
      first_rows(s.N) {
  for (int64_t n = 0; n < s.N; ++n) (sequences[n].length > few ? order : short_ones).push_back(n);
  std::ranges::stable_sort(order, std::greater{}, [&](int64_t n) { return sequences[n].length; });
  int64_t work_items = ceil_div(panels, kMostPanels);
  const int64_t heads = std::max<int64_t>(1, std::ssize(order) * s.H), threads = at::get_num_threads();
  while (work_items < panels && heads * work_items < 4 * threads && heads * work_items % threads != 0) ++work_items;
  panels_of_item = ceil_div(panels, work_items);
  items_of_key_head = ceil_div(panels, panels_of_item);
  int64_t rows = 0;
  for (int64_t n = 0; n < s.N; ++n) {
    first_rows[n] = s.packed ? rows : 0;
    rows += ceil_div(sequences[n].length, s.C);
  }
}

template <typename Kernels>
class Core {
 public:
  Core(const ChunkedWork& work, const Kernels& kernels, const ChunkedInputs& in, const StateIo& state_io,
       const ChunkedOutputs& outputs)
      : work_(work),
        s_(work.s),
        kernels_(kernels),
        in_(in),
        state_io_(state_io),
        out_(outputs.o),
        tiles_(std::make_unique<Tiles>()),
        K_(ceil_div(s_.K, Kernels::Keys::kMultiple) * Kernels::Keys::kMultiple),
        states_(Aligned::floats(work.panels_of_item * K_ * kColumns * (kHasOperands ? 2 : 1))) {
    tiles_->keys.K = K_;
    if (outputs.h.dim() > 1) h_.emplace(outputs.h, state_io.v_first);
  }

  void run(int64_t item) {
    const int64_t n = work_.order[item / work_.items_of_key_head / s_.H];
    const int64_t key_head = item / work_.items_of_key_head % s_.H;
    const int64_t first = item % work_.items_of_key_head * work_.panels_of_item;
    const int64_t last = std::min(first + work_.panels_of_item, work_.panels);
    if (state_io_.slots[n].index < 0) return;
    for (int64_t panel = first; panel < last; ++panel) read_state(n, key_head, panel, panel - first);
    const auto& [batch, first_token, length] = work_.sequences[n];
    auto& [keys, head_tiles, panel_tiles] = *tiles_;
    for (int64_t t = 0; t < length; t += work_.step) {
      const int64_t token = first_token + t;
      keys.tokens = std::min(work_.step, length - t);
      keys.rows = padded(keys.tokens);
      kernels_.read_keys(in_.q.head(batch, token, key_head), in_.k.head(batch, token, key_head), s_.K, in_.normalise,
                         in_.scale, keys);
      for (int64_t panel = first; panel < last; ++panel) {
        const int64_t head = work_.value_head(key_head, panel), column = column_of(panel), i = panel - first;
        const int64_t columns = columns_from(column);
        if (panel == first || column == 0) kernels_.make_head(keys, in_.gates(batch, token, head), head_tiles);
        if (h_ && t % s_.C == 0) {
          h_->write(batch, work_.first_rows[n] + t / s_.C, head, column, columns, state(i), kColumns);
        }
        kernels_.advance(keys, head_tiles, in_.v.head(batch, token, head, column),
                         out_.head(batch, token, head, column), columns, state(i), operand(i), panel_tiles);
      }
      const auto& checkpoint = state_io_.checkpoints[n];
      if (t + keys.tokens == checkpoint.tokens) write_states(checkpoint.index, key_head, first, last);
    }
    write_states(state_io_.slots[n].index, key_head, first, last);
  }

 private:
  using Operand = typename Kernels::Operand;
  static constexpr bool kHasOperands = !std::is_same_v<Operand, float>;  // whether a state has a second form
  struct Tiles {
    typename Kernels::Keys keys;
    typename Kernels::Head head;
    PanelTiles<Operand> panel;
  };

  int64_t column_of(int64_t panel) const { return panel % work_.panels_of_head * kColumns; }
  int64_t columns_from(int64_t column) const { return std::min(kColumns, s_.V - column); }
  float* state(int64_t i) const { return states_.get() + i * K_ * kColumns; }
  Operand* operand(int64_t i) const {
    if constexpr (!kHasOperands) return state(i);
    return reinterpret_cast<Operand*>(state(work_.panels_of_item + i));
  }

  // Writes the states of panels first .. last.
  void write_states(int64_t slot, int64_t key_head, int64_t first, int64_t last) const {
    for (int64_t panel = first; panel < last; ++panel) {
      const int64_t column = column_of(panel);
      state_io_.write(slot, work_.value_head(key_head, panel), column, columns_from(column), state(panel - first),
                      kColumns);
    }
  }

  // Writes zeros past K and past V.
  void read_state(int64_t n, int64_t key_head, int64_t panel, int64_t i) {
    const int64_t column = column_of(panel), columns = columns_from(column);
    float* x = state(i);
    if (columns < kColumns) std::fill(x, x + s_.K * kColumns, 0.0f);
    state_io_.read(n, work_.value_head(key_head, panel), column, columns, s_.K, x, kColumns);
    std::fill(x + s_.K * kColumns, x + K_ * kColumns, 0.0f);
    if constexpr (kHasOperands) kernels_.make_operand(x, K_, operand(i));
  }

  const ChunkedWork& work_;
  const ChunkShape<>& s_;
  const Kernels& kernels_;
  const ChunkedInputs& in_;
  const StateIo& state_io_;
  Rows out_;
  optional<States> h_;
  std::unique_ptr<Tiles> tiles_;
  int64_t K_;
  decltype(Aligned::floats(0)) states_;
};

template <typename Kernels>
void run_chunks(const ChunkedWork& work, const Kernels& kernels, const ChunkedInputs& in, const StateIo& state_io,
                const ChunkedOutputs& outputs) {
  if (state_io.has_null()) outputs.o.zero_();  // a sequence without a slot writes nothing
  outputs.h.zero_();                           // covers the rows of such a sequence and the surplus rows
  share_work_items(work.work_items(), work.threads(), [&](const auto& next) {
    Core core(work, kernels, in, state_io, outputs);
    for (int64_t i; (i = next()) < work.work_items();) core.run(i);
  });
}

void run_chunks(const ChunkedRule<int64_t>& op, const ChunkedWork& work, const StateIo& state_io,
                const ChunkedOutputs& outputs) {
  const auto& s = op.shape;
  const auto& [gk, gv, gk_name, gate] = op.channels;
  const ChunkedInputs in{.q = Rows(op.q, "q"),
                         .k = Rows(op.k, "k"),
                         .v = Rows(op.v, "v"),
                         .g = gk ? Rows(as_activation(*gk), gk_name) : Rows(log_decays_of(s, op.g, op.gates)),
                         .beta = Rows(betas_of(s, op.beta, op.gates)),
                         .scale = static_cast<float>(scale_or_default(op.scale, s.K)),
                         .normalise = op.use_qk_l2norm,
                         .channel_gate = gk ? optional(ChannelGateValues(s.HV, s.K, gate)) : std::nullopt};
  // Pairs of bf16 would round a v of another dtype.
  const bool is_bfloat16 = op.has_one_dtype() && op.q.scalar_type() == at::kBFloat16;
  if (gk) {
    run_chunks(work, channel_kernels(), in, state_io, outputs);
  } else if (const auto* of_pairs = is_bfloat16 ? chunk_kernels_of_pairs() : nullptr) {
    run_chunks(work, *of_pairs, in, state_io, outputs);
  } else {
    run_chunks(work, chunk_kernels(), in, state_io, outputs);
  }
}

void run_chunked(const ChunkedRule<int64_t>& op, const StateIo& state_io, const ChunkedOutputs& outputs) {
  const ChunkedWork work(op.shape, op.cu_seqlens, few_tokens_of(op));
  if (!work.order.empty()) run_chunks(op, work, state_io, outputs);
  run_recurrence_of(work.short_ones, op, state_io, outputs.o);
}

void run(const ChunkedCall<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor>& outputs) {
  const auto& [o, final_state, h] = outputs;
  run_chunked(op, StateIo::per_sequence(op.shape, op.initial_state, final_state, op.state_v_first), {o, h});
}

void run_in_place(const ChunkedCallInPlace<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [o, h] = outputs;
  run_chunked(op, StateIo::in_place(op.shape, op.pool, op.state_v_first), {op.out.value_or(o), h});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) {
  define<ChunkGatedDeltaRule, &run>(m);
  define<ChunkGatedDeltaRuleInPlace, &run_in_place>(m);
  define<ChunkKda, &run>(m);
  define<ChunkKdaInPlace, &run_in_place>(m);
}

}  // namespace torch_gdn::cpu
