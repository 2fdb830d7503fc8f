#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "cpu/gates.h"
#include "cpu/gdn/recurrence.h"

namespace torch_gdn {
namespace {

struct Inputs {
  cpu::Rows q, k, v, g, beta;
  float scale;
  bool normalise;
};

struct Options {
  bool normalise;
  optional<double> scale;
  bool has_h;
};

struct Outputs {
  Tensor o, h;  // h is empty where not asked for
};

at::TensorOptions h_options(const EndToEndOp& op) {
  return op.q.options().dtype(op.q.scalar_type() == at::kHalf ? at::kFloat : op.q.scalar_type());
}

// What is not written stays zeros: o of a sequence that has no slot, its rows of h, and surplus ones.
Outputs new_outputs(const ChunkShape<>& s, const EndToEndOp& op, const cpu::StateIo& state_io, bool has_h) {
  const auto options = op.q.options().dtype(output_dtype_of(op));
  const Tensor o =
      state_io.has_null() ? at::zeros({s.B, s.T, s.HV, s.V}, options) : at::empty({s.B, s.T, s.HV, s.V}, options);
  if (!has_h) return {o, at::empty({0}, h_options(op))};
  const int64_t rows = state_io.v_first ? s.V : s.K, columns = state_io.v_first ? s.K : s.V;
  return {o, at::zeros({s.B, s.NT, s.HV, rows, columns}, h_options(op))};
}

// The work: each sequence and key head has panels, those of its value heads one after the other. Panels are independent
// of each other, and a work_item of work is some of them for a whole sequence, on one core. They share what is made of the
// key head's q and k, so work_items are only as small as the cores need.
struct Work {
  ChunkShape<> s;
  int64_t step;            // tokens at a time: no more than a chunk, from whose start NaN may spread
  int64_t panels_of_head;  // ceil(V / 32)
  int64_t panels;          // of a key head
  int64_t panels_of_piece;
  int64_t pieces_of_key_head;
  std::vector<cpu::Sequence> sequences;
  std::vector<int64_t> first_rows;  // of h, for each sequence
  std::vector<int64_t> order;       // of sequences, longest first

  Work(const ChunkShape<>& s, const optional<Tensor>& cu_seqlens);
  int64_t work_items() const { return s.N * s.H * pieces_of_key_head; }
  int64_t longest() const { return s.N > 0 ? sequences[order[0]].length : 0; }
  int64_t threads() const;
  int64_t value_head(int64_t key_head, int64_t panel) const {
    const int64_t i = panel / panels_of_head;
    return s.tiled ? i * s.H + key_head : key_head * (s.HV / s.H) + i;
  }
};

// Up to so many tokens the recurrence is faster: a chunk of 1 to 8 costs what 8 tokens of the recurrence do.
constexpr int64_t kFewTokens = 4;

// At most so many panels a work_item: with K = 128 their state is half of a second-level cache of 1 MB.
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
  panels_of_piece = ceil_div(panels, work_items);
  pieces_of_key_head = ceil_div(panels, panels_of_piece);
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
        states_(cpu::Aligned::floats(work.panels_of_piece * K_ * cpu::kColumns * (kHasOperands ? 2 : 1))) {
    if (outputs.h.dim() > 1) h_.emplace(outputs.h, state_io.v_first);
    tiles_->keys.K = K_;
  }

  void run(int64_t work_item) {
    const int64_t n = work_.order[work_item / work_.pieces_of_key_head / s_.H];
    const int64_t key_head = work_item / work_.pieces_of_key_head % s_.H;
    const int64_t first = work_item % work_.pieces_of_key_head * work_.panels_of_piece;
    const int64_t last = std::min(first + work_.panels_of_piece, work_.panels);
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
    }
    for (int64_t panel = first; panel < last; ++panel) {
      const int64_t column = column_of(panel);
      state_io_.write(n, work_.value_head(key_head, panel), column, columns_from(column), state(panel - first),
                    cpu::kColumns);
    }
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
    return reinterpret_cast<Operand*>(state(work_.panels_of_piece + i));
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
void run_pieces(const Work& work, const Inputs& in, const cpu::StateIo& state_io, const Outputs& outputs,
                const cpu::ChunkKernels<Operand>& kernels) {
  cpu::share_work_items(work.work_items(), work.threads(), [&](const auto& next) {
    Core<Operand> core(work, in, state_io, outputs, kernels);
    for (int64_t i; (i = next()) < work.work_items();) core.run(i);
  });
}

Outputs run(const ChunkShape<>& s, const EndToEndOp& op, const cpu::StateIo& state_io,
            const optional<Tensor>& cu_seqlens, const Options& options) {
  const Work work(s, cu_seqlens);
  if (!options.has_h && work.longest() <= kFewTokens) {
    const Tensor o =
        cpu::run_recurrence(s, op, {std::nullopt, std::nullopt}, state_io, cu_seqlens, options.normalise, options.scale);
    return {o, at::empty({0}, h_options(op))};
  }
  const Outputs outputs = new_outputs(s, op, state_io, options.has_h);
  const Tensor q = unit_last_stride(op.q, "q"), k = unit_last_stride(op.k, "k"), v = unit_last_stride(op.v, "v");
  const Tensor decays = cpu::log_decays_of(s, op.g, op.gates), steps = cpu::betas_of(s, op.beta, op.gates);
  const Inputs in{cpu::Rows(q),      cpu::Rows(k),     cpu::Rows(v),
                  cpu::Rows(decays), cpu::Rows(steps), static_cast<float>(scale_or_default(options.scale, s.K)),
                  options.normalise};
  const auto* of_pairs = q.scalar_type() == at::kBFloat16 ? cpu::chunk_kernels_of_pairs() : nullptr;
  if (of_pairs) {
    run_pieces(work, in, state_io, outputs, *of_pairs);
  } else {
    run_pieces(work, in, state_io, outputs, cpu::chunk_kernels());
  }
  return outputs;
}

std::tuple<Tensor, Tensor, Tensor> chunk_gated_delta_rule(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta, optional<double> scale,
    const optional<Tensor>& initial_state, bool output_final_state, bool use_qk_l2norm_in_kernel, bool state_v_first,
    const optional<Tensor>& cu_seqlens, const optional<Tensor>& chunk_indices, int64_t chunk_size,
    bool use_gate_in_kernel, const optional<Tensor>& A_log, const optional<Tensor>& dt_bias,
    bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, optional<at::ScalarType> output_dtype,
    std::string_view head_grouping, bool return_intermediate_states) {
  const GateOptions gates{use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval};
  const optional<Tensor> some_g = g, some_beta = beta;
  const EndToEndOp op{"chunk_gated_delta_rule", q, k, v, some_g, some_beta, gates, output_dtype, head_grouping};
  const auto s = check_chunk_gated_delta_rule(op, initial_state, state_v_first, cu_seqlens, chunk_indices, chunk_size);
  const Tensor final_state = cpu::new_final_state(s, q, output_final_state, state_v_first);
  const auto state_io = cpu::StateIo::of_sequences(s, initial_state, final_state, state_v_first);
  const auto [o, h] = run(s, op, state_io, cu_seqlens, {use_qk_l2norm_in_kernel, scale, return_intermediate_states});
  return {o, final_state, h};
}

std::tuple<Tensor, Tensor> chunk_gated_delta_rule_(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta, const Tensor& state_pool,
    const optional<Tensor>& state_indices, const optional<Tensor>& has_initial_state, int64_t null_index,
    optional<double> scale, bool use_qk_l2norm_in_kernel, bool state_v_first, const optional<Tensor>& cu_seqlens,
    const optional<Tensor>& chunk_indices, int64_t chunk_size, bool use_gate_in_kernel, const optional<Tensor>& A_log,
    const optional<Tensor>& dt_bias, bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval,
    optional<at::ScalarType> output_dtype, std::string_view head_grouping, bool return_intermediate_states) {
  const GateOptions gates{use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval};
  const optional<Tensor> some_g = g, some_beta = beta;
  const Pool pool{state_pool, state_indices, has_initial_state, null_index, state_v_first};
  const EndToEndOp op{"chunk_gated_delta_rule_", q, k, v, some_g, some_beta, gates, output_dtype, head_grouping};
  const auto s = check_chunk_gated_delta_rule_(op, pool, cu_seqlens, chunk_indices, chunk_size);
  const auto [o, h] = run(s, op, cpu::StateIo::in_place(s, pool), cu_seqlens,
                          {use_qk_l2norm_in_kernel, scale, return_intermediate_states});
  return {o, h};
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, CPU, m) {
  m.impl("chunk_gated_delta_rule", &chunk_gated_delta_rule);
  m.impl("chunk_gated_delta_rule_", &chunk_gated_delta_rule_);
}

}  // namespace torch_gdn
