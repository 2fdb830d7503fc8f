"""Lists the steps in the order in which they run. Those that tell the most in the least time come first."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import torch
from tqdm import tqdm

from torch_gdn import _C
from torch_gdn._recorder import Launch
from torch_gdn_check import comparisons, device, first_call, golden, layer, models, probes, timing
from torch_gdn_check.fake_mps import fake_mps
from torch_gdn_check.registry import REGISTRY, stages
from torch_gdn_check.registry.models import MODELS, QWEN3_NEXT
from torch_gdn_check.registry.registry import compiled, computed, first_of_each_variant, launches_at
from torch_gdn_check.steps import COMPILE, FACTS, PROBE, PYTORCH, USE, Outcome, Skipped, Step

CHUNK = "chunk_gated_delta_rule"
QUICK_CASES = ("base_k128", "ragged_k64", "decode_b4")
TUNED_TOKENS = (16, 64, 512, 2048)
TIMED = (QWEN3_NEXT, "Qwen3.5-27B", "OLMo-Hybrid-7B")


def steps(folder: Path, quick: bool) -> list[Step]:
    """Lists all steps except the compilation of every kernel variant, which takes a minute of recording to list."""
    others = (
        Step("tune", "prefill", f"T {tokens}", partial(timing.check_tuning, sizes=MODELS[QWEN3_NEXT], tokens=tokens))
        for tokens in TUNED_TOKENS
    )
    long_ones = (
        Step("long prompt", algorithm, "", partial(comparisons.check_long_prompt, algorithm=algorithm))
        for algorithm in _C.prefill_algorithms()
    )
    return [
        *about_the_device(),
        *pytorch_steps(),
        *(Step(PROBE, name, "", partial(probes.check_probe, name=name)) for name in probes.PROBES),
        *from_seeds(quick),
        *recorded(folder, quick),
        Step("pipelines", "compiled so far", "", device.check_pipelines),
        *timings(quick),
        *([] if quick else [*others, *long_ones, Step("inductor", "Gated DeltaNet layer", "", layer.check_layer)]),
    ]


def about_the_device() -> list[Step]:
    return [
        Step(FACTS, "this machine", "", device.check_facts),
        Step(USE, "PyTorch's own addition", "", device.check_use),
    ]


def pytorch_steps() -> list[Step]:
    return [
        Step(PYTORCH, name, str(dtype).removeprefix("torch."), partial(comparisons.check_call, name=name, dtype=dtype))
        for name in comparisons.CALLS
        for dtype in comparisons.BOUNDS
    ]


@cache
def compile_steps() -> list[Step]:
    """Lists steps that compile every kernel variant of the check and of models, kernel by kernel."""
    if not _C.has_launcher():
        reason = "no call can be recorded without the Metal half"
        return [Step(COMPILE, "kernels", "", partial(leave_out, reason=reason))]
    memory, launches = fake_mps(), []
    wanted = [*computed(quick=False), *compiled()]
    for entry, point in tqdm(wanted, desc="listing kernel variants", unit="call", dynamic_ncols=True):
        launches += launches_at(entry, point, memory)
    return compiling(first_of_each_variant(launches))


def compiling(launches: list[Launch]) -> list[Step]:
    variants = sorted((launch.variant for launch in launches), key=lambda each: each.kernel)
    return [
        Step(COMPILE, each.kernel, "_".join(each.arguments), partial(device.check_compiles, variant=each), variant=each)
        for each in variants
    ]


def leave_out(device: torch.device, reason: str) -> Outcome:
    raise Skipped(reason)


def recorded(folder: Path, quick: bool) -> list[Step]:
    """Lists steps for every case with recorded FLA outputs: stage by stage, then the end-to-end ops."""
    reason = golden.why_not(folder)
    if reason:
        return [Step("recorded", "FLA's outputs", "", partial(leave_out, reason=reason))]
    names = [name for name in golden.index(folder) if not quick or name in QUICK_CASES]
    ops = {name: golden.ops_of(name, folder) for name in names}
    result = [
        Step("recorded", op, name, partial(golden.check_stage, folder=folder, name=name, op=op))
        for op in stages.OUTPUTS
        for name in names
        if op in ops[name]
    ]
    return result + [
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
    """Returns the algorithms to check the op with: all its own for a prefill."""
    return _C.prefill_algorithms() if op == CHUNK else [None]


def group_of(op: str, algorithm: str | None) -> str:
    return op if algorithm is None else f"{op}:{algorithm}"


def from_seeds(quick: bool) -> list[Step]:
    """Lists steps for every op at its points, with the kernels that it launches there."""
    memory, result = fake_mps(), []
    for entry, point in computed(quick):
        launched = launches_at(entry, point, memory) if _C.has_launcher() else []
        result.append(
            Step(
                "seeded",
                group_of(entry.name, point.algorithm),
                point.name,
                partial(comparisons.check_point, op=entry.name, point=point),
                tuple(dict.fromkeys(launch.variant.kernel for launch in launched)),
            )
        )
    return result


def timings(quick: bool) -> list[Step]:
    """Lists timing steps: each op, then other code for the same work, then a model and a process's first calls."""
    points = {name: timing.timed_point(entry) for name, entry in REGISTRY.items()}
    result = [
        Step("time", name, point.name, partial(timing.check_op_time, op=name, point=point))
        for name, point in points.items()
    ]
    for kind, tokens, repeats, in_a_row in (("decode", 1, 11, 48), ("prefill", 512 if quick else 2048, 5, 1)):
        for model in TIMED[: 2 if kind == "prefill" else 1] if quick else TIMED:  # the second has a yardstick
            run = partial(timing.check_timing, shape=MODELS[model], tokens=tokens, repeats=repeats, calls=in_a_row)
            result.append(Step("timing", kind, model, run))
    for number in (1, 8) if quick else (1, 8, 64, 512):
        experts = partial(timing.check_experts, tokens=number)
        result.append(Step("timing", "experts", f"{number} tokens", experts))
        result.append(Step("timing", "4 bits", f"{number} rows", partial(timing.check_packed, rows=number)))
    return [
        *result,
        Step("model", "tokens per second", "small Qwen3-Next", models.check_model),
        Step("first call", "of a process", "", first_call.check_first_call),
    ]
