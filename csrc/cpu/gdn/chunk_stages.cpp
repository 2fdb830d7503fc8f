// The stages of a chunk and of its gradients as ops, computed by products of tiles. A tile holds one chunk of one head:
// [rows, K], [rows, V] or [rows, rows]. It is f32, and zero past the chunk. The whole rule and its gradients take a
// chunk at a time.
#include "ops/gdn/chunk_stages.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <functional>
#include <span>

#include "cpu/common.h"
#include "cpu/define.h"
#include "ops/gdn/gradients.h"

namespace torch_gdn::cpu {

namespace {

// The number of tiles that are processed at once. With K = V = 128 they take 4 MB per matrix, which still fits in the
// caches of a core.
constexpr int64_t kTilesAtOnce = 128;

Tensor f32_tiles(int64_t tiles, int64_t rows, int64_t columns) {
  return at::empty({tiles, rows, columns}, at::TensorOptions().dtype(at::kFloat));
}

float* tile(const Tensor& tiles, int64_t i) { return tiles.mutable_data_ptr<float>() + i * tiles.stride(0); }

// Calls f(chunk index, head) for every pair of them. The calls are spread over the cores.
template <typename F>
void for_each_tile(int64_t chunks, int64_t heads, const F& f) {
  at::parallel_for(0, chunks * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i / heads, i % heads);
  });
}

// Some chunks. Each tile of [chunks * heads, rows, columns] has one chunk of one head.
struct Tiles {
  const ChunkShape<>& s;
  std::span<const Chunk> chunks;
  int64_t rows = ceil_div(std::ranges::max(chunks, {}, &Chunk::length).length, 8) * 8;

  template <typename F>
  Tensor fill(int64_t heads, int64_t height, int64_t columns, const F& f) const {
    const Tensor tiles = f32_tiles(std::ssize(chunks) * heads, height, columns);
    for_each_tile(std::ssize(chunks), heads,
                  [&](int64_t i, int64_t head) { f(chunks[i], head, tile(tiles, i * heads + head)); });
    return tiles;
  }

  // Reads [B, T, heads, columns], or [B, T, heads] as one column, with zeros past a chunk. A name is for a warning.
  Tensor read(const Tensor& x, const char* name = nullptr) const { return read_for(x.size(2), x, name); }
  // Gives each value head the tile of its key head.
  Tensor read_spread(const Tensor& x, const char* name = nullptr) const { return read_for(s.HV, x, name); }
  Tensor spread(const Tensor& x) const { return s.HV == s.H ? x : x.repeat_interleave(s.HV / s.H, 0); }

  // Reads sums of log decays [B, T, HV]. Past a chunk they stay the same.
  Tensor read_sums(const Tensor& g) const {
    const Tensor sums = read(g);
    for_each_tile(std::ssize(chunks), s.HV, [&](int64_t i, int64_t head) {
      float* sum = tile(sums, i * s.HV + head);
      std::fill(sum + chunks[i].length, sum + rows, sum[chunks[i].length - 1]);
    });
    return sums;
  }

  Tensor read_states(const Tensor& x, bool v_first) const {  // [B, NT, HV, K, V] or [B, NT, HV, V, K]
    const States in(x, v_first);
    return fill(s.HV, s.K, s.V, [&](const Chunk& chunk, int64_t head, float* tile) {
      in.read(chunk.batch, chunk.row, head, 0, s.V, tile, s.V);
    });
  }

  // Writes [B, T, heads, columns], with zeros past the tile's columns. A key head gets the sum of its value heads.
  void write(const Tensor& x, const Tensor& to) const {
    const Rows out(to);
    const int64_t heads = to.size(2), count = std::ssize(chunks), missing = to.dim() == 4 ? to.size(3) - x.size(2) : 0;
    const Tensor whole = missing > 0 ? at::constant_pad_nd(x, {0, missing}) : x;
    const Tensor sums = whole.size(0) == count * heads
                            ? whole.contiguous()
                            : whole.reshape({count * heads, s.HV / heads, rows, x.size(2)}).sum(1);
    for_each_tile(count, heads, [&](int64_t i, int64_t head) {
      const auto& [sequence, batch, first, length, row] = chunks[i];
      const float* own = tile(sums, i * heads + head);
      for (int64_t t = 0; t < length; ++t) out.write(batch, first + t, head, own + t * sums.size(2));
    });
  }

  void write_states(const Tensor& x, const States& to) const {
    for_each_tile(std::ssize(chunks), s.HV, [&](int64_t i, int64_t head) {
      to.write(chunks[i].batch, chunks[i].row, head, 0, s.V, tile(x, i * s.HV + head), s.V);
    });
  }

  // Returns (I + A)^-1 for the strictly lower parts of A [chunks * HV, rows, columns].
  Tensor inverse(const Tensor& A) const {
    const Tensor inverse = f32_tiles(A.size(0), rows, rows);
    for_each_tile(std::ssize(chunks), s.HV, [&](int64_t i, int64_t head) {
      const int64_t n = i * s.HV + head;
      row_kernels().invert_unit_lower(tile(A, n), A.size(2), chunks[i].length, rows, tile(inverse, n), rows);
    });
    return inverse;
  }

 private:
  Tensor read_for(int64_t heads, const Tensor& x, const char* name) const {
    const Rows in(x, name);
    const int64_t group = heads / x.size(2), columns = x.dim() == 4 ? x.size(3) : 1;
    return fill(heads, rows, columns, [&](const Chunk& chunk, int64_t head, float* tile) {
      for (int64_t t = 0; t < chunk.length; ++t) {
        in.read(chunk.batch, chunk.first + t, head / group, tile + t * columns);
      }
      std::fill(tile + chunk.length * columns, tile + rows * columns, 0.0f);
    });
  }
};

// The decays of tiles with the sums c [tiles, rows, 1]: from the chunk's start to a token, from a token to the end, and
// of the whole chunk. apply() multiplies products of token i with token j by the decay from j to i, in place, and makes
// them 0 above a diagonal, where decays and products may be infinite.
struct Decays {
  Tensor c;
  Tensor end() const { return c.narrow(1, c.size(1) - 1, 1); }
  Tensor read() const { return c.exp(); }
  Tensor write() const { return (end() - c).exp(); }
  Tensor last() const { return end().exp(); }
  Tensor apply(Tensor products, int64_t diagonal = 0) const {
    return products.mul_((c - c.mT()).exp_()).tril_(diagonal);
  }
};

// Calls f(tiles) for groups of chunks.
template <typename F>
void for_each_tiles(const ChunkShape<>& s, const optional<Tensor>& cu_seqlens, const F& f) {
  const auto chunks = chunks_of(s, cu_seqlens);
  const size_t most = std::max<int64_t>(1, kTilesAtOnce / s.HV);
  for (size_t first = 0; first < chunks.size(); first += most) {
    f(Tiles{s, std::span(chunks).subspan(first, std::min(most, chunks.size() - first))});
  }
}

enum class Direction { kForward, kBack };

// Walks through the chunks of all sequences. Calls f(tiles, states) with the next chunk of each of some sequences; f
// advances their states [chunks * HV, K, V] in place. The states before each call go to `h`.
template <typename F>
void walk(Direction direction, const ChunkShape<>& s, const optional<Tensor>& cu_seqlens, const StateIo& state_io,
          const Tensor& h, const F& f) {
  struct Own {
    int64_t sequence;
    std::vector<Chunk> chunks;
  };
  std::vector<Own> all(s.N);
  for (int64_t n = 0; n < s.N; ++n) all[n].sequence = n;
  for (const auto& chunk : chunks_of(s, cu_seqlens)) all[chunk.sequence].chunks.push_back(chunk);
  // The longest sequences come first, so that those with a further chunk are the first of a block.
  std::ranges::stable_sort(all, std::greater{}, [](const Own& own) { return own.chunks.size(); });
  h.zero_();  // surplus rows
  const States out(h, state_io.v_first);
  const int64_t most = std::max<int64_t>(1, kTilesAtOnce / s.HV);
  for (int64_t first = 0; first < s.N; first += most) {
    const auto block = std::span(all).subspan(first, std::min(most, s.N - first));
    const Tensor states = f32_tiles(std::ssize(block) * s.HV, s.K, s.V);
    for_each_tile(std::ssize(block), s.HV, [&](int64_t i, int64_t head) {
      state_io.read(block[i].sequence, head, 0, s.V, s.K, tile(states, i * s.HV + head), s.V);
    });
    const size_t steps = block[0].chunks.size();
    for (size_t step = 0; step < steps; ++step) {
      const size_t at = direction == Direction::kForward ? step : steps - 1 - step;
      std::vector<Chunk> chunks;
      for (const auto& own : block) {
        if (at < own.chunks.size()) chunks.push_back(own.chunks[at]);
      }
      const Tiles tiles{s, chunks};
      const Tensor state = states.narrow(0, 0, std::ssize(chunks) * s.HV);
      tiles.write_states(state, out);
      f(tiles, state);
    }
    for_each_tile(std::ssize(block), s.HV, [&](int64_t i, int64_t head) {
      const int64_t slot = state_io.slots[block[i].sequence].index;
      state_io.write(slot, head, 0, s.V, tile(states, i * s.HV + head), s.V);
    });
  }
}

// The sum is in f64, as in the chunked op.
void run(const ChunkLocalCumsum<int64_t>& op, const Tensor& g_cumsum) {
  const Rows in(op.g.to(at::kFloat)), out(g_cumsum);
  const auto chunks = chunks_of(op.shape, op.cu_seqlens);
  for_each_tile(chunks.size(), op.shape.HV, [&](int64_t i, int64_t head) {
    const auto& [sequence, batch, first, length, row] = chunks[i];
    double sum = 0;
    for (int64_t token = first; token < first + length; ++token) {
      sum += clamped_log_decay(in.value(batch, token, head));
      const auto rounded = static_cast<float>(sum);
      out.write(batch, token, head, &rounded);
    }
  });
}

void run(const ChunkScaledDotKkt<int64_t>& op, const Tensor& A) {
  const Tensor beta = op.beta.to(at::kFloat);
  for_each_tiles(op.shape, op.cu_seqlens, [&](const Tiles& tiles) {
    const Tensor k = tiles.read(op.k, "k"), products = tiles.spread(at::bmm(k, k.mT()));
    const Decays decays{tiles.read_sums(op.g)};
    tiles.write(decays.apply(products.mul_(tiles.read(beta)), -1), A);
  });
}

void run(const SolveTril<int64_t>& op, const Tensor& A_inv) {
  for_each_tiles(op.shape, op.cu_seqlens,
                 [&](const Tiles& tiles) { tiles.write(tiles.inverse(tiles.read(op.A, "A")), A_inv); });
}

void run(const RecomputeWU<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [w, u] = outputs;
  const Tensor beta_f32 = op.beta.to(at::kFloat);
  for_each_tiles(op.shape, op.cu_seqlens, [&](const Tiles& tiles) {
    const Decays decays{tiles.read_sums(op.g)};
    const Tensor beta = tiles.read(beta_f32), inverse = tiles.read(op.A, "A").narrow(2, 0, tiles.rows).tril_();
    tiles.write(at::bmm(inverse, tiles.read_spread(op.k, "k").mul_(beta * decays.read())), w);
    tiles.write(at::bmm(inverse, tiles.read(op.v, "v").mul_(beta)), u);
  });
}

void run(const ChunkFwdH<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor>& outputs) {
  const auto& [h, v_new, final_state] = outputs;
  const auto state_io = StateIo::per_sequence(op.shape, op.initial_state, final_state, op.state_v_first);
  const Tensor k = unit_last_stride(op.k, "k"), w = unit_last_stride(op.w, "w"), u = unit_last_stride(op.u, "u");
  walk(Direction::kForward, op.shape, op.cu_seqlens, state_io, h, [&](const Tiles& tiles, const Tensor& state) {
    const Decays decays{tiles.read_sums(op.g)};
    const Tensor v = tiles.read(u).baddbmm_(tiles.read(w), state, 1, -1);
    tiles.write(v, v_new);
    state.mul_(decays.last()).baddbmm_(tiles.read_spread(k).mul_(decays.write()).mT(), v);
  });
}

void run(const ChunkFwdO<int64_t>& op, const Tensor& o) {
  const double scale = scale_or_default(op.scale, op.shape.K);
  for_each_tiles(op.shape, op.cu_seqlens, [&](const Tiles& tiles) {
    const Decays decays{tiles.read_sums(op.g)};
    const Tensor q = tiles.read(op.q, "q").mul_(scale), products = at::bmm(q, tiles.read(op.k, "k").mT());
    const Tensor scores = decays.apply(tiles.spread(products));
    const Tensor from_state = at::bmm(tiles.spread(q).mul_(decays.read()), tiles.read_states(op.h, op.state_v_first));
    tiles.write(from_state.baddbmm_(scores, tiles.read(op.v, "v")), o);
  });
}

void run(const ChunkBwdDvLocal<int64_t>& op, const Tensor& dv) {
  const double scale = scale_or_default(op.scale, op.shape.K);
  for_each_tiles(op.shape, op.cu_seqlens, [&](const Tiles& tiles) {
    const Decays decays{tiles.read_sums(op.g)};
    const Tensor P = decays.apply(at::bmm(tiles.read_spread(op.q).mul_(scale), tiles.read_spread(op.k).mT()));
    tiles.write(at::bmm(P.mT(), tiles.read(op.d_o)), dv);
  });
}

void run(const ChunkGatedDeltaRuleBwdDhu<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor>& outputs) {
  const auto& [dh, dh0, dv2] = outputs;
  const double scale = scale_or_default(op.scale, op.shape.K);
  const auto state_io = StateIo::per_sequence(op.shape, op.dht, dh0, false);
  const Tensor q = unit_last_stride(op.q), k = unit_last_stride(op.k), w = unit_last_stride(op.w),
               d_o = unit_last_stride(op.d_o), dv_local = unit_last_stride(op.dv);
  walk(Direction::kBack, op.shape, op.cu_seqlens, state_io, dh, [&](const Tiles& tiles, const Tensor& after) {
    const Decays decays{tiles.read_sums(op.g)};
    const Tensor dv = tiles.read(dv_local) + at::bmm(tiles.read_spread(k) * decays.write(), after);
    tiles.write(dv, dv2);
    after.mul_(decays.last())
        .baddbmm_((tiles.read_spread(q) * decays.read() * scale).mT(), tiles.read(d_o))
        .baddbmm_(tiles.read(w).mT(), dv, 1, -1);
  });
}

// Returns the gradients of log decays from the terms of everything that a decay multiplies: products of token i with an
// earlier token j, reads of the state, writes to the state after the chunk, and that state. No term cancels another.
Tensor decay_gradients(const Tensor& products, const Tensor& reads, const Tensor& writes, const Tensor& last) {
  const Tensor before = at::constant_pad_nd(products.cumsum(2), {1, -1});  // [i, t]: the sum over j < t
  const Tensor later = reads.flip(1).cumsum(1).flip(1), earlier = at::constant_pad_nd(writes.cumsum(1), {0, 0, 1, -1});
  return before.tril().sum(1).unsqueeze(2) + later + earlier + last;
}

// w and u are products of the inverse with values, of which those of w are k exp(g).
void run(const PrepareWyReprBwd<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor, Tensor>& outputs) {
  const auto& s = op.shape;
  const auto& [dk, dv, dbeta, dg] = outputs;
  for_each_tiles(s, op.cu_seqlens, [&](const Tiles& tiles) {
    const Decays decays{tiles.read_sums(op.g)};
    const Tensor read = decays.read(), beta = tiles.read(op.beta);
    const Tensor k = tiles.read_spread(op.k), k_read = k * read, x = at::cat({tiles.read(op.v), k_read}, 2);
    const Tensor L = decays.apply(at::bmm(k, k.mT()), -1), inverse = tiles.inverse(beta * L);
    const Tensor r = x - at::bmm(L, at::bmm(inverse, beta * x));
    const Tensor du = at::bmm(inverse.mT(), at::cat({tiles.read(op.du), tiles.read(op.dw)}, 2)), dx = beta * du;
    const Tensor dL = -at::bmm(dx, (beta * r).mT()).tril(-1), decayed = decays.apply(dL.clone());
    const Tensor dk_read = dx.narrow(2, s.V, s.K), reads = (k_read * dk_read).sum(2, true);
    const Tensor zeros = at::zeros_like(reads);
    tiles.write(read * dk_read + at::bmm(decayed + decayed.mT(), k), dk);
    tiles.write(dx.narrow(2, 0, s.V), dv);
    tiles.write((du * r).sum(2, true), dbeta);
    tiles.write(decay_gradients(dL * L, reads, zeros, zeros), dg);
  });
}

void run(const ChunkBwdDqkwg<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor, Tensor>& outputs) {
  const auto& s = op.shape;
  const auto& [dq, dk, dw, dg] = outputs;
  const double scale = scale_or_default(op.scale, s.K);
  for_each_tiles(s, op.cu_seqlens, [&](const Tiles& tiles) {
    const Decays decays{tiles.read_sums(op.g)};
    const Tensor q = tiles.read_spread(op.q) * scale, k = tiles.read_spread(op.k);
    const Tensor v = tiles.read(op.v), d_o = tiles.read(op.d_o);
    const Tensor state = tiles.read_states(op.h, false), dstate = tiles.read_states(op.dh, false);
    const Tensor dP = decays.apply(at::bmm(d_o, v.mT()));
    const Tensor dq_read = decays.read() * at::bmm(d_o, state.mT()),
                 dk_write = decays.write() * at::bmm(v, dstate.mT());
    const Tensor reads = (q * dq_read).sum(2, true), writes = (k * dk_write).sum(2, true);
    const Tensor last = decays.last() * (state * dstate).sum({1, 2}, true);
    tiles.write(scale * (dq_read + at::bmm(dP, k)), dq);
    tiles.write(dk_write + at::bmm(dP.mT(), q), dk);
    tiles.write(-at::bmm(tiles.read(op.dv), state.mT()), dw);
    tiles.write(decay_gradients(dP * at::bmm(q, k.mT()), reads, writes, last), dg);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) {
  define<ChunkLocalCumsum, &run>(m);
  define<ChunkScaledDotKkt, &run>(m);
  define<SolveTril, &run>(m);
  define<RecomputeWU, &run>(m);
  define<ChunkFwdH, &run>(m);
  define<ChunkFwdO, &run>(m);
  define<ChunkBwdDvLocal, &run>(m);
  define<ChunkGatedDeltaRuleBwdDhu, &run>(m);
  define<PrepareWyReprBwd, &run>(m);
  define<ChunkBwdDqkwg, &run>(m);
}

}  // namespace torch_gdn::cpu
