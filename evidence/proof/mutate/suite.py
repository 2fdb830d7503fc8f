"""Tries many faults with the whole suite, all of them planted at once, because one run of it takes most of an hour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from evidence.proof.mutate.faults import Fault
from evidence.proof.mutate.mutants import FOLDERS, tests_in
from evidence.proof.mutate.scratch import NotBuilt, Scratch
from evidence.proof.mutate.trial import CAUGHT, MISSED, NO_TESTS, Verdict, failed_tests, key_of, run_tests

SOME_FAILED = 1  # pytest's status
SECONDS = 7200  # for a folder of tests
DEVICE = "mps_simulator/tests"


def folders_of(tree: Path) -> list[str]:
    """Returns the folders of the tests that `make test` runs, those of the properties first."""
    result = {path.parent.relative_to(tree) for folder in FOLDERS for path in tests_in(tree / folder)}
    names = sorted(map(str, result))
    names.sort(key=lambda name: not name.endswith("properties"))
    return [*names, *([DEVICE] if (tree / DEVICE).exists() else [])]


@contextmanager
def planted_together(scratch: Scratch, faults: Sequence[Fault]) -> Iterator[None]:
    with ExitStack() as stack:
        for fault in faults:
            stack.enter_context(scratch.planted(fault))
        yield


def in_groups(scratch: Scratch, faults: Sequence[Fault]) -> Iterator[list[Fault]]:
    """Yields faults that can be planted together. Two faults of the same lines cannot."""
    left = list(faults)
    while left:
        group: list[Fault] = []
        for fault in left:
            with suppress(ValueError), planted_together(scratch, [*group, fault]):
                group.append(fault)
        left = [fault for fault in left if fault not in group]
        yield group


def failures(
    scratch: Scratch, tests: Sequence[str], faults: Sequence[Fault], *options: str
) -> tuple[dict[str, str], bool]:
    """Returns the tests that fail with these faults, and whether all tests have run."""
    with planted_together(scratch, faults):
        try:
            scratch.build()
        except NotBuilt:
            return {}, False
        finished = run_tests(scratch, tests, "ops", *options)
    has_passed = finished.status in (0, NO_TESTS)
    return ({} if has_passed else failed_tests(finished, tests)), has_passed or finished.status == SOME_FAILED


def caught_by_folder(scratch: Scratch, faults: Sequence[Fault], folder: str) -> Iterator[tuple[Fault, Verdict]]:
    """Runs the folder with all faults. A test that fails then runs without a fault, and with each fault alone."""
    left = list(faults)
    while left:
        failed, is_done = failures(scratch, [folder], left)
        always = failures(scratch, [*failed], [])[0] if failed else {}
        scratch.failing |= always.keys()
        suspected = [test for test in failed if test not in always]
        result = {}
        for fault in left if suspected else []:
            if alone := failures(scratch, suspected, [fault], "-x")[0]:
                test, reason = next(iter(alone.items()))
                result[fault] = Verdict(CAUGHT, test, reason, key=key_of(fault, scratch.tree), is_confirmed=True)
        yield from result.items()
        left = [fault for fault in left if fault not in result]
        if is_done:
            return
        if not result and not always:  # they do not build together, or end the process together
            for half in (left[::2], left[1::2]) if len(left) > 1 else ():
                yield from caught_by_folder(scratch, half, folder)
            return


def try_together(scratch: Scratch, faults: Sequence[Fault]) -> Iterator[tuple[Fault, Verdict]]:
    """Yields the verdict of each fault. A folder of tests runs with all faults that no folder before has caught."""
    scratch.seconds = SECONDS
    for group in in_groups(scratch, faults):
        left = list(group)
        for folder in folders_of(scratch.tree):
            caught = dict(caught_by_folder(scratch, left, folder))
            yield from caught.items()
            left = [fault for fault in left if fault not in caught]
        yield from ((fault, Verdict(MISSED, key=key_of(fault, scratch.tree))) for fault in left)
