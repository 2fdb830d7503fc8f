"""The recorded cases of tests/golden.

python -m tests.helpers.golden [DEVICE ...]    prints the table of errors that release notes carry
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.cases import Case, run
from tests.helpers.devices import DEVICES, ready
from tests.helpers.errors import head_errors, relative_error

FOLDER = Path(__file__).parent.parent / "golden"
INDEX = {row["name"]: row for row in json.loads((FOLDER / "index.json").read_text())}
NAMES = list(INDEX)


@dataclass
class Golden:
    name: str
    tensors: dict[str, Tensor]
    case: Case
    exact: tuple[Tensor, Tensor]  # output and final state of the float64 recurrence
    fla_error: dict[str, float]


@cache
def load(name: str) -> Golden:
    tensors = load_file(FOLDER / f"{name}.safetensors")
    inputs = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")
    case = Case(**{key: tensors[key] for key in inputs if key in tensors})
    return Golden(name, tensors, case, case.exact(), INDEX[name]["fla_error"])


def table(devices: list[str]) -> str:
    """One row a case, op and device: our error and FLA's, of the output as a whole, its worst head, and the state."""
    lines = [
        "| case | op | device | output | worst head | FLA's output | final state | FLA's state |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in NAMES:
        golden = load(name)
        for op, prefix in (("chunk_gated_delta_rule", "chunk"), ("fused_recurrent_gated_delta_rule", "recurrent")):
            if f"{prefix}_o" not in golden.fla_error:
                continue
            for device in devices:
                o, state = (x.double() for x in run(op, golden.case, ready(device)))
                errors = (
                    relative_error(o, golden.exact[0]),
                    max(head_errors(o, golden.exact[0], 2)),
                    golden.fla_error[f"{prefix}_o"],
                    relative_error(state, golden.exact[1]),
                    golden.fla_error[f"{prefix}_final_state"],
                )
                figures = " | ".join(f"{error:.2e}" for error in errors)
                lines.append(f"| {name} | {prefix} | {device} | {figures} |")
    return "\n".join(lines)


if __name__ == "__main__":
    with torch.no_grad():
        print(table(sys.argv[1:] or list(DEVICES)))
