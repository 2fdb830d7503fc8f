"""Finds kernels that do not compile or compute wrong numbers on this machine, and replaces them.

When an op on `mps` first launches a kernel variant, the same call also runs on the CPU kernel, on copies of what it
touches, and the results are compared up to rounding. The verdict holds for this device, macOS build, torch and
torch_gdn, and is stored in a file next to the tuning cache. A kernel that failed is replaced, for the same call first:

    a prefill algorithm         by another one
    a recurrent op              by a prefill algorithm
    any other op                by torch_gdn's CPU kernel, on copies

One warning per process has the line to report, and `python -m torch_gdn info` lists what failed. The environment
variable TORCH_GDN_SELF_TEST says what is tested:

    auto    (default) what has no verdict on this machine yet
    again   everything; the verdicts are written anew
    off     nothing, and nothing is replaced

The op gdn_self_test::<op>, which takes the op's first calls, keeps other threads' first launches waiting, and waits for
the device twice.
"""

import os
import warnings
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
from threading import RLock
from typing import Any

import torch

from torch_gdn import _C
from torch_gdn._recorder import recording
from torch_gdn.self_test import verdicts
from torch_gdn.self_test.shadow import Call, Copies, copied_bytes
from torch_gdn.self_test.verdicts import Verdict, Verdicts

__all__ = ["VARIABLE", "install", "load", "mode", "on_cpu", "replaced"]
REPORT = "Please report this line with what `python -m torch_gdn check` writes"
VARIABLE = "TORCH_GDN_SELF_TEST"
MODES = ("auto", "again", "off")
# A call that touches more bytes is not tested; the next smaller call of the variants is. The copies and results of a
# call take about four times as much memory for a moment. It is a prompt of 4096 tokens in a layer of Qwen3-Next, which
# the CPU computes in about a second, or 32 states of it.
MOST_BYTES = 1 << 26
MOST_UNTESTED = 1000  # calls of an op that are not tested; a process then trusts their variants
LONGEST = 300  # characters of a problem
RULES = {"gated_delta_rule": False, "kda": True}  # whether each key channel has its own decay

on_cpu: set[str] = set()  # ops of which something failed that only the CPU's kernel replaces
replaced: dict[str, str] = {}  # by op, or op:algorithm: its problem, and what runs instead
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
    replace_failed()
    library()
    _C.set_self_test(True)


@cache
def library() -> torch.library.Library:
    """Returns the ops that the launcher calls instead of an op that would launch a variant without a verdict."""
    ops = torch.library.Library("gdn_self_test", "DEF")
    ops.define("define(str op) -> ()")
    ops.impl("define", define, "CompositeExplicitAutograd")
    return ops


def define(op: str) -> None:
    with _lock:
        if not hasattr(torch.ops.gdn_self_test, op):
            library().define(str(getattr(torch.ops.gdn, op).default._schema).removeprefix("gdn::"))
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
            _C.set_tested([name], not each.problem)
        replace_failed()
        return True


@torch.no_grad()
def run(op: str, *args: Any, **kwargs: Any) -> Any:
    overload = getattr(torch.ops.gdn, op).default
    call: Call = dict(zip((each.name for each in overload._schema.arguments), args, strict=False)) | kwargs
    with _lock:
        if mode() == "off":
            _C.set_self_test(False)
            return overload(**call)
        if load():
            return overload(**call)
        with _C.Trusted(), recording() as recorded:
            overload(**call)
        names = [f"{op} {each.name}" for each in recorded.variants]
        if any(_known[name].problem for name in names if name in _known):
            return run_instead(op, call)
        untested = [name for name in names if name not in _known]
        if untested and copied_bytes(call) <= MOST_BYTES:
            try:
                copies = Copies(overload, call)
                copies.run()
            except Exception:  # a wrong index, which the device reports later, or an op without a CPU kernel
                pass
            else:
                return tested(Verdict(op, algorithm_of(op, names)), untested, copies)
        if untested:
            _untested[op] = _untested.get(op, 0) + 1
            if _untested[op] > MOST_UNTESTED:
                _C.set_tested(untested, True)
        return trusted(op, call)


def algorithm_of(op: str, variants: list[str]) -> str | None:
    """Returns the prefill algorithm that has these kernels, also if an op decodes with it, or None for other ops."""
    if not op.removesuffix("_").endswith(tuple(RULES)):
        return None
    kernels = " ".join(variants)
    return "fused_chunk" if "fused_chunk" in kernels else "recurrent" if "fused_recurrent" in kernels else "chunked"


def trusted(op: str, call: Call) -> Any:
    with _C.Trusted():
        return getattr(torch.ops.gdn, op)(**call)


def tested(verdict: Verdict, names: list[str], copies: Copies) -> Any:
    """Runs the op's own kernels too. Returns their results, or if they are wrong, those of the CPU's kernel."""
    results, problem = None, None  # None leaves the variants without a verdict
    verdicts.change(_machine, dict.fromkeys(names, replace(verdict, running=os.getpid())))
    try:
        results = trusted(verdict.op, copies.original)
        problem = copies.problem(results)
    except RuntimeError as error:
        if "out of memory" in str(error):
            raise
        problem = " ".join(f"{type(error).__name__}: {error}".split())
    finally:  # interrupted, too
        if problem is not None:
            short = problem if len(problem) <= LONGEST else f"{problem[:LONGEST]}..."
            _known.update(dict.fromkeys(names, replace(verdict, problem=short)))
        verdicts.change(_machine, {name: _known.get(name) for name in names})
    if problem is not None:
        _C.set_tested(names, not problem)
    if problem:
        results = copies.write_back()
        replace_failed()
    return results


# ---- what failed -----------------------------------------------------------------------------------------------------


def replace_failed() -> None:
    """Replaces everything that failed, and nothing else. Warns, in one line, of what this process has not warned of."""
    excluded, its_on_cpu, reasons = plan(_known.values())
    for state in (on_cpu, replaced):
        state.clear()
    on_cpu.update(its_on_cpu)
    replaced.update(reasons)
    for rule, channel_decays in RULES.items():
        _C.exclude_prefill_algorithms(excluded[rule], channel_decays)
    news = " | ".join(f"{name}: {reason}" for name, reason in replaced.items() if name not in _warned)
    _warned.update(replaced)
    if news:
        warnings.warn(
            f"torch_gdn: the self-test found kernels that are wrong on {_machine}: {news}. {REPORT}", stacklevel=4
        )


def plan(known: Iterable[Verdict]) -> tuple[dict[str, list[str]], set[str], dict[str, str]]:
    """Returns the prefill algorithms that failed, by rule; the ops that run on the CPU; and what `replaced` says."""
    failed = sorted((each for each in known if each.problem), key=lambda each: each.op)  # prefills before decoding
    excluded, its_on_cpu, reasons = {}, set[str](), dict[str, str]()
    for rule in RULES:
        wrong: dict[str, str] = {}
        for each in failed:
            if each.algorithm and rule in each.op:
                problem = each.problem if each.op.startswith("chunk") else f"{each.op}: {each.problem}"
                wrong.setdefault(each.algorithm, problem)
        remaining = [each for each in _C.prefill_algorithms() if each not in wrong]
        instead = " or ".join(remaining) or "the CPU's kernel"
        excluded[rule] = sorted(wrong)
        reasons |= {f"chunk_{rule}:{name}": f"{x}; {instead} runs instead" for name, x in wrong.items()}
        its_on_cpu |= set() if remaining else {f"chunk_{rule}", f"chunk_{rule}_"}
    for each in failed:
        prefill = each.op.replace("fused_recurrent", "chunk") if each.algorithm else ""
        if each.op == prefill:
            continue
        is_replaced = prefill and prefill not in its_on_cpu
        instead = (
            "another prefill algorithm runs instead" if is_replaced else "the CPU's kernel runs instead, on copies"
        )
        reasons.setdefault(each.op, f"{each.problem}; {instead}")
        its_on_cpu |= set() if is_replaced else {each.op}
    return excluded, its_on_cpu, reasons


def run_instead(op: str, call: Call) -> Any:
    """Runs a call of an op whose kernel failed. Its algorithm is no longer chosen where there is another one."""
    if op.startswith("fused_recurrent") and op not in on_cpu:
        prefill = getattr(torch.ops.gdn, op.replace("fused_recurrent", "chunk")).default
        parameters = {each.name for each in prefill._schema.arguments}
        beta, others = call.get("beta"), [x for name, x in call.items() if name not in parameters]
        by_head = call.get("g") is not None and beta is not None and beta.dim() == 3
        if by_head and all(x is None for x in others):  # no channel gates, no speculative decoding
            results = prefill(**{name: x for name, x in call.items() if name in parameters})
            return results[0] if op.endswith("_") else results[:2]
    copies = Copies(getattr(torch.ops.gdn, op).default, call)
    copies.run()
    return copies.write_back()
