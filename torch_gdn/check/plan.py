"""Which steps there are."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from torch_gdn import _C
from torch_gdn.check import calls, device, golden, layer, seeded, stages, timing
from torch_gdn.check.calls import METAL_TYPES, MODELS
from torch_gdn.check.fake_mps import fake_mps
from torch_gdn.check.steps import COMPILE, FACTS, USE, LeftOut, Outcome, Step

CHUNK_TOKENS = 130  # two chunks of 64 and a part of a third
RECURRENT_TOKENS = 21  # two tiles of 8 tokens and a part of a third
QUICK_CASES = ("base_k128", "ragged_k64", "decode_b4")
TIMED = ("Qwen3-Next-80B-A3B, Qwen3.5-35B-A3B, 9B, 4B", "Qwen3.5-27B", "OLMo-Hybrid-7B")


def steps(folder: Path, quick: bool) -> list[Step]:
    return [
        Step(FACTS, "this machine", "", device.check_facts),
        Step(USE, "PyTorch's own addition", "", device.check_use),
        *compiling(quick),
        *recorded(folder, quick),
        *from_seeds(folder, quick),
        *timings(quick),
        Step("inductor", "Gated DeltaNet layer", "", layer.check_layer),
    ]


def compiling(quick: bool) -> list[Step]:
    """Every kernel variant that the calls launch, kernel by kernel."""
    if not _C.has_launcher():
        reason = "without the Metal half no call can be recorded"
        return [Step(COMPILE, "kernels", "", partial(leave_out, reason=reason))]
    with fake_mps():
        variants = [launch.variant for launch in calls.launches(calls.table(quick))]
    return [
        Step(COMPILE, each.kernel, "_".join(each.arguments), partial(device.check_compiles, variant=each))
        for each in sorted(variants, key=lambda each: each.kernel)
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
    return _C.prefill_algorithms() if op == seeded.CHUNK else [None]


def group_of(op: str, algorithm: str | None) -> str:
    return op if algorithm is None else f"{op}:{algorithm}"


def from_seeds(folder: Path, quick: bool) -> list[Step]:
    """The stages in the dtypes that FLA's outputs leave open; the end-to-end ops in every call of the table."""
    dtypes = [dtype for dtype in METAL_TYPES if not (quick and dtype == torch.float16)]
    if not golden.why_not(folder):
        dtypes.remove(torch.bfloat16)
    found = [
        Step("seeded", op, METAL_TYPES[dtype], partial(seeded.check_stage, op=op, dtype=dtype))
        for op in stages.OUTPUTS
        for dtype in dtypes
    ]
    table = calls.rule_calls(quick)
    # The recurrent kernel knows no chunks and no alignment. The chunked ones read either state layout by its strides,
    # so one of each is enough: normalised with [V, K], not normalised with [K, V].
    of_op = {
        seeded.CHUNK: [each for each in table if each.state_v_first == each.normalise],
        seeded.RECURRENT: [each for each in table if each.chunk_size == 64 and each.aligned],
    }
    for op, tokens in ((seeded.CHUNK, CHUNK_TOKENS), (seeded.RECURRENT, RECURRENT_TOKENS)):
        for algorithm in algorithms_of(op):
            for each in of_op[op]:
                if algorithm == "chunked" or each.chunk_size == 64:  # which is the chunked algorithm's
                    run = partial(seeded.check_call, op=op, wanted=each, tokens=tokens, algorithm=algorithm)
                    found.append(Step("seeded", group_of(op, algorithm), each.name, run))
    return found


def timings(quick: bool) -> list[Step]:
    found = []
    for kind, tokens, repeats, in_a_row in (("decode", 1, 11, 48), ("prefill", 512 if quick else 2048, 5, 1)):
        for model in TIMED[:1] if quick else TIMED:
            run = partial(timing.check_timing, shape=MODELS[model], tokens=tokens, repeats=repeats, calls=in_a_row)
            found.append(Step("timing", kind, model, run))
    return found
