// The stages of the gradients as ops, computed by products of tiles. The whole gradients take a chunk at a time.
#include "ops/gdn/chunk_bwd_stages.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include "cpu/common.h"
#include "cpu/define.h"

namespace torch_gdn {

namespace {

// Some chunks, of which each tile [chunks * HV, rows, columns] has one chunk of one value head.
struct Tiles {
  const ChunkShape<>& s;
  std::span<const cpu::Chunk> chunks;
  int64_t rows = cpu::tile_rows(chunks);

  template <typename F>
  Tensor fill(int64_t height, int64_t columns, const F& f) const {
    const Tensor tiles = cpu::f32_tiles(std::ssize(chunks) * s.HV, height, columns);
    cpu::for_each_tile(std::ssize(chunks), s.HV,
                       [&](int64_t i, int64_t head) { f(chunks[i], head, cpu::tile(tiles, i * s.HV + head)); });
    return tiles;
  }

  Tensor read(const Tensor& x) const {  // [B, T, H or HV, columns]
    const Tensor unit = unit_last_stride(x);
    const cpu::Rows in(unit);
    const int64_t group = s.HV / x.size(2);
    return fill(rows, x.size(3), [&](const cpu::Chunk& chunk, int64_t head, float* tile) {
      in.read_tile(chunk, head / group, rows, tile);
    });
  }

  Tensor read_values(const Tensor& x, cpu::Below below) const {  // [B, T, HV]
    const cpu::Rows in(x);
    return fill(rows, 1, [&](const cpu::Chunk& chunk, int64_t head, float* tile) {
      cpu::read_values(in, chunk, head, rows, below, tile);
    });
  }

  Tensor read_states(const Tensor& x) const {  // [B, NT, HV, K, V]
    const cpu::States in(x, false);
    return fill(s.K, s.V, [&](const cpu::Chunk& chunk, int64_t head, float* tile) {
      in.read(chunk.batch, chunk.row, head, 0, s.V, tile, s.V);
    });
  }

  // Writes [B, T, H or HV, columns]. A key head gets the sum of its value heads.
  void write(const Tensor& tiles, const Tensor& x) const {
    const cpu::Rows out(x);
    const int64_t heads = x.size(2), count = std::ssize(chunks);
    const Tensor sums = tiles.reshape({count * heads, s.HV / heads, rows, tiles.size(2)}).sum(1);
    cpu::for_each_tile(count, heads, [&](int64_t i, int64_t head) {
      out.write_tile(chunks[i], head, cpu::tile(sums, i * heads + head));
    });
  }
};

// The decays of tiles with the sums c [tiles, rows, 1]: from the chunk's start to a token, from a token to the end, of
// the whole chunk, and from token j to token i, which is 0 for j > i.
struct Decays {
  explicit Decays(const Tensor& c)
      : read(c.exp()),
        write((c.narrow(1, c.size(1) - 1, 1) - c).exp()),
        last(read.narrow(1, c.size(1) - 1, 1)),
        pairs((c - c.mT()).tril().exp().tril()) {}
  Tensor read, write, last, pairs;
};

void run(const ChunkBwdDvLocal<int64_t>& op, const Tensor& dv) {
  const auto& s = op.shape;
  const double scale = scale_or_default(op.scale, s.K);
  cpu::for_each_group(cpu::chunks_of(s, op.cu_seqlens), s.HV, [&](std::span<const cpu::Chunk> chunks) {
    const Tiles tiles{s, chunks};
    const Decays decays(tiles.read_values(op.g, cpu::Below::kLast));
    const Tensor P = at::bmm(tiles.read(op.q) * scale, tiles.read(op.k).mT()) * decays.pairs;
    tiles.write(at::bmm(P.mT(), tiles.read(op.d_o)), dv);
  });
}

void run(const ChunkGatedDeltaRuleBwdDhu<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor>& outputs) {
  const auto& s = op.shape;
  const auto& [dh, dh0, dv2] = outputs;
  dh.zero_();  // surplus rows
  const double scale = scale_or_default(op.scale, s.K);
  const auto state_io = cpu::StateIo::per_sequence(s, op.dht, dh0, false);
  const cpu::States out(dh, false);
  for (const cpu::Block& block : cpu::blocks_of(s, op.cu_seqlens)) {
    const Tensor gradients = cpu::initial_states(s, block, state_io);
    for (int64_t step = std::ssize(block.steps) - 2; step >= 0; --step) {
      const Tiles tiles{s, cpu::chunks_of_steps(block, step, step + 1)};
      const Tensor after = gradients.narrow(0, 0, std::ssize(tiles.chunks) * s.HV);
      cpu::for_each_tile(std::ssize(tiles.chunks), s.HV, [&](int64_t i, int64_t head) {
        const cpu::Chunk& chunk = tiles.chunks[i];
        out.write(chunk.batch, chunk.row, head, 0, s.V, cpu::tile(after, i * s.HV + head), s.V);
      });
      const Decays decays(tiles.read_values(op.g, cpu::Below::kLast));
      const Tensor dv = tiles.read(op.dv) + at::bmm(tiles.read(op.k) * decays.write, after);
      tiles.write(dv, dv2);
      after.mul_(decays.last)
          .baddbmm_((tiles.read(op.q) * decays.read * scale).mT(), tiles.read(op.d_o))
          .baddbmm_(tiles.read(op.w).mT(), dv, 1, -1);
    }
    cpu::write_final_states(s, block, gradients, state_io);
  }
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
  cpu::for_each_group(cpu::chunks_of(s, op.cu_seqlens), s.HV, [&](std::span<const cpu::Chunk> chunks) {
    const Tiles tiles{s, chunks};
    const Decays decays(tiles.read_values(op.g, cpu::Below::kLast));
    const Tensor k = tiles.read(op.k), beta = tiles.read_values(op.beta, cpu::Below::kZero), k_read = k * decays.read;
    const Tensor L = (at::bmm(k, k.mT()) * decays.pairs).tril(-1), x = at::cat({tiles.read(op.v), k_read}, 2);
    const Tensor A = beta * L, inverse = at::empty_like(A);
    cpu::for_each_tile(std::ssize(chunks), s.HV, [&](int64_t i, int64_t head) {
      const int64_t n = i * s.HV + head, rows = tiles.rows;
      cpu::row_kernels().invert_unit_lower(cpu::tile(A, n), rows, chunks[i].length, rows, cpu::tile(inverse, n), rows);
    });
    const Tensor r = x - at::bmm(L, at::bmm(inverse, beta * x));
    const Tensor du = at::bmm(inverse.mT(), at::cat({tiles.read(op.du), tiles.read(op.dw)}, 2)), dx = beta * du;
    const Tensor dL = -at::bmm(dx, (beta * r).mT()).tril(-1), decayed = dL * decays.pairs;
    const Tensor dk_read = dx.narrow(2, s.V, s.K), reads = (k_read * dk_read).sum(2, true);
    const Tensor zeros = at::zeros_like(reads);
    tiles.write(decays.read * dk_read + at::bmm(decayed + decayed.mT(), k), dk);
    tiles.write(dx.narrow(2, 0, s.V), dv);
    tiles.write((du * r).sum(2, true), dbeta);
    tiles.write(decay_gradients(dL * L, reads, zeros, zeros), dg);
  });
}

void run(const ChunkBwdDqkwg<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor, Tensor>& outputs) {
  const auto& s = op.shape;
  const auto& [dq, dk, dw, dg] = outputs;
  const double scale = scale_or_default(op.scale, s.K);
  cpu::for_each_group(cpu::chunks_of(s, op.cu_seqlens), s.HV, [&](std::span<const cpu::Chunk> chunks) {
    const Tiles tiles{s, chunks};
    const Decays decays(tiles.read_values(op.g, cpu::Below::kLast));
    const Tensor q = tiles.read(op.q) * scale, k = tiles.read(op.k), v = tiles.read(op.v), d_o = tiles.read(op.d_o);
    const Tensor state = tiles.read_states(op.h), dstate = tiles.read_states(op.dh);
    const Tensor dP = at::bmm(d_o, v.mT()) * decays.pairs;
    const Tensor dq_read = decays.read * at::bmm(d_o, state.mT()), dk_write = decays.write * at::bmm(v, dstate.mT());
    const Tensor reads = (q * dq_read).sum(2, true), writes = (k * dk_write).sum(2, true);
    const Tensor last = decays.last * (state * dstate).sum({1, 2}, true);
    tiles.write(scale * (dq_read + at::bmm(dP, k)), dq);
    tiles.write(dk_write + at::bmm(dP.mT(), q), dk);
    tiles.write(-at::bmm(tiles.read(op.dv), state.mT()), dw);
    tiles.write(decay_gradients(dP * at::bmm(q, k.mT()), reads, writes, last), dg);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) {
  cpu::define<ChunkBwdDvLocal, &run>(m);
  cpu::define<ChunkGatedDeltaRuleBwdDhu, &run>(m);
  cpu::define<PrepareWyReprBwd, &run>(m);
  cpu::define<ChunkBwdDqkwg, &run>(m);
}

}  // namespace torch_gdn
