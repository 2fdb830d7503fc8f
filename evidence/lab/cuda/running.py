"""Runs all parts on a machine with a GPU: compiles, compares values, runs the sanitizers, and times. Returns JSON."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from evidence.lab.cuda import compiling, conflicts, peers, peers_experts, peers_linear, replay, sanitizer
from evidence.lab.cuda.gpu import Gpu
from evidence.proof.checks import Progress

PARTS = ("values", "times", "peers", "sanitizers", "conflicts")
ARCHITECTURE = "native"


def missing() -> str:
    """Returns what prevents running the shaders on a GPU here, or ""."""
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


def run(
    record: Path,
    cubins: Path,
    parts: Sequence[str],
    progress: Progress,
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Calls `keep` with the findings after each part, because a borrowed machine may go away."""
    began = time.monotonic()
    found: dict[str, Any] = {"problems": [], "left_out": [], "seconds": {}, "parts": list(parts)}
    session = replay.Session(record, cubins)
    launches = list(session.reader.launches())
    cases = [case for case in session.reader.cases if not case.floor_bytes]
    progress.expect(len(launches) + len(cases) + len(sanitizer.TOOLS))
    found |= {"gpu": session.gpu.name, "versions": versions(), "cases": len(cases)}
    found["wrong_calls"] = sum(case.is_wrong for case in cases)
    found |= {"variants": len(launches), "kernels": len({launch.kernel for launch in launches})}
    is_wrong = compiling.compile_all(launches, cubins, ARCHITECTURE, progress.step)
    found["problems"] += is_wrong
    found["seconds"]["compiling"] = time.monotonic() - began
    run_parts: dict[str, Callable[[], None]] = {
        "values": lambda: values(session, found, progress),
        "times": lambda: times(session, found),
        "peers": lambda: peers_beside(cubins, found),
        "sanitizers": lambda: sanitizers(record, cubins, found, progress),
        "conflicts": lambda: bank_conflicts(record, cubins, found),
    }
    for name, part in run_parts.items():
        start = time.monotonic()
        if name in parts and not is_wrong:
            try:
                part()
            except (RuntimeError, ValueError, OSError) as reason:  # the other parts' findings are kept
                found["problems"].append(f"{name}: {reason}")
        found["seconds"][name] = time.monotonic() - start
        keep(found)
    return found


def values(session: replay.Session, found: dict[str, Any], progress: Progress) -> None:
    for pattern in replay.PATTERNS:
        share = session.share_still_filled(pattern)
        if share < 0.99:
            found["problems"].append(f"of the pattern {pattern:#x} in threadgroup memory {share:.0%} reach a kernel")
    rows = []
    for case in session.reader.cases:
        if case.floor_bytes:
            continue
        compared, problems = ([], replay.unreported(session, case)) if case.is_wrong else replay.compare(session, case)
        rows += [asdict(row) for row in compared]
        found["problems"] += problems
        progress.step(case.name)
    found["values"] = rows


def times(session: replay.Session, found: dict[str, Any]) -> None:
    rate = session.gpu.copy_rate()
    found["copy_rate"] = rate
    found["times"] = [asdict(replay.timed(session, case, rate)) for case in session.reader.cases if case.floor_bytes]


def peers_beside(cubins: Path, found: dict[str, Any]) -> None:
    found["peers"], found["peer_versions"] = [], peers.versions()
    mlx_timers = (peers.mlx_times, peers_linear.linear_times, peers_experts.experts_times)
    mlx = [partial(times, cubins, ARCHITECTURE) for times in mlx_timers]
    asked: list[Callable[[], list[peers.PeerTime]]] = [*mlx, peers.fla_times]
    for ask in asked:
        try:
            found["peers"] += [asdict(row) for row in ask()]
        except peers.NotInstalled as reason:
            found["left_out"].append(str(reason))


def bank_conflicts(record: Path, cubins: Path, found: dict[str, Any]) -> None:
    try:
        found["conflicts"] = [asdict(row) for row in conflicts.measured(record, cubins)]
    except conflicts.NoCounters as reason:
        found["left_out"].append(str(reason))


def sanitizers(record: Path, cubins: Path, found: dict[str, Any], progress: Progress) -> None:
    """Each tool first has to find a planted fault. Parts of the cases run in parallel, because a tool works on the
    CPU."""
    found["sanitizers"] = []
    parts = max(1, (os.cpu_count() or 1) // len(sanitizer.TOOLS))

    def one(what: tuple[str, ...]) -> sanitizer.Verdict | str:
        try:
            return sanitizer.examine(what[0], record, cubins, *what[1:])
        except ValueError as reason:
            return str(reason)

    with ThreadPoolExecutor(parts * len(sanitizer.TOOLS)) as pool:
        planted = pool.map(one, [(tool, f"fault_of_{tool}") for tool in sanitizer.TOOLS])
        pieces = [pool.map(one, [(tool, str(part), str(parts)) for part in range(parts)]) for tool in sanitizer.TOOLS]
        for tool, fault, verdicts in zip(sanitizer.TOOLS, planted, pieces, strict=True):
            ended = [fault, *verdicts]
            found["problems"] += [each for each in ended if isinstance(each, str)]
            if isinstance(fault, sanitizer.Verdict) and fault.errors == 0:
                found["problems"].append(f"{tool} does not find the fault that is planted for it")
            own = [each for each in ended[1:] if isinstance(each, sanitizer.Verdict)]
            if len(own) < parts:
                continue
            verdict = sanitizer.merged(own)
            found["sanitizers"].append(asdict(verdict))
            found["problems"] += [f"{tool}: {place}" for place in verdict.places]
            if verdict.errors and not verdict.places:
                found["problems"].append(f"{tool}: {verdict.errors} errors")
            progress.step(tool)
