"""Runs the cases that have no verdict on this machine yet, and replaces what failed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torch_gdn import _C
from torch_gdn._recorder import launching
from torch_gdn.self_test import verdicts
from torch_gdn.self_test.replace import REPORT, replace_failed, replaced, restore
from torch_gdn.self_test.verdicts import Verdict, Verdicts

if TYPE_CHECKING:
    from torch_gdn.self_test.cases import Case

VARIABLE = "TORCH_GDN_SELF_TEST"
MODES = ("auto", "again", "off")
# The check fails a kernel above its bound. If some GPU rounds somewhat worse, the check's report says so. An op is
# replaced only for errors that no rounding explains.
SLACK = 4.0
CHARACTERS = 2000  # this many characters of a problem are kept

_lock = Lock()
_known: dict[str, Verdicts] = {}  # by machine: what this process needs
_warned: set[str] = set()


class Untested(Exception):
    """The case could not run, and the kernel is not the reason."""


def mode() -> str:
    value = os.environ.get(VARIABLE, "auto")
    if value not in MODES:
        raise ValueError(f"{VARIABLE}: expected one of {', '.join(MODES)}, got {value!r}")
    return value


def ensure(needed: Callable[[], Iterable[Case]]) -> None:
    """Tests those of the cases that have no verdict on this machine, and replaces what failed.

    It costs nothing without an mps device, and then does not call `needed`.
    """
    wanted = mode()
    if wanted == "off" or not torch.backends.mps.is_available() or not _C.has_launcher():
        return
    with _lock:
        key = verdicts.machine()
        known = _known.setdefault(key, {})
        missing = [case for case in dict.fromkeys(needed()) if case.name not in known]
        if not missing:
            return
        stored = {} if wanted == "again" else verdicts.settled(key)
        known |= {case.name: stored[case.name] for case in missing if case.name in stored}
        for case in missing:
            if case.name in known and known[case.name].problem == verdicts.ENDED:
                store(key, case.name, known[case.name])  # another process may later have the number of this one
        missing = [case for case in missing if case.name not in known]
        try:
            if missing:
                test(key, missing, known)
        finally:
            failed = [each for each in known.values() if each.problem]
            if failed or replaced:
                replace_failed(failed, key)
        warn(key)


def test(key: str, missing: list[Case], known: Verdicts) -> None:
    from tqdm.auto import tqdm  # here, because importing it takes longer than importing torch_gdn

    untested: list[str] = []
    restore()  # otherwise a replaced kernel could not fail
    for case in tqdm(missing, desc="torch_gdn: testing the kernels, once on this machine", unit="case", disable=None):
        verdict = Verdict(case.op, case.point.algorithm)
        store(key, case.name, replace(verdict, running=os.getpid()))
        try:
            known[case.name] = replace(verdict, problem=problem_of(case)[:CHARACTERS])
        except Untested as reason:
            untested.append(f"{case.name}: {reason}")
            known[case.name] = verdict  # in this process
            store(key, case.name, None)
            continue
        except BaseException:  # interrupted
            store(key, case.name, None)
            raise
        store(key, case.name, known[case.name])
    if untested:
        number = f"{len(untested)} of {len(missing)} kernels"
        warnings.warn(f"torch_gdn: the self-test could not test {number}. {untested[0]}", stacklevel=4)


def store(key: str, name: str, verdict: Verdict | None) -> None:
    """Stores a verdict. Reads the file again first, since another process may have written it."""
    stored = verdicts.read(key)
    stored.pop(name, None)
    verdicts.write(key, stored if verdict is None else stored | {name: verdict})


@torch.no_grad()
def problem_of(case: Case) -> str:
    """Returns what is wrong with the op's results, or "" if they are right."""
    from torch_gdn_check.registry import REGISTRY  # here: torch_gdn_check.registry imports torch_gdn
    from torch_gdn_check.registry.bounds import worst
    from torch_gdn_check.registry.drawing import drawing
    from torch_gdn_check.registry.inputs import to_device

    entry, point, mps = REGISTRY[case.op], case.point, torch.device("mps")
    with ExitStack() as settings:
        settings.enter_context(launching())  # whatever the program records
        settings.enter_context(_disable_current_modes())  # whatever the program makes of operators
        settings.enter_context(torch.device("cpu"))  # whatever the program's default device
        settings.enter_context(drawing())  # whatever its default dtype
        try:
            call = entry.call(point)
            there = to_device(call, mps)
            torch.mps.synchronize()  # an earlier error is not this kernel's
        except Exception as error:
            raise Untested(f"{type(error).__name__}: {error}") from error
        try:
            found = {name: x.cpu() for name, x in entry.outputs(there, entry.run(there, point)).items()}
            torch.mps.synchronize()
        except (TypeError, ValueError):  # the op refuses such sizes, and no model passes them
            return ""
        except Exception as error:
            if "out of memory" in str(error):
                raise Untested(str(error)) from error
            return f"{type(error).__name__}: {error}"
        try:
            part = worst(entry.compared(point, call, found))
        except AssertionError as error:  # shapes differ
            return str(error)
        return "" if part.share <= SLACK else str(replace(part, bound=SLACK * part.bound))


def warn(key: str) -> None:
    """Warns, in one line, of everything that this process has not warned of yet."""
    news = {name: reason for name, reason in replaced.items() if name not in _warned}
    if not news:
        return
    _warned.update(news)
    listed = " | ".join(f"{name}: {reason}" for name, reason in news.items())
    warnings.warn(f"torch_gdn: the self-test found kernels that are wrong on {key}: {listed}. {REPORT}", stacklevel=4)
