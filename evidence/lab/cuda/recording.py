"""Records every case on the simulated device."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import mps_simulator
from evidence.lab.cuda.record import Writer
from evidence.proof.checks import Progress


def record_all(path: Path, progress: Progress, only: str = "") -> int:
    """`only` selects cases whose name contains it."""
    mps_simulator.activate()
    from evidence.lab.cuda import cases, hostile  # needs a device

    recorders: list[tuple[str, cases.Recorder]] = [
        (case.name, partial(cases.record, case)) for case in cases.all_cases()
    ]
    recorders += [(each.name, partial(hostile.record, each)) for each in hostile.hostile()]
    wanted = [(name, record) for name, record in (*recorders, *cases.timed()) if only in name]
    progress.expect(len(wanted))
    writer = Writer(path)
    for name, record in wanted:
        record(writer)
        progress.step(name)
    writer.close()
    return len(wanted)
