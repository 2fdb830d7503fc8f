"""Calls whose indices or boundaries, in the device's memory, lie outside what they index: kernels must report each and
touch nothing that is not theirs. They are recorded as they would be launched, without being run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from proof.cuda.record import CaseRecord, Writer
from proof.cuda.trace import Trace
from tests.helpers import aura, calls, paged
from torch_gdn.tune import prefill_algorithm

MPS = torch.device("mps")
LARGE = 2**31 - 2


@dataclass(frozen=True)
class Hostile:
    """A valid call of `op` with `argument` of these integers instead."""

    op: str
    argument: str
    wrong: Sequence[Any]
    is_packed: bool = False
    algorithm: str | None = None  # of a prefill

    @property
    def name(self) -> str:
        marks = f"{' packed' if self.is_packed else ''}{f' {self.algorithm}' if self.algorithm else ''}"
        return f"hostile {self.op}{marks}: {self.argument} {str(list(self.wrong))[:40]}"

    def call(self) -> dict[str, Any]:
        torch.manual_seed(5)
        if self.op in aura.OPS:
            call = aura.valid_call(self.op, MPS)
        elif self.op in paged.OPS:
            call = paged.valid_call(self.op, MPS)
        else:
            call = calls.valid_call(self.op, MPS, packed=self.is_packed)
        return call | {self.argument: torch.tensor(self.wrong, dtype=call[self.argument].dtype).to(MPS)}

    def run(self, call: dict[str, Any]) -> None:
        with prefill_algorithm(self.algorithm):
            getattr(torch.ops.gdn, self.op)(**call)


PACKED = (
    ("fused_recurrent_gated_delta_rule", None),
    ("chunk_gated_delta_rule", "fused_chunk"),
    ("chunk_gated_delta_rule", "chunked"),
    ("chunk_kda", "fused_chunk"),
    ("causal_conv1d", None),
)


def hostile() -> Iterator[Hostile]:
    for op in calls.IN_PLACE:
        for indices in ([4, 5], [LARGE, 1], [3, 3]):  # of 5 slots
            yield Hostile(op, "state_indices", indices)
    for op, algorithm in PACKED:
        for boundaries in ([0, 15, 5, 20], [0, 5, 5, LARGE], [-9, 5, 5, 20]):  # of 20 tokens
            yield Hostile(op, "cu_seqlens", boundaries, True, algorithm)
    yield Hostile("batch_copy_", "source_offsets", [70, LARGE, 0])  # of 80 bytes
    yield Hostile("batch_copy_", "destination_offsets", [-1, 60, 9])
    yield Hostile("batch_copy_", "sizes", [-5, LARGE, 0])
    yield Hostile("aura_encode_", "slots", [0, 8, 2, LARGE, 4])  # of 8
    yield Hostile("reshape_and_cache_", "slot_mapping", [3, 24, LARGE, 8, 0])  # of 24
    for op in ("paged_attention_", "aura_paged_attention_"):
        yield Hostile(op, "cu_seqlens", [0, LARGE, 9, 10])
        yield Hostile(op, "seq_lens", [LARGE, -4, 33])
        yield Hostile(op, "block_table", [[LARGE] * 6, [0] * 6, [-3] * 6])


def record(each: Hostile, writer: Writer) -> CaseRecord:
    call = each.call()
    trace = Trace(each.name, writer, runs=False)
    trace.call(lambda: each.run(call))
    trace.case.is_wrong = True
    writer.add(trace.case)
    return trace.case
