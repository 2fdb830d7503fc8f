"""Seeded requests whose prompt comes in parts: the generator's state survives the tokens that are thrown away.

Each part of a prompt but the last samples a token that nobody wants. vLLM (0.32 and 0.33) then winds the request's
generator back by an offset, which only CUDA's generators have: on the CPU and on mps `set_offset` raises, and that ends
the engine. Here the generator's state is kept before sampling and put back, and vLLM does not see the generator.
"""

from __future__ import annotations

from typing import Any


class KeepsSeeds:
    """Comes before vLLM's V1 model runner among a class's bases."""

    discard_request_mask: Any
    input_batch: Any

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        discarded = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()
        generators = self.input_batch.generators
        self.states_before = {i: generators[i].get_state() for i in discarded if i in generators}
        runner: Any = super()
        return runner._sample(*args, **kwargs)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        kept = {i: generators.pop(i) for i in self.states_before if i in generators}
        for i, generator in kept.items():
            generator.set_state(self.states_before[i])
        runner: Any = super()
        try:
            return runner._bookkeeping_sync(*args, **kwargs)
        finally:
            generators.update(kept)
