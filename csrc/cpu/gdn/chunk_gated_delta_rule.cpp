#include "ops/gdn/chunk_gated_delta_rule.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "cpu/define.h"
#include "cpu/gates.h"
#include "cpu/gdn/recurrence.h"

namespace torch_gdn {

namespace {

struct Inputs {
  cpu::Rows q, k, v, g, beta;
  float scale;
  bool normalise;
};

struct Outputs {
  Tensor o, h;  // h has no elements where it was not asked for
};

// Each sequence and key head has panels, those of its value heads one after the other. A work item is some of them for
// a whole sequence, on one core. They share the products of the key head's q and k, so items are only as small as the
// cores need.
struct Work {
  ChunkShape<> s;
  int64_t step;            // tokens at a time: no more than a chunk, from whose start NaN may spread
  int64_t panels_of_head;  // ceil(V / 32)
  int64_t panels;          // of a key head
  int64_t panels_of_item;
  int64_t items_of_key_head;
  std::vector<cpu::Sequence> sequences;
  std::vector<int64_t> first_rows;  // of h, for each sequence
  std::vector<int64_t> order;       // of sequences, longest first

  Work(const ChunkShape<>& s, const optional<Tensor>& cu_seqlens);
  int64_t work_items() const { return s.N * s.H * items_of_key_head; }
  int64_t longest() const { return s.N > 0 ? sequences[order[0]].length : 0; }
  int64_t threads() const;
  int64_t value_head(int64_t key_head, int64_t panel) const {
    const int64_t i = panel / panels_of_head;
    return s.tiled ? i * s.H + key_head : key_head * (s.HV / s.H) + i;
  }
};

// Up to so many tokens the recurrence is faster: a chunk of 1 to 8 costs what 8 tokens of the recurrence do.
constexpr int64_t kFewTokens = 4;

// At most so many panels a work item: with K = 128 their state is half of a second-level cache of 1 MB.
constexpr int64_t kMostPanels = 32;

Work::Work(const ChunkShape<>& shape, const optional<Tensor>& cu_seqlens)
    : s(shape),
      step(std::min(s.C, cpu::kTokens)),
      panels_of_head(ceil_div(s.V, cpu::kColumns)),
      panels(panels_of_head * (s.HV / s.H)),
      sequences(cpu::sequences_of(s, cu_seqlens)),
      first_rows(s.N),
      order(s.N) {
  int64_t work_items = ceil_div(panels, kMostPanels);
  const int64_t heads = std::max<int64_t>(1, s.N * s.H), threads = at::get_num_threads();
  while (work_items < panels && heads * work_items < 4 * threads && heads * work_items % threads != 0) ++work_items;
  panels_of_item = ceil_div(panels, work_items);
  items_of_key_head = ceil_div(panels, panels_of_item);
  int64_t rows = 0;
  for (int64_t n = 0; n < s.N; ++n) {
    first_rows[n] = s.packed ? rows : 0;
    rows += ceil_div(sequences[n].length, s.C);
  }
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater{}, [&](int64_t n) { return sequences[n].length; });
}

// Another thread costs some microseconds: it must have some of them to do.
int64_t Work::threads() const {
  const int64_t tokens = s.B * s.T + s.N;
  return std::clamp<int64_t>(tokens * s.HV * s.K * s.V >> 18, 1, at::get_num_threads());
}

template <typename Operand>
class Core {
 public:
  Core(const Work& work, const Inputs& in, const cpu::StateIo& state_io, const Outputs& outputs,
       const cpu::ChunkKernels<Operand>& kernels)
      : work_(work),
        s_(work.s),
        in_(in),
        state_io_(state_io),
        out_(outputs.o),
        kernels_(kernels),
        tiles_(std::make_unique<Tiles>()),
        K_(cpu::padded(s_.K)),
        states_(cpu::Aligned::floats(work.panels_of_item * K_ * cpu::kColumns * (kHasOperands ? 2 : 1))) {
    if (outputs.h.dim() > 1) h_.emplace(outputs.h, state_io.v_first);
    tiles_->keys.K = K_;
  }

  void run(int64_t item) {
    const int64_t n = work_.order[item / work_.items_of_key_head / s_.H];
    const int64_t key_head = item / work_.items_of_key_head % s_.H;
    const int64_t first = item % work_.items_of_key_head * work_.panels_of_item;
    const int64_t last = std::min(first + work_.panels_of_item, work_.panels);
    if (state_io_.slots[n].index < 0) return;
    for (int64_t panel = first; panel < last; ++panel) read_state(n, key_head, panel, panel - first);
    const auto& [batch, first_token, length] = work_.sequences[n];
    for (int64_t t = 0; t < length; t += work_.step) {
      auto& keys = tiles_->keys;
      keys.tokens = std::min(work_.step, length - t);
      keys.rows = cpu::padded(keys.tokens);
      const int64_t token = first_token + t;
      kernels_.read_keys(in_.q.head(batch, token, key_head, 0), in_.k.head(batch, token, key_head, 0), s_.K,
                         in_.normalise, keys);
      for (int64_t panel = first; panel < last; ++panel) {
        const int64_t head = work_.value_head(key_head, panel), column = column_of(panel), i = panel - first;
        if (panel == first || column == 0) kernels_.make_head(keys, gates(batch, token, head), tiles_->head);
        if (h_ && t % s_.C == 0) {
          h_->write(batch, work_.first_rows[n] + t / s_.C, head, column, columns_from(column), state(i), cpu::kColumns);
        }
        kernels_.advance(keys, tiles_->head, in_.v.head(batch, token, head, column),
                         out_.head(batch, token, head, column), columns_from(column), state(i), operand(i),
                         tiles_->panel);
      }
      const auto& checkpoint = state_io_.checkpoints[n];
      if (t + keys.tokens == checkpoint.tokens) write_states(checkpoint.index, key_head, first, last);
    }
    write_states(state_io_.slots[n].index, key_head, first, last);
  }

 private:
  static constexpr bool kHasOperands = !std::is_same_v<Operand, float>;
  struct Tiles {
    cpu::KeyTiles<Operand> keys;
    cpu::HeadTiles<Operand> head;
    cpu::PanelTiles<Operand> panel;
  };

  int64_t column_of(int64_t panel) const { return panel % work_.panels_of_head * cpu::kColumns; }
  int64_t columns_from(int64_t column) const { return std::min(cpu::kColumns, s_.V - column); }
  float* state(int64_t i) const { return states_.get() + i * K_ * cpu::kColumns; }
  Operand* operand(int64_t i) const {
    if constexpr (!kHasOperands) return state(i);
    return reinterpret_cast<Operand*>(state(work_.panels_of_item + i));
  }

  // Those of panels first .. last.
  void write_states(int64_t slot, int64_t key_head, int64_t first, int64_t last) const {
    for (int64_t panel = first; panel < last; ++panel) {
      const int64_t column = column_of(panel);
      state_io_.write(slot, work_.value_head(key_head, panel), column, columns_from(column), state(panel - first),
                      cpu::kColumns);
    }
  }

  // Zeros past K and past V.
  void read_state(int64_t n, int64_t key_head, int64_t panel, int64_t i) {
    const int64_t column = column_of(panel), columns = columns_from(column);
    float* x = state(i);
    if (columns < cpu::kColumns) std::fill(x, x + s_.K * cpu::kColumns, 0.0f);
    state_io_.read(n, work_.value_head(key_head, panel), column, columns, s_.K, x, cpu::kColumns);
    std::fill(x + s_.K * cpu::kColumns, x + K_ * cpu::kColumns, 0.0f);
    if constexpr (kHasOperands) kernels_.make_operand(x, K_, operand(i));
  }

  cpu::HeadGates gates(int64_t batch, int64_t token, int64_t head) const {
    const auto g = in_.g.head(batch, token, head, 0), beta = in_.beta.head(batch, token, head, 0);
    constexpr int64_t size = sizeof(float);
    return {reinterpret_cast<const float*>(g.data), reinterpret_cast<const float*>(beta.data), g.stride / size,
            beta.stride / size, in_.scale};
  }

  const Work& work_;
  const ChunkShape<>& s_;
  const Inputs& in_;
  const cpu::StateIo& state_io_;
  cpu::Rows out_;
  optional<cpu::States> h_;
  const cpu::ChunkKernels<Operand>& kernels_;
  std::unique_ptr<Tiles> tiles_;
  int64_t K_;
  decltype(cpu::Aligned::floats(0)) states_;
};

template <typename Operand>
void run_work_items(const Work& work, const Inputs& in, const cpu::StateIo& state_io, const Outputs& outputs,
                    const cpu::ChunkKernels<Operand>& kernels) {
  cpu::share_work_items(work.work_items(), work.threads(), [&](const auto& next) {
    Core<Operand> core(work, in, state_io, outputs, kernels);
    for (int64_t i; (i = next()) < work.work_items();) core.run(i);
  });
}

void run_chunked(const ChunkedRule<int64_t>& op, const cpu::StateIo& state_io, const Outputs& outputs) {
  const auto& s = op.shape;
  const Work work(s, op.cu_seqlens);
  if (!op.return_intermediate_states && work.longest() <= kFewTokens) {
    return cpu::run_recurrence(op, {}, state_io, outputs.o);
  }
  if (state_io.has_null()) outputs.o.zero_();  // of a sequence without a slot nothing is written
  outputs.h.zero_();                           // its rows and surplus ones
  const Tensor q = unit_last_stride(op.q, "q"), k = unit_last_stride(op.k, "k"), v = unit_last_stride(op.v, "v");
  const Tensor log_decays = cpu::log_decays_of(s, op.g, op.gates), betas = cpu::betas_of(s, op.beta, op.gates);
  const Inputs in{.q = cpu::Rows(q),
                  .k = cpu::Rows(k),
                  .v = cpu::Rows(v),
                  .g = cpu::Rows(log_decays),
                  .beta = cpu::Rows(betas),
                  .scale = static_cast<float>(scale_or_default(op.scale, s.K)),
                  .normalise = op.use_qk_l2norm};
  // Products of bf16 pairs would round a v of another dtype.
  const bool is_bfloat16 = op.has_one_dtype() && q.scalar_type() == at::kBFloat16;
  const auto* of_pairs = is_bfloat16 ? cpu::chunk_kernels_of_pairs() : nullptr;
  if (of_pairs) {
    run_work_items(work, in, state_io, outputs, *of_pairs);
  } else {
    run_work_items(work, in, state_io, outputs, cpu::chunk_kernels());
  }
}

void run(const ChunkGatedDeltaRule<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor>& outputs) {
  const auto& [o, final_state, h] = outputs;
  run_chunked(op, cpu::StateIo::of_sequences(op.shape, op.initial_state, final_state, op.state_v_first), {o, h});
}

void run_in_place(const ChunkGatedDeltaRuleInPlace<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [o, h] = outputs;
  run_chunked(op, cpu::StateIo::in_place(op.shape, op.pool, op.state_v_first), {op.out.value_or(o), h});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) {
  cpu::define<ChunkGatedDeltaRule, &run>(m);
  cpu::define<ChunkGatedDeltaRuleInPlace, &run_in_place>(m);
}

}  // namespace torch_gdn
