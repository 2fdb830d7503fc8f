"""Keeps states after prefixes that prompts may share, in slots that no request uses.

transformers finds the pages of a prefix by their content. A prompt can continue from there if the states after it are
known too. They are stored at multiples of 64 tokens while a prompt is prefilled, and named by the last page's hash.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch_gdn.integrations.transformers.state_pool import Checkpoint, StatePool

CHUNK = 64  # tokens; within a call the delta rule gives the state at its multiples
MOST = 8  # evenly spaced checkpoints per prompt, without its last one


@dataclass(frozen=True)
class Taken:
    """A checkpoint that a step makes: its slot, or None if it is copied after the step."""

    tokens: int
    slot: int | None


class PrefixStates:
    """Decides which checkpoints a step makes, and from which one a prompt continues.

    Args:
        pool: of the states.
        pages: transformers' allocator of the pages of attention.
    """

    def __init__(self, pool: StatePool, pages: Any) -> None:
        self.pool, self.pages = pool, pages
        self.step = math.lcm(CHUNK, pages.tokens_per_page)
        self.most = max(1, min(MOST, pool.slots // 2))
        self.pending: dict[str, list[Taken]] = {}
        self.branches: dict[str, int] = {}  # by request, the number of its tokens with which another prompt began

    def longest(self, request: str, prompt: list[int]) -> tuple[int, int | None]:
        """Returns how many of the prompt's tokens have pages and a state, and the state's name."""
        pages, size = self.pages.match_prefix_blocks(prompt), self.pages.tokens_per_page
        shared = len(pages) * size // self.step * self.step
        self.branches[request] = shared
        for tokens in range(shared, 0, -self.step):
            name = self.pages.ledger.block_to_hash[pages[tokens // size - 1]]
            if name in self.pool.slot_with:
                return tokens, name
        return 0, None

    def boundaries(self, request: str, prompt: int, start: int, end: int) -> list[int]:
        """Returns after which of the tokens from start to end, including end, states are needed. `prompt` is its number
        of tokens.
        """
        spacing = self.step * -(-prompt // (self.step * self.most))
        result = set(range(start // spacing * spacing + spacing, end + 1, spacing))
        for other in ((prompt - 1) // self.step * self.step, self.branches.get(request, 0)):
            if start < other <= end:
                result.add(other)
        return sorted(result)

    def part(self, state: Any, remaining: int, budget: int) -> int:
        """Returns how many of the remaining tokens a request's next part has. It takes as many as fit, but stops where
        a state is needed that it would otherwise pass over.
        """
        past = state.position_offset
        end = past + min(remaining, budget)
        wanted = self.boundaries(state.request_id, len(state.initial_tokens), past, end)
        within = 0 if past % CHUNK else 1  # the delta rule stores so many on its way
        if len(wanted) - (end in wanted) > within:
            end = wanted[within]
        elif end - past < remaining and (aligned := end // CHUNK * CHUNK) > past:
            end = aligned
        return end - past

    def begin(self, requests: Iterable[Any]) -> dict[str, Checkpoint]:
        """Returns the checkpoints within the parts of a step, by request. `after` makes those at their ends."""
        within: dict[str, Checkpoint] = {}
        for scheduled in requests:
            state = scheduled.state
            name, past = state.request_id, state.position_offset
            end = past + scheduled.query_length
            for tokens in self.boundaries(name, len(state.initial_tokens), past, end):
                slot = None
                if tokens < end:
                    if past % CHUNK or name in within or not self.pool.free:
                        continue
                    slot = self.pool.take()
                    within[name] = Checkpoint(tokens - past, slot)
                self.pending.setdefault(name, []).append(Taken(tokens, slot))
        return within

    def after(self, request: str) -> None:
        """Follows a step, when its complete pages have their hashes."""
        table, size = self.pages.block_table.get(request, []), self.pages.tokens_per_page
        for snapshot in self.pending.pop(request, []):
            page = snapshot.tokens // size - 1
            name = self.pages.ledger.block_to_hash.get(table[page]) if page < len(table) else None
            if name is None or name in self.pool.slot_with:
                self.pool.give_back(snapshot.slot)
            elif snapshot.slot is not None:
                self.pool.keep(snapshot.slot, name)
            elif self.pool.free:
                slot = self.pool.take()
                self.pool.copy([self.pool.slot_of[request]], [slot])
                self.pool.keep(slot, name)

    def drop(self, request: str) -> None:
        self.branches.pop(request, None)
        for snapshot in self.pending.pop(request, []):
            self.pool.give_back(snapshot.slot)

    def drop_all(self) -> None:
        for request in [*self.pending, *self.branches]:
            self.drop(request)
