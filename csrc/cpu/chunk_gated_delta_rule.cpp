#include <ATen/ops/baddbmm.h>
#include <torch/library.h>

#include "gates.h"

namespace torch_gdn {
namespace {

struct Inputs {
  cpu::Rows q, k, v, g, beta;
  float scale;
  bool normalise;
};

// What a chunk's tokens contribute whatever the state is, one tile a chunk and value head.
struct Tiles {
  Tensor update;   // Tm diag(beta): v_new = update (v - reading S)
  Tensor scores;   // scale tril(q k^T exp(c_i - c_j))
  Tensor reading;  // exp(c) k
  Tensor queries;  // scale exp(c) q
  Tensor writing;  // exp(c_last - c) k
  Tensor values;   // v
  Tensor decay;    // exp(c_last)

  Tiles(const ChunkShape& s, int64_t tiles, int64_t rows)
      : update(cpu::f32_tiles(tiles, rows, rows)),
        scores(cpu::f32_tiles(tiles, rows, rows)),
        reading(cpu::f32_tiles(tiles, rows, s.K)),
        queries(cpu::f32_tiles(tiles, rows, s.K)),
        writing(cpu::f32_tiles(tiles, rows, s.K)),
        values(cpu::f32_tiles(tiles, rows, s.V)),
        decay(cpu::f32_tiles(tiles, 1, 1)) {}

  Tiles narrow(int64_t first, int64_t count) const {
    Tiles part = *this;
    for (Tensor* x :
         {&part.update, &part.scores, &part.reading, &part.queries, &part.writing, &part.values, &part.decay}) {
      *x = x->narrow(0, first, count);
    }
    return part;
  }
};

// The tiles of one key head that its value heads share, and their products.
struct KeyTiles {
  Tensor q, k, k_k, q_k;

  KeyTiles(const ChunkShape& s, const Inputs& in, std::span<const cpu::Chunk> chunks, int64_t rows)
      : q(cpu::f32_tiles(chunks.size() * s.H, rows, s.K)), k(cpu::f32_tiles(chunks.size() * s.H, rows, s.K)) {
    cpu::for_each_tile(chunks.size(), s.H, [&](int64_t i, int64_t head) {
      float *queries = cpu::tile(q, i * s.H + head), *keys = cpu::tile(k, i * s.H + head);
      in.q.read_tile(chunks[i], head, rows, queries);
      in.k.read_tile(chunks[i], head, rows, keys);
      if (in.normalise) {
        cpu::normalise_rows(queries, rows, s.K, cpu::kNormEps);
        cpu::normalise_rows(keys, rows, s.K, cpu::kNormEps);
      }
    });
    k_k = at::bmm(k, k.transpose(1, 2));
    q_k = at::bmm(q, k.transpose(1, 2));
  }
};

// The cumulative sum is kept in f64: no digits of exp(c_i - c_j) are lost to a large c.
struct Gates {
  double sums[64];
  float beta[64];

  Gates(const Inputs& in, const cpu::Chunk& chunk, int64_t head, int64_t rows) {
    double sum = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const bool inside = i < chunk.length;
      if (inside) sum += cpu::clamp_decay(in.g.value(chunk.batch, chunk.first + i, head));
      sums[i] = sum;
      beta[i] = inside ? in.beta.value(chunk.batch, chunk.first + i, head) : 0.0f;
    }
  }
};

void fill_matrices(const Gates& gates, const float* k_k, const float* q_k, int64_t length, int64_t rows, float scale,
                   float* update, float* scores) {
  float A[64 * 64];
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c <= r; ++c) {
      const float decay = std::exp(static_cast<float>(gates.sums[r] - gates.sums[c]));
      A[r * rows + c] = gates.beta[r] * k_k[r * rows + c] * decay;
      scores[r * rows + c] = scale * q_k[r * rows + c] * decay;
    }
    std::fill(scores + r * rows + r + 1, scores + (r + 1) * rows, 0.0f);
  }
  cpu::invert_unit_lower(A, rows, length, rows, update, rows);
  for (int64_t r = 0; r < length; ++r) {
    for (int64_t c = 0; c <= r; ++c) update[r * rows + c] *= gates.beta[c];
  }
}

Tiles prepare(const ChunkShape& s, const Inputs& in, std::span<const cpu::Chunk> chunks) {
  const int64_t rows = cpu::tile_rows(chunks);
  const KeyTiles shared(s, in, chunks, rows);
  const Tiles tiles(s, chunks.size() * s.HV, rows);
  cpu::for_each_tile(chunks.size(), s.HV, [&](int64_t i, int64_t head) {
    const int64_t n = i * s.HV + head, key_tile = i * s.H + cpu::key_head_of(s, head);
    const Gates gates(in, chunks[i], head, rows);
    fill_matrices(gates, cpu::tile(shared.k_k, key_tile), cpu::tile(shared.q_k, key_tile), chunks[i].length, rows,
                  in.scale, cpu::tile(tiles.update, n), cpu::tile(tiles.scores, n));
    float passed[64], scaled[64], remaining[64];
    for (int64_t r = 0; r < rows; ++r) {
      passed[r] = std::exp(static_cast<float>(gates.sums[r]));
      scaled[r] = in.scale * passed[r];
      remaining[r] = std::exp(static_cast<float>(gates.sums[rows - 1] - gates.sums[r]));
    }
    *cpu::tile(tiles.decay, n) = passed[rows - 1];
    const float* keys = cpu::tile(shared.k, key_tile);
    cpu::scale_rows(keys, passed, rows, s.K, cpu::tile(tiles.reading, n));
    cpu::scale_rows(keys, remaining, rows, s.K, cpu::tile(tiles.writing, n));
    cpu::scale_rows(cpu::tile(shared.q, key_tile), scaled, rows, s.K, cpu::tile(tiles.queries, n));
    in.v.read_tile(chunks[i], head, rows, cpu::tile(tiles.values, n));
  });
  return tiles;
}

// One chunk of each sequence: the output, and the state after it.
Tensor advance(const Tiles& now, const Tensor& state) {
  const Tensor v_new = at::bmm(now.update, at::baddbmm(now.values, now.reading, state, 1, -1));
  const Tensor o = at::bmm(now.queries, state).baddbmm_(now.scores, v_new);
  state.mul_(now.decay).baddbmm_(now.writing.transpose(1, 2), v_new);
  return o;
}

struct Options {
  bool normalise;
  optional<double> scale;
  bool has_h;
};

struct Outputs {
  Tensor o, h;  // h is empty where not asked for
};

// What is not written stays zeros: o of a sequence that has no slot, its rows of h, and surplus ones.
Outputs new_outputs(const ChunkShape& s, const WholeOp& op, const cpu::StatePlaces& places, bool has_h) {
  const auto dtype = op.q.scalar_type() == at::kHalf ? at::kFloat : op.q.scalar_type();
  const int64_t rows = places.v_first ? s.V : s.K, columns = places.v_first ? s.K : s.V;
  const std::vector<int64_t> sizes = {s.B, s.NT, s.HV, rows, columns}, nothing = {0};
  const auto options = op.q.options().dtype(output_dtype_of(op));
  const Tensor o =
      places.has_null() ? at::zeros({s.B, s.T, s.HV, s.V}, options) : at::empty({s.B, s.T, s.HV, s.V}, options);
  return {o, at::zeros(has_h ? sizes : nothing, op.q.options().dtype(dtype))};
}

void run_block(const ChunkShape& s, const Inputs& in, const cpu::Block& block, const Tensor& state,
               const cpu::StatePlaces& places, const Outputs& outputs, bool has_h) {
  const cpu::Rows out(outputs.o);
  const auto h = has_h ? optional(cpu::States(outputs.h, places.v_first)) : std::nullopt;
  const auto for_each_kept = [&](std::span<const cpu::Chunk> chunks, const auto& f) {
    cpu::for_each_tile(chunks.size(), s.HV, [&](int64_t i, int64_t head) {
      if (places.slots[chunks[i].sequence].index >= 0) f(chunks[i], head, i * s.HV + head);
    });
  };
  cpu::for_each_steps(block, s.HV, [&](int64_t first_step, int64_t last_step) {
    const auto chunks = cpu::chunks_of_steps(block, first_step, last_step);
    const Tiles tiles = prepare(s, in, chunks);
    for (int64_t step = first_step; step < last_step; ++step) {
      const int64_t begin = block.steps[step] - block.steps[first_step];
      const int64_t count = block.steps[step + 1] - block.steps[step];
      const auto chunks_now = chunks.subspan(begin, count);
      const Tensor before = state.narrow(0, 0, count * s.HV);
      if (h) {
        for_each_kept(chunks_now, [&](const cpu::Chunk& chunk, int64_t head, int64_t n) {
          h->write(chunk.batch, chunk.row, head, 0, s.V, cpu::tile(before, n), s.V);
        });
      }
      const Tensor result = advance(tiles.narrow(begin * s.HV, count * s.HV), before);
      for_each_kept(chunks_now, [&](const cpu::Chunk& chunk, int64_t head, int64_t n) {
        out.write_tile(chunk, head, cpu::tile(result, n));
      });
    }
  });
}

Outputs run(const ChunkShape& s, const WholeOp& op, const cpu::StatePlaces& places, const optional<Tensor>& cu_seqlens,
            const Options& options) {
  const Outputs outputs = new_outputs(s, op, places, options.has_h);
  const Tensor q = unit_last_stride(op.q, "q"), k = unit_last_stride(op.k, "k"), v = unit_last_stride(op.v, "v");
  const Tensor decays = cpu::decays_of(s, op.g, op.gates), steps = cpu::steps_of(s, op.beta, op.gates);
  const Inputs in{cpu::Rows(q),      cpu::Rows(k),     cpu::Rows(v),
                  cpu::Rows(decays), cpu::Rows(steps), static_cast<float>(scale_or_default(options.scale, s.K)),
                  options.normalise};
  for (const cpu::Block& block : cpu::blocks_of(s, cu_seqlens)) {
    const Tensor state = cpu::initial_states(s, block, places);
    run_block(s, in, block, state, places, outputs, options.has_h);
    cpu::write_final_states(s, block, state, places);
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
  const WholeOp op{"chunk_gated_delta_rule", q, k, v, some_g, some_beta, gates, output_dtype, head_grouping};
  const auto s = check_chunk_gated_delta_rule(op, initial_state, state_v_first, cu_seqlens, chunk_indices, chunk_size);
  const Tensor final_state = cpu::new_final_state(s, q, output_final_state, state_v_first);
  const auto places = cpu::StatePlaces::of_sequences(s, initial_state, final_state, state_v_first);
  const auto [o, h] = run(s, op, places, cu_seqlens, {use_qk_l2norm_in_kernel, scale, return_intermediate_states});
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
  const WholeOp op{"chunk_gated_delta_rule_", q, k, v, some_g, some_beta, gates, output_dtype, head_grouping};
  const auto s = check_chunk_gated_delta_rule_(op, pool, cu_seqlens, chunk_indices, chunk_size);
  const auto [o, h] = run(s, op, cpu::StatePlaces::in_place(s, pool), cu_seqlens,
                          {use_qk_l2norm_in_kernel, scale, return_intermediate_states});
  return {o, h};
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, CPU, m) {
  m.impl("chunk_gated_delta_rule", &chunk_gated_delta_rule);
  m.impl("chunk_gated_delta_rule_", &chunk_gated_delta_rule_);
}

}  // namespace torch_gdn
