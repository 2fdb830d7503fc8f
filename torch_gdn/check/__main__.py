"""Checks torch_gdn on this machine's mps device, and reports everything that helps to mend it.

    python -m torch_gdn.check --json report.json                      on a Mac
    python -m mps_simulator -m torch_gdn.check --json report.json     on the simulated device, in a checkout on Linux

It compiles every kernel variant that models use with the device's own compiler. It compares every op, and so every
kernel, with float64, and in a checkout the delta rule with FLA's recorded outputs. It times decode and prefill beside
transformers' own PyTorch code, and compiles a layer with torch.compile. A step that fails, crashes or hangs is a line
of the report. Where PyTorch has no mps device the report describes the machine and nothing is checked.
Exit status: 0 if everything passed, 1 if something failed or there is no device.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tqdm import tqdm

from torch_gdn import _C
from torch_gdn._mps import why_no_mps
from torch_gdn.check import golden, plan
from torch_gdn.check.device import simulated_settings
from torch_gdn.check.report import Report
from torch_gdn.check.steps import COMPILE, FACTS, FAIL, LEFT_OUT, PASS, USE, Result, Step
from torch_gdn.check.worker import Setup, Worker


def pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression, got {text!r}: {error}") from error


def folder(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder, got {text!r}")
    return path.resolve()


def file_to_write(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, got {text!r}")
    return path


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m torch_gdn.check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--json", type=file_to_write, metavar="FILE", help="write the report there, for an issue")
    found.add_argument("--quick", action="store_true", help="Qwen3-Next's sizes in bfloat16, and three recorded cases")
    found.add_argument(
        "--only",
        type=pattern,
        action="append",
        metavar="PATTERN",
        help="only steps whose name has this regular expression in it, as 'compile', 'solve_tril' or 'recorded .* "
        "base_k128'; may be given more than once",
    )
    found.add_argument(
        "--golden",
        type=folder,
        metavar="DIR",
        default=golden.FOLDER,
        help="FLA's recorded outputs: tests/golden of a checkout, which is the default there. An installed package has "
        "none, and holds every stage against float64 alone",
    )
    found.add_argument(
        "--shaders",
        type=folder,
        metavar="DIR",
        default=Path(_C.shader_directory()),
        help="other shader sources than the package's own, to try a change",
    )
    return found


def chosen(steps: Iterable[Step], only: Sequence[re.Pattern[str]]) -> list[Step]:
    """Those whose names match, and always those that look at the device."""
    return [each for each in steps if each.section in (FACTS, USE) or any(some.search(each.name) for some in only)]


def obstacle(results: Sequence[Result], step: Step) -> str:
    """Why it makes no sense to try the step: there is no device, or it can only compile."""
    for result in results:
        needed = result.section == FACTS or (result.section == USE and step.section != COMPILE)
        if needed and result.status != PASS:
            return f"the device cannot be used: {result.message}"
    return ""


def run(steps: Sequence[Step], worker: Worker, results: list[Result]) -> None:
    """Fills in the results, with a progress bar."""
    failed = 0
    with tqdm(steps, desc="torch_gdn.check", unit="step", dynamic_ncols=True) as bar:
        for step in bar:
            bar.set_postfix_str(step.name[:60] if not failed else f"{failed} failed; {step.name[:50]}")
            reason = obstacle(results, step)
            results.append(step.result(LEFT_OUT, reason) if reason else worker.run(step))
            failed += results[-1].status == FAIL


def main(arguments: Sequence[str] | None = None) -> int:
    known = parser()
    options = known.parse_args(arguments)
    steps = plan.steps(options.golden, options.quick)
    if options.only:
        steps = chosen(steps, options.only)
        if all(step.section in (FACTS, USE) for step in steps):
            known.error("--only: no step has such a name")
    no_device = why_no_mps("-m torch_gdn.check")
    if no_device:
        steps = [step for step in steps if step.section == FACTS]
    shown: dict[str, Any] = {"quick": options.quick, "only": [each.pattern for each in options.only or []]}
    started, start = datetime.now(timezone.utc).isoformat(timespec="seconds"), time.perf_counter()
    report = Report(started, 0.0, shown, [])
    worker = Worker(Setup(str(options.shaders), simulated_settings()))
    try:
        run(steps, worker, report.results)
    except KeyboardInterrupt:
        report.interrupted = True
    finally:
        worker.close()
    report.seconds = time.perf_counter() - start
    print(f"{FAIL}: {no_device}" if no_device else report.text())
    if options.json is not None:
        options.json.write_text(report.json() + "\n")
        print(f"report: {options.json}")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
