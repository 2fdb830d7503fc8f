"""Checks and then times prefill and decode of a Gated DeltaNet layer, next to each installed peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from bench import contenders, counting
from bench.ceilings import Ceilings
from bench.contenders import Prepare
from bench.counting import Work
from bench.results import OURS, Row
from bench.shapes import LAYERS, QWEN3_NEXT, Layer
from bench.timing import measure
from torch_gdn_check.peers import Prepared
from torch_gdn_check.registry.bounds import relative_error
from torch_gdn_check.registry.cases import Case, make_case
from torch_gdn_check.steps import Skipped

LARGEST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}  # larger errors are another function
PREFILL_TOKENS, DECODE_BATCHES = (512, 1024, 2048, 8192), (1, 8)
SWEEP_TOKENS, SWEEP_HEADS = (1, 2, 8, 16, 33, 64, 100, 256, 1024, 4096, 8192), (1, 2, 8, 64)


def case_of(layer: Layer, tokens: int, batch: int, dtype: torch.dtype) -> Case:
    return make_case(tokens, layer.K, layer.V, B=batch, H=layer.H, HV=layer.HV, dtype=dtype)


def heads_of_one_key_head(case: Case, head: int) -> Case:
    """Returns only the value heads that read key head `head`. The float64 recurrence is fast enough for these."""
    group = case.v.size(2) // case.q.size(2)
    values = slice(head * group, (head + 1) * group)
    assert case.initial_state is not None
    return replace(
        case,
        q=case.q[:, :, head : head + 1],
        k=case.k[:, :, head : head + 1],
        v=case.v[:, :, values],
        g=case.g[:, :, values],
        beta=case.beta[:, :, values],
        initial_state=case.initial_state[:, values],
    )


def exact_output(case: Case) -> Tensor:
    """Returns the exact output of the first and the last key head's value heads."""
    parts = [heads_of_one_key_head(case, head).exact()[0] for head in {0, case.q.size(2) - 1}]
    return torch.cat(parts, dim=2)


def same_heads(o: Tensor, case: Case) -> Tensor:
    group = case.v.size(2) // case.q.size(2)
    return torch.cat([o[:, :, head * group : (head + 1) * group] for head in {0, case.q.size(2) - 1}], dim=2)


def prepare_all(
    row_of: Callable[[str], Row], prepares: Mapping[str, Prepare], case: Case, device: torch.device
) -> Iterator[tuple[Row, Prepared | None]]:
    """Returns a row for each contender. Only those with the right answer are timed."""
    exact = exact_output(case)
    for name, prepare in prepares.items():
        row = row_of(name)
        try:
            prepared = prepare(case, device)
            o = prepared.output()[0].detach().cpu()
        except Skipped as reason:
            row.note = f"not run: {reason}"
            yield row, None
            continue
        row.error = relative_error(same_heads(o, case), exact)
        if not row.error <= LARGEST_ERROR[case.dtype]:
            row.note = "wrong: not timed"
            yield row, None
            continue
        yield row, prepared


def compare(
    row_of: Callable[[str], Row],
    prepares: Mapping[str, Prepare],
    case: Case,
    work: Work,
    ceilings: Ceilings,
    seconds: float,
) -> list[Row]:
    device, dtype = ceilings.device, case.dtype
    result = list(prepare_all(row_of, prepares, case, device))
    times = measure({row.contender: prepared.call for row, prepared in result if prepared}, device, seconds)
    floor = work.floor(ceilings.products(dtype), ceilings.bytes_a_second(work.bytes))
    for row, prepared in result:
        if prepared:
            row.time(times[row.contender])
            row.work(work)
            row.floor = floor
    return [row for row, _ in result]


def row_maker(section: str, layer: Layer, dtype: torch.dtype, size: int) -> Callable[[str], Row]:
    name = str(dtype).removeprefix("torch.")
    return lambda contender: Row(section, str(layer), name, size, contender, torch.get_num_threads())


def prefill(
    layer: Layer,
    tokens: int,
    dtype: torch.dtype,
    ceilings: Ceilings,
    seconds: float,
    section: str = "prefill",
    names: tuple[str, ...] = tuple(contenders.PREFILL),
) -> list[Row]:
    prepares = {name: contenders.PREFILL[name] for name in names}
    case, work = case_of(layer, tokens, 1, dtype), counting.prefill(layer, tokens, dtype)
    return compare(row_maker(section, layer, dtype, tokens), prepares, case, work, ceilings, seconds)


def decode(
    layer: Layer,
    batch: int,
    dtype: torch.dtype,
    ceilings: Ceilings,
    seconds: float,
    names: tuple[str, ...] = tuple(contenders.DECODE),
) -> list[Row]:
    prepares = {name: contenders.DECODE[name] for name in names}
    case, work = case_of(layer, 1, batch, dtype), counting.decode(layer, batch, dtype)
    rows = compare(row_maker("decode", layer, dtype, batch), prepares, case, work, ceilings, seconds)
    size = batch * counting.state(layer)
    for row in rows:
        row.others["copying the state"] = 2 * size / ceilings.bytes_a_second(2 * size)
        row.others["scaling it in place"] = ceilings.moving_in_place(size)
    return rows


def prefill_jobs(quick: bool) -> Iterator[tuple[Layer, int, torch.dtype]]:
    for layer in LAYERS:
        for dtype in (torch.float32, torch.bfloat16):
            for tokens in (128,) if quick else PREFILL_TOKENS if layer is QWEN3_NEXT else (2048,):
                yield layer, tokens, dtype


def decode_jobs(quick: bool) -> Iterator[tuple[Layer, int, torch.dtype]]:
    for layer in LAYERS:
        for dtype in (torch.float32, torch.bfloat16):
            for batch in (1,) if quick else DECODE_BATCHES:
                yield layer, batch, dtype


def sweep_jobs(quick: bool) -> Iterator[tuple[Layer, int, torch.dtype]]:
    """Yields lengths and head counts, compared only with the fallback."""
    for heads in (1,) if quick else SWEEP_HEADS:
        for tokens in (1, 33) if quick else SWEEP_TOKENS:
            yield Layer("sweep", heads, heads, 128, 128), tokens, torch.float32


SWEEP_CONTENDERS = (OURS, "transformers")
