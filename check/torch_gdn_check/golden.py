"""Compares with FLA's recorded outputs in tests/golden: each stage on FLA's own inputs, then both end-to-end ops."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

import torch_gdn
from torch_gdn.tools.prefill import prefill_algorithm
from torch_gdn_check.registry import bounds, stages
from torch_gdn_check.registry.cases import END_TO_END_OPS, Case
from torch_gdn_check.steps import Outcome, judged

# They take 10 MB of a checkout, and no wheel has them.
FOLDER = Path(torch_gdn.__file__).resolve().parent.parent / "tests" / "golden"  # of the checkout of torch_gdn
PREFIXES = {"chunk_gated_delta_rule": "chunk", "fused_recurrent_gated_delta_rule": "recurrent"}


@dataclass
class Golden:
    name: str
    tensors: dict[str, Tensor]
    case: Case
    exact: tuple[Tensor, Tensor]  # output and final state of the float64 recurrence
    fla_error: dict[str, float]


def why_not(folder: Path) -> str:
    """Returns why the recorded outputs cannot be used, or "" if they can."""
    if not (folder / "index.json").is_file():
        return (
            f"no FLA outputs in {folder}: an installed package has none, so every stage is compared with float64 "
            "only; if you have a checkout, pass its tests/golden with --golden"
        )
    try:
        import safetensors  # noqa: F401
    except ImportError:
        return "safetensors is needed to read FLA's outputs: pip install safetensors"
    return ""


def index(folder: Path = FOLDER) -> dict[str, dict[str, float]]:
    """Returns FLA's own errors, by case and tensor."""
    return {row["name"]: row["fla_error"] for row in json.loads((folder / "index.json").read_text())}


@cache
def load(name: str, folder: Path = FOLDER) -> Golden:
    from safetensors.torch import load_file  # here, because torch_gdn itself does not need it

    tensors = load_file(folder / f"{name}.safetensors")
    inputs = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")
    case = Case(**{key: tensors[key] for key in inputs if key in tensors})
    return Golden(name, tensors, case, case.exact(), index(folder)[name])


def stage_parts(golden: Golden, results: dict[str, Tensor]) -> list[bounds.Part]:
    """Compares a stage's results with FLA's. They are rounded to 16 bits if FLA passes 16 bits on."""
    parts = []
    for tensor, ours in results.items():
        bound = bounds.STAGE_BESIDE_FLA.get(tensor, bounds.STAGE_OUTPUT[golden.case.dtype])
        parts += bounds.compare(tensor, ours, golden.tensors[tensor].double(), bound)
    return parts


def end_to_end_parts(golden: Golden, op: str, o: Tensor, state: Tensor) -> list[bounds.Part]:
    """Allows an end-to-end op 1.05 x FLA's error. The recurrent state has the bound of float32."""
    prefix = PREFIXES[op]
    exact_o, exact_state = golden.exact
    names = (f"{prefix}_o", f"{prefix}_final_state")
    parts = bounds.compare_with_fla(names[0], o, golden.tensors[names[0]], exact_o, golden.fla_error[names[0]], 2)
    if prefix == "recurrent":
        return parts + bounds.compare(names[1], state, exact_state, bounds.RECURRENT_F32, head_dim=1)
    theirs = golden.tensors[names[1]]
    return parts + bounds.compare_with_fla(names[1], state, theirs, exact_state, golden.fla_error[names[1]], 1)


def ops_of(name: str, folder: Path = FOLDER) -> list[str]:
    """Returns the stages and end-to-end ops whose outputs the case has. It has the inputs of such stages too."""
    from safetensors import safe_open

    with safe_open(folder / f"{name}.safetensors", "pt") as file:
        tensors = set(file.keys())
    result = [op for op, outputs in stages.OUTPUTS.items() if set(outputs) <= tensors]
    if "h" not in tensors:
        result = [op for op in result if op != "chunk_fwd_o"]  # chunk_o is the end-to-end op's too
    return result + [op for op, prefix in PREFIXES.items() if f"{prefix}_o" in tensors]


def check_stage(device: torch.device, folder: Path, name: str, op: str) -> Outcome:
    golden = load(name, folder)
    return judged(stage_parts(golden, stages.call(op, golden.tensors, device)))


def check_end_to_end(device: torch.device, folder: Path, name: str, op: str, algorithm: str | None = None) -> Outcome:
    """Checks an end-to-end op. `algorithm` is forced on a prefill."""
    golden = load(name, folder)
    on_device = golden.case.to(device)
    with prefill_algorithm(algorithm):
        o, state = END_TO_END_OPS[op](*on_device.qkv, **on_device.options)
    assert state is not None
    return judged(end_to_end_parts(golden, op, o.cpu(), state.cpu()))
