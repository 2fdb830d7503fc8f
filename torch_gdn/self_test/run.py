"""Runs the first call of each kernel variant on the CPU as well, and compares the results.

The launcher asks before an op launches a variant for the first time. The op gdn_self_test::<op>, which runs in the
place of the op's kernel then, keeps other threads' first launches waiting, and waits for the device twice.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from torch_gdn import _C
from torch_gdn._recorder import recording
from torch_gdn.self_test import compare, verdicts
from torch_gdn.self_test.copies import Call, Copies, Named, copied_bytes
from torch_gdn.self_test.replace import replace_failed, replaced, run_instead, short
from torch_gdn.self_test.verdicts import Verdict, Verdicts

REPORT = "Please report this line with what `python -m torch_gdn check` writes"
VARIABLE = "TORCH_GDN_SELF_TEST"
MODES = ("auto", "again", "off")
# A call that touches more bytes is not tested; the next smaller call of the variants is. The copies and results of a
# call take about four times as much memory for a moment. It is a prompt of 4096 tokens in a layer of Qwen3-Next, which
# the CPU computes in about a second, or 32 states of it.
MOST_BYTES = 1 << 26
MOST_UNTESTED = 1000  # calls of an op that are not tested; a process then trusts their variants

_lock = RLock()
_known: Verdicts = {}  # what this process has tested or read
_machine = ""  # once the verdicts were read
_untested: dict[str, int] = {}  # by op: calls
_warned: set[str] = set()


def mode() -> str:
    value = os.environ.get(VARIABLE, "auto")
    if value not in MODES:
        raise ValueError(f"{VARIABLE}: expected one of {', '.join(MODES)}, got {value!r}")
    return value


def install() -> None:
    """Forgets everything, and tests what is launched from now on."""
    global _machine
    _machine = ""
    for each in (_known, _untested, _warned):
        each.clear()
    replace_failed(())
    _C.clear_tested()
    _C.set_self_test(asked)


def asked(op: str) -> bool:
    """The launcher asks before an op launches a variant that has no verdict. Returns whether to test the call."""
    if mode() == "off":
        _C.set_self_test(None)
        return False
    define(op)
    return True


@cache
def library() -> torch.library.Library:
    return torch.library.Library("gdn_self_test", "DEF")


@cache
def define(op: str) -> None:
    schema = str(getattr(torch.ops.gdn, op).default._schema)
    library().define(schema.replace("gdn::", "", 1))
    library().impl(op, partial(run, op), "CompositeExplicitAutograd")


def load() -> bool:
    """Reads this machine's verdicts, once, and replaces what failed. Returns whether it did."""
    global _machine
    with _lock:
        if _machine or mode() == "off" or not torch.backends.mps.is_available() or not _C.has_launcher():
            return False
        _machine = verdicts.machine()
        if mode() == "auto":
            _known.update(verdicts.settled(_machine))
        for name, each in _known.items():
            op, variant = name.split(" ")
            _C.set_tested(op, [variant], not each.problem)
        replace_and_warn()
        return True


@torch.no_grad()
def run(op: str, *args: Any, **kwargs: Any) -> Any:
    overload = getattr(torch.ops.gdn, op).default
    call: Call = dict(zip((each.name for each in overload._schema.arguments), args, strict=False)) | kwargs
    with _lock:
        if load():
            return overload(**call)
        with trusting(), recording() as recorded:
            overload(**call)
        variants = [each.name for each in recorded.variants]
        known = [_known[f"{op} {each}"] for each in variants if f"{op} {each}" in _known]
        if any(each.problem for each in known):
            return run_instead(op, call)
        if len(known) == len(variants):  # another thread has tested them
            return trusted(op, call)
        if copied_bytes(call) <= MOST_BYTES:
            copies = Copies(overload, call)
            try:
                expected = copies.run()
            except Exception:  # a wrong index, which the device reports later, or an op without a CPU kernel
                return untested(op, variants, call)
            return tested(op, variants, copies, expected)
        return untested(op, variants, call)


@contextmanager
def trusting() -> Iterator[None]:
    """Lets this thread launch anything."""
    trust = _C.Trusted()
    trust.start()
    try:
        yield
    finally:
        trust.stop()


def trusted(op: str, call: Call) -> Any:
    with trusting():
        return getattr(torch.ops.gdn, op)(**call)


def untested(op: str, variants: list[str], call: Call) -> Any:
    _untested[op] = _untested.get(op, 0) + 1
    if _untested[op] > MOST_UNTESTED:
        _C.set_tested(op, variants, True)
    return trusted(op, call)


def tested(op: str, variants: list[str], copies: Copies, expected: Any) -> Any:
    """Runs the op's own kernels too. Returns their results, or if they are wrong, those of the CPU's kernel."""
    names = [name for each in variants if (name := f"{op} {each}") not in _known]
    verdict = Verdict(op, verdicts.algorithm_of(op, variants))
    store(names, replace(verdict, running=os.getpid()))
    try:
        results, problem = run_and_compare(op, copies, expected)
    except BaseException:  # interrupted, or no memory
        store(names, None)
        raise
    if problem is None:
        store(names, None)
        return results
    verdict = replace(verdict, problem=short(problem))
    store(names, verdict)
    _known.update(dict.fromkeys(names, verdict))
    _C.set_tested(op, [name.removeprefix(f"{op} ") for name in names], not problem)
    if not problem:
        return results
    results = copies.write_back(expected)
    replace_and_warn()
    return results


def run_and_compare(op: str, copies: Copies, expected: Any) -> tuple[Any, str | None]:
    """Returns the results and what is wrong with them: "" if nothing is, None if the CPU's cannot tell."""
    try:
        results = trusted(op, copies.original)
        result, written = outputs(op, results, cpu=True), copies.now()
    except RuntimeError as error:
        if "out of memory" in str(error):
            raise
        return None, f"{type(error).__name__}: {error}"
    pairs: list[tuple[str, Tensor, Tensor, Tensor | None]]
    pairs = [(name, result[name], x, None) for name, x in outputs(op, expected).items()]
    pairs += [(name, x, copies.call[name], copies.written[name]) for name, x in written.items()]
    try:
        return results, next(filter(None, (compare.problem_of(*each) for each in pairs if each[1].numel())), "")
    except compare.NotComparable:
        return results, None


def outputs(op: str, results: Any, cpu: bool = False) -> Named:
    """Returns an op's results by name."""
    returns = getattr(torch.ops.gdn, op).default._schema.returns
    tensors = results if isinstance(results, tuple | list) else [results] if returns else []
    names = [each.name or "result" for each in returns]
    return {name: x.cpu() if cpu else x for name, x in zip(names, tensors, strict=True)}


def store(names: list[str], verdict: Verdict | None) -> None:
    """Stores a verdict. Reads the file again first, since another process may have written it."""
    stored = {name: each for name, each in verdicts.read(_machine).items() if name not in names}
    verdicts.write(_machine, stored if verdict is None else stored | dict.fromkeys(names, verdict))


def replace_and_warn() -> None:
    """Replaces what failed. Warns, in one line, of everything that this process has not warned of yet."""
    replace_failed([each for each in _known.values() if each.problem])
    news = {name: reason for name, reason in replaced.items() if name not in _warned}
    if news:
        _warned.update(news)
        listed = " | ".join(f"{name}: {reason}" for name, reason in news.items())
        warnings.warn(
            f"torch_gdn: the self-test found kernels that are wrong on {_machine}: {listed}. {REPORT}", stacklevel=4
        )
