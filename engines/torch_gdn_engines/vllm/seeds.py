"""Supports seeded requests whose prompt comes in parts: the generator's state survives discarded tokens.

Each part of a prompt but the last samples a token that is discarded. vLLM (0.32 and 0.33) then rewinds the request's
generator by an offset, which only CUDA's generators have: on the CPU and on mps `set_offset` raises and ends the
engine. Here the generator's state is saved before sampling and restored, and vLLM does not see the generator.
"""

from __future__ import annotations

from typing import Any


class KeepsSeeds:
    """A base class that precedes vLLM's V1 model runner."""

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
