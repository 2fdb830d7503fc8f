#include "ops/kda/chunk_kda.h"

#include "cpu/define.h"
#include "cpu/gdn/recurrence.h"

namespace torch_gdn {

namespace {

void run_chunked(const ChunkedKda<int64_t>& op, const cpu::StateIo& state_io, const Tensor& o) {
  cpu::run_recurrence(op, {.gk = channel_decays(op.shape, op.required_g, op.channel_gate), .gv = std::nullopt},
                      state_io, o);
}

void run(const ChunkKda<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor>& outputs) {
  const auto& [o, final_state, h] = outputs;
  run_chunked(op, cpu::StateIo::of_sequences(op.shape, op.initial_state, final_state, op.state_v_first), o);
}

void run_in_place(const ChunkKdaInPlace<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [o, h] = outputs;
  run_chunked(op, cpu::StateIo::in_place(op.shape, op.pool, op.state_v_first), op.out.value_or(o));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) {
  cpu::define<ChunkKda, &run>(m);
  cpu::define<ChunkKdaInPlace, &run_in_place>(m);
}

}  // namespace torch_gdn
