"""Times the first calls of a process, which compile every kernel variant.

python -m torch_gdn_check.first_call SHADERS [SETTINGS]     prints the seconds; check_first_call() runs it twice
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import torch

import torch_gdn
from torch_gdn import _C
from torch_gdn_check.device import simulated_settings
from torch_gdn_check.registry.cases import make_case
from torch_gdn_check.steps import Outcome, refuse_simulated

LIMIT_SECONDS = 300.0


def seconds_of_first_calls(device: torch.device) -> dict[str, float]:
    """Times prefill and decode in bfloat16, twice each: the first call compiles, the second does not."""
    case = make_case(130, 128, 128, H=2, HV=4, dtype=torch.bfloat16).to(device)
    result = {}
    for round_name in ("first", "second"):
        for name in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"):
            start = time.perf_counter()
            getattr(torch_gdn, name)(*case.qkv, **case.options)[0].cpu()
            result[f"{round_name} {name}"] = time.perf_counter() - start
    return result


def in_a_new_process(shaders: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "torch_gdn_check.first_call", str(shaders), json.dumps(simulated_settings())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"the process of the first calls ended with {done.returncode}: {done.stderr[-2000:]}")
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def check_first_call(device: torch.device) -> Outcome:
    """Times a process that compiles shaders that no cache has, and a second process."""
    refuse_simulated(device)
    return Outcome(cold_and_cached())


def cold_and_cached() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        shaders = Path(shutil.copytree(_C.shader_directory(), Path(folder) / "shaders"))
        for file in shaders.rglob("*.metal"):  # a text that was never compiled before
            with file.open("a") as text:
                text.write(f"constant constexpr const int never_compiled_{uuid.uuid4().hex} = 0;\n")
        return {process: in_a_new_process(shaders) for process in ("cold", "second process")}


def main(shaders: str, settings: str) -> None:
    simulated = json.loads(settings)
    if simulated is not None:
        import mps_simulator

        mps_simulator.activate(**simulated)
    _C.set_shader_directory(shaders)
    print(json.dumps(seconds_of_first_calls(torch.device("mps"))))


if __name__ == "__main__":
    main(*sys.argv[1:])
