"""The check on a GPU, as the table shows it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from evidence.lab.cuda import running
from evidence.lab.cuda.__main__ import CUBINS
from evidence.proof.checks import Finding, Progress, check
from evidence.proof.reasons import Skipped


@check("cuda", "the shaders compute the same values on an NVIDIA GPU, and compute-sanitizer finds nothing")
def cuda_check(progress: Progress) -> Finding:
    if reason := running.missing():
        raise Skipped(reason)
    if sys.platform != "linux":
        raise Skipped("no simulated device, on which the launches are recorded")
    from evidence.lab.cuda.recording import record_all  # needs torch and the simulated device

    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "launches.zip"
        record_all(record, progress)
        result = running.run(record, CUBINS, running.PARTS, progress)
    notes = [f"{result['gpu']}, {result['versions']}: {result['variants']} kernel variants"]
    notes += [
        f"{row['case']}: {row['microseconds']:.1f} us, floor {row['floor']:.1f}" for row in result.get("times", ())
    ]
    notes.append("prefill is not timed: its 8 x 8 matrices are emulated here and say nothing of Apple's")
    return Finding(result["cases"], result["problems"], notes)
