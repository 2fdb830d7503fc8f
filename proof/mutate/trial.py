"""One fault on trial: planted, built, and the tests run until one fails."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from proof.mutate.faults import Fault
from proof.mutate.scratch import Finished, Late, NotBuilt, Scratch

CAUGHT, MISSED, NOT_RUN = "caught", "MISSED", "not run"
BROKEN, FALSE, LATE = "does not build", "fails without it too", "took too long"
PROOF = "proof "  # before the name of a check, in a fault's list of tests
# A fault of a shader shows where the shader runs, and one of a CPU kernel on the CPU.
SELECTION = {"shaders": "not cpu", "metal": "not cpu", "ops": "", "cpu": "not mps", "python": ""}


@dataclass(frozen=True)
class Verdict:
    word: str
    test: str = ""  # the first that failed
    reason: str = ""  # its message
    seconds: float = 0.0
    key: str = ""  # of what it was found with
    is_confirmed: bool = False  # the test passes without the fault


def line_of(fault: Fault, verdict: Verdict) -> str:
    by = f" by {verdict.test}" if verdict.test else ""
    reason = "" if verdict.word in (CAUGHT, "") or not verdict.reason else f"\n    {verdict.reason}"
    return f"{verdict.word}: {fault.id}{by} ({verdict.seconds:.0f} s){reason}"


def key_of(fault: Fault, checkout: Path) -> str:
    """Changes with the fault, the file that it breaks, and the tests that may find it."""
    digest = hashlib.sha256(json.dumps(asdict(fault)).encode())
    files = [fault.file, *(test.partition("::")[0] for test in fault.tests if not test.startswith(PROOF))]
    for name in files:
        for path in [*sorted((checkout / name).rglob("*.py")), checkout / name]:
            digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


def failed_test(finished: Finished) -> tuple[str, str]:
    """The first test that pytest's summary calls failed, with its message; of a crash the last that was begun."""
    output = finished.output
    summary = re.search(r"^(?:FAILED|ERROR) (\S+::.*)$", output, flags=re.MULTILINE)
    begun = re.findall(r"^(\S+::.*?)(?: (?:PASSED|FAILED|ERROR|SKIPPED).*)?$", output, flags=re.MULTILINE)
    if summary:
        line = summary.group(1)
        test = max((name for name in begun if line.startswith(name)), key=len, default=line)  # names may have spaces
        return test, line[len(test) :].removeprefix(" - ")
    return (begun[-1].strip() if begun else ""), f"the tests did not end: status {finished.status}"


def run_tests(scratch: Scratch, tests: Sequence[str], part: str, *options: str, words: str = "") -> Finished:
    wanted = " and ".join(each for each in (SELECTION[part], f"({words})" if words else "") if each)
    selection = ["-k", wanted] if wanted else []
    return scratch.run("-m", "pytest", "-v", "--no-header", "--tb=line", "-rfE", "-p", "no:cacheprovider",
                       *options, *selection, *tests)  # fmt: skip


def try_fault(scratch: Scratch, fault: Fault) -> Verdict:
    start, key = time.monotonic(), key_of(fault, scratch.tree)
    with scratch.planted(fault):
        try:
            verdict = find(scratch, fault)
        except Late as late:  # on a busy machine every test does: no catch
            verdict = Verdict(LATE, reason=str(late)[-500:])
    return replace(verdict, seconds=round(time.monotonic() - start, 1), key=key)


def find(scratch: Scratch, fault: Fault) -> Verdict:
    try:
        scratch.build()
    except NotBuilt as error:
        return Verdict(BROKEN, reason=str(error)[-500:])
    tests = [test for test in fault.tests if not test.startswith(PROOF)]
    if tests:
        finished = run_tests(scratch, tests, fault.part, "-x", words=fault.words)
        if finished.status == 5:
            raise ValueError(f"{fault.id}: pytest found no test among {tests}")
        if finished.status != 0:
            test, reason = failed_test(finished)
            is_shader = fault.file.startswith("shaders/")  # the host's may be that no shader compiles
            is_broken = "BuildError" in reason or (is_shader and "Metal could not compile" in reason)
            return Verdict(BROKEN if is_broken else CAUGHT, test, reason)
    for check in (test.removeprefix(PROOF) for test in fault.tests if test.startswith(PROOF)):
        finished = scratch.run("-m", "proof", "--only", check)
        wrong = re.search(rf"^{check}: WRONG: (.*)$", finished.output, flags=re.MULTILINE)
        if wrong:
            return Verdict(CAUGHT, PROOF + check, wrong.group(1))
    return Verdict(MISSED)


def confirm(scratches: Sequence[Scratch], verdicts: dict[str, Verdict]) -> None:
    """Runs the tests that found a fault once more, without any: one that still fails found nothing."""
    for scratch in scratches:
        scratch.build_clean()
    open_ones = {name: verdict for name, verdict in verdicts.items() if verdict.word == CAUGHT}
    open_ones = {name: verdict for name, verdict in open_ones.items() if not verdict.is_confirmed}
    tests = sorted({verdict.test for verdict in open_ones.values() if not verdict.test.startswith(PROOF)})
    with ThreadPoolExecutor(len(scratches)) as pool:
        shares = [tests[job :: len(scratches)] for job in range(len(scratches))]
        runs = list(pool.map(without_fault, scratches, shares))
    passed = {name for run in runs for name in re.findall(r"^(\S+::.*?) PASSED", run.output, flags=re.MULTILINE)}
    has_ended = all(run.has_ended for run in runs)
    for check in {verdict.test for verdict in open_ones.values() if verdict.test.startswith(PROOF)}:
        if scratches[0].run("-m", "proof", "--only", check.removeprefix(PROOF)).status == 0:
            passed.add(check)
    for name, verdict in open_ones.items():
        holds = verdict.test in passed
        if holds or has_ended:
            verdicts[name] = replace(verdict, word=CAUGHT if holds else FALSE, is_confirmed=holds)


@dataclass(frozen=True)
class CleanRun:
    output: str
    has_ended: bool


def without_fault(scratch: Scratch, tests: Sequence[str]) -> CleanRun:
    try:
        return CleanRun(run_tests(scratch, tests, "ops").output if tests else "", True)
    except Late as late:
        return CleanRun(str(late), False)


class State:
    """Verdicts in a file."""

    def __init__(self, path: Path, checkout: Path) -> None:
        self._path, self._checkout = path, checkout
        self.verdicts: dict[str, Verdict] = {}
        if path.exists():
            self.verdicts = {name: Verdict(**entry) for name, entry in json.loads(path.read_text()).items()}

    def of(self, fault: Fault) -> Verdict | None:
        """Returns None if there is no verdict, or if the fault, its file or its tests changed since."""
        verdict = self.verdicts.get(fault.id)
        is_fresh = verdict and verdict.word != LATE and verdict.key == key_of(fault, self._checkout)
        return verdict if is_fresh else None

    def save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        entries = {name: asdict(verdict) for name, verdict in self.verdicts.items()}
        self._path.write_text(json.dumps(entries, indent=1) + "\n")
