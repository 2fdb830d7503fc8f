"""Tries one fault: plants it, builds, and runs the tests until one fails."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from evidence.proof.mutate import forks
from evidence.proof.mutate.faults import PROOF, Fault
from evidence.proof.mutate.scratch import Finished, Late, NotBuilt, Scratch

CAUGHT, MISSED, NOT_RUN = "caught", "MISSED", "not run"
SAMPLED = "a sample passed"  # the tests' other cases are still to run
BROKEN, FALSE, LATE = "does not build", "fails without it too", "took too long"
MOST_FAILING = 20  # tests that a run omits; if there are more, the machine fails
NO_TESTS = 5  # pytest's status
# A shader's fault shows only where the shader runs, and a CPU kernel's fault only on the CPU.
SELECTION = {"shaders": "not cpu", "metal": "not cpu", "ops": "", "cpu": "not mps", "python": ""}


@dataclass(frozen=True)
class Verdict:
    word: str
    test: str = ""  # the first that failed
    reason: str = ""  # its message
    seconds: float = 0.0
    key: str = ""  # hash of what it was found with
    is_confirmed: bool = False  # the test passes without the fault


def line_of(fault: Fault, verdict: Verdict) -> str:
    by = f" by {verdict.test}" if verdict.test else ""
    reason = "" if verdict.word in (CAUGHT, "") or not verdict.reason else f"\n    {verdict.reason}"
    return f"{verdict.word}: {fault.id}{by} ({verdict.seconds:.0f} s){reason}"


def key_of(fault: Fault, checkout: Path) -> str:
    """Returns a key that changes with the fault, the file that it breaks, and the tests that may find it."""
    digest = hashlib.sha256(json.dumps(asdict(fault)).encode())
    files = [fault.file, *(test.partition("::")[0] for test in fault.tests if not test.startswith(PROOF))]
    for name in files:
        for path in [*sorted((checkout / name).rglob("*.py")), checkout / name]:
            digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


def failed_tests(finished: Finished, tests: Sequence[str]) -> dict[str, str]:
    """Returns the tests that pytest's summary calls failed, with their messages. After a crash, returns the last test
    that was begun, or the first file of tests if none was.
    """
    output = finished.output
    begun = re.findall(
        r"^(\S+::.*?)(?: (?:PASSED|FAILED|ERROR|SKIPPED|Fatal Python error).*)?$", output, flags=re.MULTILINE
    )
    result = {}
    for line in re.findall(r"^(?:FAILED|ERROR) (\S+::.*)$", output, flags=re.MULTILINE):
        test = max((name for name in begun if line.startswith(name)), key=len, default=line)  # names may have spaces
        result[test] = line[len(test) :].removeprefix(" - ")
    why = (
        f"it took {forks.OF_A_TEST} s of processors"
        if finished.status == forks.ENDLESS
        else f"status {finished.status}"
    )
    return result or {begun[-1].strip() if begun else tests[0]: f"the tests did not end: {why}"}


def failed_test(finished: Finished, tests: Sequence[str]) -> tuple[str, str]:
    """Returns the first of them."""
    return next(iter(failed_tests(finished, tests).items()))


def run_tests(scratch: Scratch, tests: Sequence[str], part: str, *options: str, words: str = "") -> Finished:
    wanted = " and ".join(each for each in (SELECTION[part], f"({words})" if words else "") if each)
    selection = ["-k", wanted] if wanted else []
    selection += [f"--deselect={test}" for test in scratch.failing]
    return scratch.run("-m", "pytest", "-v", "--no-header", "--tb=line", "-rfE", "-p", "no:cacheprovider",
                       *options, *selection, *tests)  # fmt: skip


def try_fault(scratch: Scratch, fault: Fault) -> Verdict:
    start, key = time.monotonic(), key_of(fault, scratch.tree)
    try:
        verdict = first_catch(scratch, fault)
    except Late as late:  # on a busy machine every test may be late
        verdict = Verdict(LATE, reason=str(late)[-500:])
    return replace(verdict, seconds=round(time.monotonic() - start, 1), key=key)


def first_catch(scratch: Scratch, fault: Fault) -> Verdict:
    """Omits a test from then on if it fails without the fault too."""
    while True:
        with scratch.planted(fault):
            verdict = find(scratch, fault)
        if verdict.word != CAUGHT:
            return verdict
        if passes_without_a_fault(scratch, verdict.test):
            return replace(verdict, is_confirmed=True)
        if verdict.test in scratch.failing or len(scratch.failing) > MOST_FAILING:
            return replace(verdict, word=FALSE)
        scratch.failing.add(verdict.test)


def find(scratch: Scratch, fault: Fault) -> Verdict:
    """Runs every test, or, after a sample of their sweeps, the sweeps with every case."""
    try:
        scratch.build()
    except NotBuilt as error:
        return Verdict(BROKEN, reason=str(error)[-500:])
    is_first = scratch.sweeps != "all"
    tests = [test for test in fault.tests if not test.startswith(PROOF)]
    if tests:
        finished = run_tests(
            scratch, tests, fault.part, "-x", *(() if is_first else ("-m", "sweep")), words=fault.words
        )
        if finished.status not in (0, NO_TESTS):
            test, reason = failed_test(finished, tests)
            is_shader = fault.file.startswith("shaders/")  # if the host's code is broken, shaders may not compile
            is_broken = "BuildError" in reason or (is_shader and "Metal could not compile" in reason)
            return Verdict(BROKEN if is_broken else CAUGHT, test, reason)
        if finished.status == NO_TESTS and is_first and any(test.startswith(tuple(tests)) for test in scratch.failing):
            return Verdict(FALSE)
    for check in (test.removeprefix(PROOF) for test in fault.tests if is_first and test.startswith(PROOF)):
        finished = scratch.run("-m", "evidence.proof", "--only", check)
        wrong = re.search(rf"^{check}: WRONG: (.*)$", finished.output, flags=re.MULTILINE)
        if wrong:
            return Verdict(CAUGHT, PROOF + check, wrong.group(1))
    return Verdict(SAMPLED if is_first else MISSED)


def passes_without_a_fault(scratch: Scratch, test: str) -> bool:
    scratch.build_clean()
    if (test, scratch.sweeps) not in scratch.passing:
        is_check = test.startswith(PROOF)
        name = test.removeprefix(PROOF)
        finished = (
            scratch.run("-m", "evidence.proof", "--only", name) if is_check else run_tests(scratch, [name], "ops")
        )
        if finished.status == 0:
            scratch.passing.add((test, scratch.sweeps))
    return (test, scratch.sweeps) in scratch.passing


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
        if not verdict or verdict.word == LATE or (verdict.word == CAUGHT and not verdict.is_confirmed):
            return None
        return verdict if verdict.key == key_of(fault, self._checkout) else None

    def save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        entries = {name: asdict(verdict) for name, verdict in self.verdicts.items()}
        self._path.write_text(json.dumps(entries, indent=1) + "\n")
