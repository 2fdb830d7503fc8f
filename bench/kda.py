"""Times prefill and decode of a Kimi Delta Attention layer, next to transformers' fallback."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from bench import contenders, counting, gdn
from bench.ceilings import Ceilings
from bench.results import Row
from bench.shapes import KIMI_LINEAR, Layer
from torch_gdn import reference
from torch_gdn_check.registry.cases import Case

PREFILL_TOKENS, DECODE_BATCHES = (512, 2048), (1, 8)


@dataclass
class KdaCase(Case):
    """A case whose g is [B, T, HV, K]."""

    def exact(self, **options: Any) -> tuple[Tensor, Tensor]:
        exact = self.map(torch.Tensor.double)
        o, state = reference.fused_recurrent_kda(*exact.qkv, **(exact.options | options))
        assert state is not None
        return o, state


def case_of(layer: Layer, tokens: int, batch: int, dtype: torch.dtype) -> KdaCase:
    case = KdaCase(**vars(gdn.case_of(layer, tokens, batch, dtype)))
    drawn = torch.randn(*case.g.shape, layer.K, generator=torch.Generator().manual_seed(1))
    return replace(case, g=logsigmoid(drawn + 2))


def run(what: str, layer: Layer, size: int, dtype: torch.dtype, ceilings: Ceilings, seconds: float) -> list[Row]:
    """Times a row. `size` is the tokens of a prefill, or the sequences that decode."""
    prepares = contenders.KDA_PREFILL if what == "prefill" else contenders.KDA_DECODE
    tokens, batch = (size, 1) if what == "prefill" else (1, size)
    case, work = case_of(layer, tokens, batch, dtype), counting.kda(layer, tokens, batch, dtype)
    row_of = gdn.row_maker("kda", layer, dtype, size)

    def named_row(contender: str) -> Row:
        row = row_of(contender)
        row.case = f"{what}, {row.case}"
        return row

    return gdn.compare(named_row, prepares, case, work, ceilings, seconds)


def jobs(quick: bool) -> Iterator[tuple[str, Layer, int, torch.dtype]]:
    for what, sizes in (
        ("prefill", (128,) if quick else PREFILL_TOKENS),
        ("decode", (1,) if quick else DECODE_BATCHES),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            for size in sizes:
                yield what, KIMI_LINEAR, size, dtype
