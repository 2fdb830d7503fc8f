#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cstring>

#include "cpu/define.h"
#include "cpu/gates.h"
#include "cpu/gdn/recurrence.h"
#include "ops/gdn/rules.h"

namespace torch_gdn::cpu {

namespace {

struct RecurrentInputs {
  Rows q, k, v, g, beta;
  optional<Rows> gk, gv;
  float scale;
  bool has_vector_beta, normalise;

  // Returns columns `column` .. `column` + `columns` of a value head, from one token on.
  RecurrentHead head(const ChunkShape<>& s, const Sequence& sequence, int64_t head, int64_t column, int64_t columns,
                     const Rows& o) const {
    const auto& [batch, first, length] = sequence;
    const int64_t key_head = key_head_of(s, head);
    return {.q = q.head(batch, first, key_head),
            .k = k.head(batch, first, key_head),
            .v = v.head(batch, first, head, column),
            .o = o.head(batch, first, head, column),
            .g = g.head(batch, first, head),
            .beta = beta.head(batch, first, head, has_vector_beta ? column : 0),
            .gk = gk ? gk->head(batch, first, head) : HeadRows{},
            .gv = gv ? gv->head(batch, first, head, column) : HeadRows{},
            .tokens = length,
            .K = s.K,
            .columns = columns,
            .scale = scale,
            .normalise = normalise,
            .has_vector_beta = has_vector_beta};
  }
};

// Columns of V are independent of each other. A work item is one value head of one sequence, or a slice of its columns
// if there are fewer heads than cores.
class Work {
 public:
  Work(const ChunkShape<>& s, const RecurrentInputs& in, const StateIo& state_io, const Tensor& o,
       const optional<Tensor>& cu_seqlens)
      : s_(s),
        in_(in),
        state_io_(state_io),
        out_(o),
        sequences_(sequences_of(s, cu_seqlens)),
        in_rows_(!in.gv && state_io.has_vector_rows(s)),
        slice_(in_rows_ ? s.V : kColumns) {
    const int64_t heads = s.N * s.HV, threads = at::get_num_threads();
    if (heads < 2 * threads) slice_ = kColumns;
    slices_ = ceil_div(s.V, slice_);
  }

  // Each core takes neighbouring heads, and takes the same heads for the next token, because its second-level cache may
  // still hold their states. One more core is used for every 256 KB of state, which takes one core 8 us.
  void run() const {
    const int64_t work_items = s_.N * s_.HV * slices_, values = (s_.B * s_.T + s_.N) * s_.HV * s_.K * s_.V;
    const int64_t threads = std::clamp<int64_t>(values >> 16, 1, at::get_num_threads());
    at::parallel_for(0, work_items, ceil_div(work_items, threads), [&](int64_t begin, int64_t end) {
      const auto scratch = Aligned::floats(s_.K * ceil_div(slice_, kColumns) * kColumns);
      for (int64_t i = begin; i < end; ++i) {
        const WorkItem item = work_item_at(i);
        const auto work = in_.head(s_, sequences_[item.n], item.head, item.column, item.columns, out_);
        if (state_io_.slots[item.n].index < 0) {
          leave_zeros(work);
        } else if (in_rows_) {
          run_rows(work, item, i + 1 < end ? work_item_at(i + 1) : item, scratch.get());
        } else {
          run_panel(work, item, scratch.get());
        }
      }
    });
  }

 private:
  struct WorkItem {
    int64_t n, head, column, columns;
  };

  WorkItem work_item_at(int64_t i) const {
    const int64_t column = i % slices_ * slice_;
    return {i / slices_ / s_.HV, i / slices_ % s_.HV, column, std::min(slice_, s_.V - column)};
  }

  // Returns the rows of the old state, or nullptr if there is no old state.
  const float* old_rows(const WorkItem& item, int64_t& stride) const {
    const auto& [index, has_state] = state_io_.slots[item.n];
    if (!state_io_.source || index < 0 || !has_state) return nullptr;
    return state_io_.rows(*state_io_.source, index, item.head, item.column, stride);
  }

  // As in decoding, the state after each token goes to its slot, or to scratch if it has none.
  bool keeps_each_token() const { return state_io_.token_slots.tokens > 0; }

  // Takes states whose rows can be read as vectors. They are updated in place, or read from the old place and written
  // to the new one.
  void run_rows(const RecurrentHead& work, const WorkItem& item, const WorkItem& next, float* scratch) const {
    const auto& kernels = recurrent_kernels();
    const auto run = state_io_.v_first ? kernels.run_value_rows : kernels.run_key_rows;
    const int64_t rows = state_io_.v_first ? work.columns : s_.K, width = state_io_.v_first ? s_.K : work.columns;
    const auto go_to = [&](StateRows& state, int64_t slot) {
      state.to = scratch;
      state.to_stride = width;
      if (slot >= 0) state.to = state_io_.rows(state_io_.target, slot, item.head, item.column, state.to_stride);
    };
    const bool has_slot = !keeps_each_token() && state_io_.target.dim() > 1;
    StateRows state{};
    go_to(state, has_slot ? state_io_.slots[item.n].index : -1);
    state.from = old_rows(item, state.from_stride);
    if (!state.from || work.tokens == 0) {
      copy_rows(state, rows, width);
    } else if (const float* next_rows = keeps_each_token() ? nullptr : old_rows(next, state.from_stride)) {
      state.to_next = next_rows - state.from;
    }
    if (!keeps_each_token()) return run(work, state);
    for (int64_t t = 0; t < work.tokens; ++t) {
      go_to(state, state_io_.token_slots.of(item.n, t));
      run(token_of(work, t), state);
      state.from = state.to;
      state.from_stride = state.to_stride;
    }
  }

  // Copies the old state, or zeros, to the new place, and continues from there.
  static void copy_rows(StateRows& state, int64_t rows, int64_t width) {
    for (int64_t i = 0; i < rows; ++i) {
      float* to = state.to + i * state.to_stride;
      if (!state.from) {
        std::fill(to, to + width, 0.0f);
      } else if (to != state.from) {
        std::copy(state.from + i * state.from_stride, state.from + i * state.from_stride + width, to);
      }
    }
    state.from = state.to;
    state.from_stride = state.to_stride;
  }

  // Takes any other state. It works on an f32 copy of the state's columns. After each token that is kept, the copy is
  // rounded to the pool's dtype, also if the token has no slot.
  void run_panel(const RecurrentHead& work, const WorkItem& item, float* panel) const {
    const auto& [n, head, column, columns] = item;
    const StateRows state{panel, panel, kColumns, kColumns, 0};
    const auto run = recurrent_kernels().run_key_rows;
    if (columns < kColumns) std::fill(panel, panel + s_.K * kColumns, 0.0f);
    state_io_.read(n, head, column, columns, s_.K, panel, kColumns);
    if (!keeps_each_token()) {
      run(work, state);
      return state_io_.write(state_io_.slots[n].index, head, column, columns, panel, kColumns);
    }
    for (int64_t t = 0; t < work.tokens; ++t) {
      run(token_of(work, t), state);
      state_io_.write(state_io_.token_slots.of(n, t), head, column, columns, panel, kColumns);
      with_element(state_io_.target.scalar_type(), [&]<typename Element>(Element*) {
        const auto rounded = [](float value) { return static_cast<float>(Element(value)); };
        std::transform(panel, panel + s_.K * kColumns, panel, rounded);
      });
    }
  }

  static RecurrentHead token_of(RecurrentHead work, int64_t t) {
    for (auto* rows : {&work.q, &work.k, &work.v, &work.o, &work.g, &work.beta, &work.gk, &work.gv}) {
      if (rows->data) rows->data += t * rows->stride;
    }
    work.tokens = 1;
    return work;
  }

  static void leave_zeros(const RecurrentHead& work) {
    for (int64_t t = 0; t < work.tokens; ++t) {
      std::memset(work.o.data + t * work.o.stride, 0, work.columns * at::elementSize(work.o.dtype));
    }
  }

  const ChunkShape<>& s_;
  const RecurrentInputs& in_;
  const StateIo& state_io_;
  Rows out_;
  std::vector<Sequence> sequences_;
  bool in_rows_;
  int64_t slice_, slices_;
};

optional<Rows> rows_or_none(const optional<Tensor>& x, const char* name) {
  return x.has_value() ? optional(Rows(as_activation(*x), name)) : std::nullopt;
}

}  // namespace

void run_recurrence(const GatedDeltaRule<>& op, const StateIo& state_io, const Tensor& o) {
  const auto& s = op.shape;
  const auto& channels = op.channels;
  const Tensor betas = betas_of(s, op.beta, op.gates);
  const auto log_gk = channels.gk ? channel_decays_of(*channels.gk, channels.gate) : channels.gk;
  const RecurrentInputs in{.q = Rows(op.q, "q"),
                           .k = Rows(op.k, "k"),
                           .v = Rows(op.v, "v"),
                           .g = Rows(log_decays_of(s, op.g, op.gates)),
                           .beta = Rows(betas, "beta"),
                           .gk = rows_or_none(log_gk, channels.gk_name),
                           .gv = rows_or_none(channels.gv, "gv"),
                           .scale = static_cast<float>(scale_or_default(op.scale, s.K)),
                           .has_vector_beta = betas.dim() == 4,
                           .normalise = op.use_qk_l2norm};
  Work(s, in, state_io, o, op.cu_seqlens).run();
}

void run_recurrence_of(const std::vector<int64_t>& sequences, const GatedDeltaRule<>& op, const StateIo& state_io,
                       const Tensor& o) {
  if (sequences.empty()) return;
  if (std::ssize(sequences) == op.shape.N) return run_recurrence(op, state_io, o);
  const auto all = sequences_of(op.shape, op.cu_seqlens);
  GatedDeltaRule<> part = op;
  StateIo part_io = state_io;
  part_io.slots.clear();
  std::vector<int64_t> boundaries = {0}, tokens;
  for (const int64_t n : sequences) {
    for (int64_t t = 0; t < all[n].length; ++t) tokens.push_back(all[n].first + t);
    boundaries.push_back(std::ssize(tokens));
    part_io.slots.push_back(state_io.slots[n]);
  }
  part.shape.N = std::ssize(sequences);
  part.shape.T = std::ssize(tokens);
  part.cu_seqlens = at::tensor(boundaries, at::kLong);
  const Tensor rows = at::tensor(tokens, at::kLong);
  for (Tensor* x : {&part.q, &part.k, &part.v}) *x = x->index_select(1, rows);
  for (auto* x : {&part.g, &part.beta, &part.channels.gk}) {
    if (x->has_value()) *x = (*x)->index_select(1, rows);
  }
  const Tensor part_o = at::empty({1, part.shape.T, part.shape.HV, part.shape.V}, o.options());
  run_recurrence(part, part_io, part_o);
  o.index_copy_(1, rows, part_o);
}

namespace {

void run(const RecurrentCall<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [o, final_state] = outputs;
  run_recurrence(op, StateIo::per_sequence(op.shape, op.initial_state, final_state, op.state_v_first), o);
}

void run_in_place(const RecurrentCallInPlace<int64_t>& op, const Tensor& o) {
  run_recurrence(op, StateIo::in_place(op.shape, op.pool, op.state_v_first), op.out.value_or(o));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) {
  define<FusedRecurrentGatedDeltaRule, &run>(m);
  define<FusedRecurrentGatedDeltaRuleInPlace, &run_in_place>(m);
  define<FusedRecurrentKda, &run>(m);
  define<FusedRecurrentKdaInPlace, &run_in_place>(m);
}

}  // namespace torch_gdn::cpu
