"""Runs the steps of `python -m torch_gdn check`."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tqdm import tqdm

from torch_gdn import _C, command_line
from torch_gdn._mps import why_no_mps
from torch_gdn_check import compare, golden, plan
from torch_gdn_check.device import simulated_settings
from torch_gdn_check.report import Report
from torch_gdn_check.steps import COMPILE, FACTS, FAIL, PASS, PYTORCH, SKIPPED, USE, Result, Step
from torch_gdn_check.worker import Setup, Worker, Workers

ALWAYS = (FACTS, USE, PYTORCH)  # sections
COMPILERS = max(1, (os.cpu_count() or 1) // 2)  # processes


def chosen(steps: Iterable[Step], only: Sequence[re.Pattern[str]]) -> list[Step]:
    """Returns the steps whose names match, and always those that look at the device and at PyTorch itself."""
    if not only:
        return list(steps)
    return [each for each in steps if each.section in ALWAYS or any(some.search(each.name) for some in only)]


def obstacle(results: Sequence[Result], step: Step) -> str:
    """Returns why the step cannot run: there is no device, or it can only compile."""
    for result in results:
        needed = result.section == FACTS or (result.section == USE and step.section != COMPILE)
        if needed and result.status != PASS:
            return f"the device cannot be used: {result.message}"
    return ""


class Run:
    """Runs steps, fills in the report and saves it after each."""

    def __init__(self, report: Report, file: Path | None = None) -> None:
        self.report = report
        self._file = file
        self._start = time.perf_counter()
        self._kept = 0.0

    def one_by_one(self, steps: Sequence[Step], worker: Worker) -> None:
        with tqdm(steps, desc="torch_gdn check", unit="step", dynamic_ncols=True) as bar:
            for step in bar:
                self._show(bar, step.name)
                self._keep(running=step.name)
                reason = obstacle(self.report.results, step)
                self.report.results.append(step.result(SKIPPED, reason) if reason else worker.run(step))

    def side_by_side(self, steps: Sequence[Step], workers: Workers) -> None:
        """Runs steps in parallel. Saves the report once a second, because there are thousands of steps."""
        reasons = {step: obstacle(self.report.results, step) for step in steps}
        self.report.results += [step.result(SKIPPED, reason) for step, reason in reasons.items() if reason]
        left = [step for step in steps if not reasons[step]]
        with tqdm(workers.run(left), total=len(left), desc="compiling", unit="kernel", dynamic_ncols=True) as bar:
            for result in bar:
                self.report.results.append(result)
                self._show(bar, f"{result.group} {result.case}")
                if time.perf_counter() - self._kept > 1:
                    self._keep(running=COMPILE)

    def finish(self) -> None:
        self._keep(running="")

    def _show(self, bar: Any, name: str) -> None:
        failed = sum(result.status == FAIL for result in self.report.results)
        bar.set_postfix_str(name[:60] if not failed else f"{failed} failed; {name[:50]}")

    def _keep(self, running: str) -> None:
        self.report.running = running
        self._kept = time.perf_counter()
        self.report.seconds = self._kept - self._start
        if self._file is not None:
            self.report.write(self._file)


def compiling_steps(options: argparse.Namespace, no_device: str) -> list[Step]:
    """Lists the compiling steps, which takes a minute. Call it when everything else is done."""
    if options.quick or no_device:
        return []
    return [step for step in chosen(plan.compile_steps(), options.only) if step.section == COMPILE]


def check(options: argparse.Namespace, steps: Sequence[Step], no_device: str) -> Report:
    shown: dict[str, Any] = {"quick": options.quick, "only": [each.pattern for each in options.only]}
    report = Report(datetime.now(timezone.utc).isoformat(timespec="seconds"), 0.0, shown, [])
    run, setup = Run(report, options.json), Setup(str(options.shaders), simulated_settings())
    worker, workers = Worker(setup), Workers(setup, COMPILERS)
    try:
        run.one_by_one(steps, worker)
        worker.close()
        later = compiling_steps(options, no_device)
        if later:
            run.side_by_side(later, workers)
    except KeyboardInterrupt:
        report.interrupted = True
    finally:
        worker.close()
        workers.close()
    run.finish()
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    known = command_line.check()
    options = known.parse_args(arguments)
    options.golden = options.golden or golden.FOLDER
    options.shaders = options.shaders or Path(_C.shader_directory())
    if options.compare:
        try:
            print(compare.side_by_side(*options.compare))
        except ValueError as error:
            known.error(str(error))
        return 0
    no_device = why_no_mps("check")
    if no_device:
        steps = plan.about_the_device()[:1]
    else:
        steps = chosen(plan.steps(options.golden, options.quick), options.only)
        if all(step.section in ALWAYS for step in steps) and not compiling_steps(options, no_device):
            known.error("--only: no step has a name that matches")
    report = check(options, steps, no_device)
    print(f"{FAIL}: {no_device}" if no_device else report.text())
    please = " Please attach it to a torch_gdn issue, whatever the outcome." if sys.platform == "darwin" else ""
    print(f"report: {options.json}.{please}")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
