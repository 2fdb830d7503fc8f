"""Records every case on the simulated device."""

from __future__ import annotations

from pathlib import Path

import simulator
from proof.checks import Progress
from proof.cuda.record import Writer


def record_all(path: Path, progress: Progress, only: str = "") -> int:
    simulator.activate()
    from proof.cuda import cases  # once there is a device

    wanted = [case for case in cases.all_cases() if only in case.name]
    progress.expect(len(wanted))
    writer = Writer(path)
    for case in wanted:
        cases.record(case, writer)
        progress.step(case.name)
    timed = list(cases.timed(writer)) if not only else []
    for run in timed:
        run()
    writer.close()
    return len(wanted) + len(timed)
