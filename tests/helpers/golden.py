"""The recorded cases of tests/golden.

python -m tests.helpers.golden [DEVICE ...]    prints the table of errors that release notes carry
"""

from __future__ import annotations

import sys

import torch

from tests.helpers.cases import run
from tests.helpers.devices import DEVICES, ready
from tests.helpers.errors import head_errors, relative_error
from tests.helpers.prefill import ALGORITHMS, PREFILL
from torch_gdn.tools.prefill import prefill_algorithm
from torch_gdn_check.golden import Golden, end_to_end_parts, index, load

__all__ = ["NAMES", "Golden", "load"]
NAMES = list(index())


def assert_as_exact_as_fla(name: str, op: str, device: torch.device) -> None:
    golden = load(name)
    for part in end_to_end_parts(golden, op, *run(op, golden.case, device)):
        assert part.kept, str(part)


def algorithms(op: str, device: str) -> tuple[str | None, ...]:
    """Returns the algorithms of a prefill, if there are several."""
    return tuple(ALGORITHMS) if op == PREFILL and device == "mps" else (None,)


def table(devices: list[str]) -> str:
    """Returns one row per case, op and device: our error and FLA's, for the whole output, its worst head, and the
    state.
    """
    lines = [
        "| case | op | device | output | worst head | FLA's output | final state | FLA's state |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in NAMES:
        golden = load(name)
        for op, prefix in (("chunk_gated_delta_rule", "chunk"), ("fused_recurrent_gated_delta_rule", "recurrent")):
            if f"{prefix}_o" not in golden.fla_error:
                continue
            for device, algorithm in [(each, algorithm) for each in devices for algorithm in algorithms(op, each)]:
                with prefill_algorithm(algorithm):
                    o, state = (x.double() for x in run(op, golden.case, ready(device)))
                errors = (
                    relative_error(o, golden.exact[0]),
                    max(head_errors(o, golden.exact[0], 2)),
                    golden.fla_error[f"{prefix}_o"],
                    relative_error(state, golden.exact[1]),
                    golden.fla_error[f"{prefix}_final_state"],
                )
                figures = " | ".join(f"{error:.2e}" for error in errors)
                on = f"{device}, {algorithm}" if algorithm else device
                lines.append(f"| {name} | {prefix} | {on} | {figures} |")
    return "\n".join(lines)


if __name__ == "__main__":
    with torch.no_grad():
        print(table(sys.argv[1:] or list(DEVICES)))
