"""Which steps there are."""

from __future__ import annotations

from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from torch_gdn import _C
from torch_gdn._recorder import Launch
from torch_gdn.check import device, golden, layer, seeded, timing
from torch_gdn.check.fake_mps import fake_mps
from torch_gdn.check.steps import COMPILE, FACTS, USE, LeftOut, Outcome, Step
from torch_gdn.testing import OpEntry, Point, stages
from torch_gdn.testing.models import MODELS, QWEN3_NEXT
from torch_gdn.testing.registry import compiled, computed, first_of_each_variant, launches_at

CHUNK = "chunk_gated_delta_rule"
QUICK_CASES = ("base_k128", "ragged_k64", "decode_b4")
TIMED = (QWEN3_NEXT, "Qwen3.5-27B", "OLMo-Hybrid-7B")


def steps(folder: Path, quick: bool) -> list[Step]:
    memory = fake_mps()
    points = list(computed(quick))
    launches: list[list[Launch]] = [[] for _ in points]
    if _C.has_launcher():
        launches = [launches_at(entry, point, memory) for entry, point in points]
        others = () if quick else (launches_at(entry, point, memory) for entry, point in compiled())
        compile_steps = compiling(first_of_each_variant(chain(chain(*launches), *others)))
    else:
        reason = "without the Metal half no call can be recorded"
        compile_steps = [Step(COMPILE, "kernels", "", partial(leave_out, reason=reason))]
    return [
        Step(FACTS, "this machine", "", device.check_facts),
        Step(USE, "PyTorch's own addition", "", device.check_use),
        *compile_steps,
        *recorded(folder, quick),
        *from_seeds(points, launches),
        *timings(quick),
        Step("inductor", "Gated DeltaNet layer", "", layer.check_layer),
    ]


def compiling(launches: list[Launch]) -> list[Step]:
    """Every kernel variant, kernel by kernel."""
    variants = sorted((launch.variant for launch in launches), key=lambda each: each.kernel)
    return [
        Step(COMPILE, each.kernel, "_".join(each.arguments), partial(device.check_compiles, variant=each))
        for each in variants
    ]


def leave_out(device: torch.device, reason: str) -> Outcome:
    raise LeftOut(reason)


def recorded(folder: Path, quick: bool) -> list[Step]:
    """Stage by stage, then the end-to-end ops, of every case that FLA's outputs were recorded for."""
    reason = golden.why_not(folder)
    if reason:
        return [Step("recorded", "FLA's outputs", "", partial(leave_out, reason=reason))]
    names = [name for name in golden.index(folder) if not quick or name in QUICK_CASES]
    ops = {name: golden.ops_of(name, folder) for name in names}
    found = [
        Step("recorded", op, name, partial(golden.check_stage, folder=folder, name=name, op=op))
        for op in stages.OUTPUTS
        for name in names
        if op in ops[name]
    ]
    return found + [
        Step(
            "recorded",
            group_of(op, algorithm),
            name,
            partial(golden.check_end_to_end, folder=folder, name=name, op=op, algorithm=algorithm),
        )
        for op in golden.PREFIXES
        for algorithm in algorithms_of(op)
        for name in names
        if op in ops[name]
    ]


def algorithms_of(op: str) -> list[str] | list[None]:
    """In which the op is checked: a prefill in each of its own."""
    return _C.prefill_algorithms() if op == CHUNK else [None]


def group_of(op: str, algorithm: str | None) -> str:
    return op if algorithm is None else f"{op}:{algorithm}"


def from_seeds(points: list[tuple[OpEntry[Any], Point]], launches: list[list[Launch]]) -> list[Step]:
    """Every op at its points, with the kernels that it launches there."""
    return [
        Step(
            "seeded",
            group_of(entry.name, point.algorithm),
            point.name,
            partial(seeded.check_point, op=entry.name, point=point),
            tuple(dict.fromkeys(launch.variant.kernel for launch in launched)),
        )
        for (entry, point), launched in zip(points, launches, strict=True)
    ]


def timings(quick: bool) -> list[Step]:
    found = []
    for kind, tokens, repeats, in_a_row in (("decode", 1, 11, 48), ("prefill", 512 if quick else 2048, 5, 1)):
        for model in TIMED[:1] if quick else TIMED:
            run = partial(timing.check_timing, shape=MODELS[model], tokens=tokens, repeats=repeats, calls=in_a_row)
            found.append(Step("timing", kind, model, run))
    return found
