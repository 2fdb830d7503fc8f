"""All of it on a machine with a GPU: compile, compare values, run the sanitizers, take times. The findings as JSON."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from proof.checks import Progress
from proof.cuda import compiling, replay, sanitizer
from proof.cuda.gpu import Gpu

PARTS = ("values", "sanitizers", "times")
ARCHITECTURE = "native"


def missing() -> str:
    """What keeps the shaders from being run on a GPU here; nothing where all is there."""
    try:
        Gpu()
        compiling.nvcc()
    except (RuntimeError, compiling.NoCompiler) as reason:
        return str(reason)
    return "" if sanitizer.program() else "compute-sanitizer is missing: NVIDIA's CUDA toolkit has it"


def versions() -> str:
    text = subprocess.run([compiling.nvcc(), "--version"], capture_output=True, text=True, check=True).stdout
    compiler = next(line.split("release ")[1].split(",")[0] for line in text.splitlines() if "release " in line)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    has_query = shutil.which(query[0]) is not None
    driver = (
        subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip() if has_query else "unknown"
    )
    return f"CUDA {compiler}, driver {driver.splitlines()[0] if driver else 'unknown'}"


def run(record: Path, cubins: Path, parts: Sequence[str], progress: Progress) -> dict[str, Any]:
    began = time.monotonic()
    found: dict[str, Any] = {"problems": [], "seconds": {}, "parts": list(parts)}
    session = replay.Session(record, cubins)
    launches = list(session.reader.launches())
    cases = [case for case in session.reader.cases if not case.floor_bytes]
    progress.expect(len(launches) + len(cases) + len(sanitizer.TOOLS))
    found |= {"gpu": session.gpu.name, "versions": versions(), "cases": len(cases)}
    found |= {"variants": len(launches), "kernels": len({launch.kernel for launch in launches})}
    is_wrong = compiling.compile_all(launches, cubins, ARCHITECTURE, progress.step)
    found["problems"] += is_wrong
    found["seconds"]["compiling"] = time.monotonic() - began
    run_parts: dict[str, Callable[[], None]] = {
        "values": lambda: values(session, found, progress),
        "times": lambda: times(session, found),
        "sanitizers": lambda: sanitizers(record, cubins, found, progress),
    }
    for name, part in run_parts.items():
        start = time.monotonic()
        if name in parts and not is_wrong:
            part()
        found["seconds"][name] = time.monotonic() - start
    return found


def values(session: replay.Session, found: dict[str, Any], progress: Progress) -> None:
    for pattern in replay.PATTERNS:
        share = session.share_still_filled(pattern)
        if share < 0.99:
            found["problems"].append(f"of the pattern {pattern:#x} in threadgroup memory {share:.0%} reach a kernel")
    rows = []
    for case in session.reader.cases:
        if not case.floor_bytes:
            compared, problems = replay.compare(session, case)
            rows += [asdict(row) for row in compared]
            found["problems"] += problems
            progress.step(case.name)
    found["values"] = rows


def times(session: replay.Session, found: dict[str, Any]) -> None:
    rate = session.gpu.copy_rate()
    found["copy_rate"] = rate
    found["times"] = [asdict(replay.timed(session, case, rate)) for case in session.reader.cases if case.floor_bytes]


def sanitizers(record: Path, cubins: Path, found: dict[str, Any], progress: Progress) -> None:
    """Each tool first has to find a fault of its own."""
    found["sanitizers"] = []

    def one(tool: str) -> tuple[sanitizer.Verdict, sanitizer.Verdict]:
        return sanitizer.examine(tool, record, cubins, f"fault_of_{tool}"), sanitizer.examine(tool, record, cubins)

    with ThreadPoolExecutor(len(sanitizer.TOOLS)) as pool:
        for planted, verdict in pool.map(one, sanitizer.TOOLS):
            found["sanitizers"].append(asdict(verdict))
            if planted.errors == 0:
                found["problems"].append(f"{planted.tool} does not find the fault that is planted for it")
            found["problems"] += [f"{verdict.tool}: {place}" for place in verdict.places]
            if verdict.errors and not verdict.places:
                found["problems"].append(f"{verdict.tool}: {verdict.errors} errors")
            progress.step(verdict.tool)
