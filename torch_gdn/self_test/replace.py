"""Replaces what failed the self-test: see `torch_gdn.self_test`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from torch_gdn import _C
from torch_gdn.self_test.copies import Call, on_the_cpu
from torch_gdn.self_test.verdicts import Verdict

Run = Callable[[Call], Any]
MPS = torch._C.DispatchKey.MPS
REPORT = "Please report this line with what `python -m torch_gdn check` writes"
RULES = {"gated_delta_rule": False, "kda": True}  # whether each key channel has its own decay
LONGEST = 300  # characters of a problem in a line

on_cpu: set[str] = set()  # ops that have no other replacement than the CPU's kernel
replaced: dict[str, str] = {}  # by op, or op:algorithm: its problem, and what runs instead
_libraries: dict[str, torch.library.Library] = {}  # by op; an implementation lives as long as its library


@dataclass(frozen=True)
class Replacement:
    """The replacement of an op: `other`, if it takes the call, or else the CPU's kernel."""

    op: str
    problem: str
    other: Callable[[Call], Run | None] | None = None

    @property
    def instead(self) -> str:
        if self.other is not None:
            return "another prefill algorithm runs instead"
        return "the CPU's kernel runs instead, on copies"


@dataclass
class Plan:
    """The replacements for everything that failed."""

    excluded: dict[str, list[str]] = field(default_factory=dict)  # by rule: prefill algorithms
    ops: list[Replacement] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)  # by op, or op:algorithm: what is wrong, what runs instead

    def replace(self, *replacements: Replacement) -> None:
        self.ops += replacements
        self.reasons |= {each.op: f"{each.problem}; {each.instead}" for each in replacements}

    def exclude(self, rule: str, wrong: dict[str, str]) -> None:
        """Excludes prefill algorithms of a rule. `wrong` has the problem of each one that failed."""
        self.excluded[rule] = sorted(wrong)
        left = [each for each in _C.prefill_algorithms() if each not in wrong]
        instead = f"{' or '.join(left)} runs instead" if left else "no algorithm is left"
        self.reasons |= {f"chunk_{rule}:{name}": f"{problem}; {instead}" for name, problem in wrong.items()}
        for op in (f"chunk_{rule}", f"chunk_{rule}_"):
            if wrong and not left:
                self.replace(Replacement(op, next(iter(wrong.values()))))
            elif "chunked" in wrong:  # only chunked returns states between chunks
                self.ops.append(Replacement(op, wrong["chunked"], without_intermediate_states(op)))


def plan(failed: Iterable[Verdict]) -> Plan:
    problems: dict[str, dict[str, str]] = {}  # by op and algorithm, or "" without one
    for each in failed:
        problems.setdefault(each.op, {}).setdefault(each.algorithm or "", short(each.problem))
    found = Plan()
    for rule in RULES:
        wrong = problems.pop(f"chunk_{rule}", {}) | problems.pop(f"chunk_{rule}_", {})  # they have the same kernels
        recurrent = [op for op in (f"fused_recurrent_{rule}", f"fused_recurrent_{rule}_") if op in problems]
        for op in recurrent:
            wrong.setdefault("recurrent", f"{op}: {problems[op]['']}")
        found.exclude(rule, wrong)
        other = prefill_for if len(wrong) < len(_C.prefill_algorithms()) else lambda op: None
        found.replace(*(Replacement(op, problems.pop(op)[""], other(op)) for op in recurrent))
    found.replace(*(Replacement(op, problem[""]) for op, problem in problems.items()))
    return found


def replace_failed(failed: Iterable[Verdict]) -> None:
    """Replaces everything in `failed`, and puts back what was replaced before and is not in it."""
    restore()
    found = plan(failed)
    for rule, channel_decays in RULES.items():
        _C.exclude_prefill_algorithms(found.excluded[rule], channel_decays)
    for each in found.ops:
        install(each)
    replaced.update(found.reasons)


def restore() -> None:
    """Lets every op run its own kernel again."""
    for library in _libraries.values():
        library._destroy()
    _libraries.clear()
    on_cpu.clear()
    replaced.clear()
    for channel_decays in RULES.values():
        _C.exclude_prefill_algorithms([], channel_decays)


def install(replacement: Replacement) -> None:
    op, other = replacement.op, replacement.other
    overload = overload_of(op)
    kernel_of(op)  # before it is overridden

    def implementation(*args: Any, **kwargs: Any) -> Any:
        call = named(overload, args, kwargs)
        if other is not None and (run := other(call)) is not None:
            return run(call)
        return on_the_cpu(overload, call)

    library = torch.library.Library("gdn", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the overridden kernel
        library.impl(op, implementation, "MPS", allow_override=True)
    _libraries[op] = library
    if other is None:
        on_cpu.add(op)


def overload_of(op: str) -> Any:
    return getattr(torch.ops.gdn, op).default


@cache
def kernel_of(op: str) -> Any:
    return torch.library.get_kernel(f"gdn::{op}", "MPS")


def own_kernel(op: str) -> Run:
    """Returns the op itself, even if it is replaced."""
    if op not in _libraries:
        return lambda call: overload_of(op)(**call)
    return lambda call: kernel_of(op).call_boxed(torch._C.DispatchKeySet(MPS), **call)


def named(overload: Any, args: Any, kwargs: Call) -> Call:
    """Returns the arguments of a call by name, without those left at their defaults by position."""
    names = [each.name for each in overload._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def without_intermediate_states(op: str) -> Callable[[Call], Run | None]:
    """Takes calls that do not request the states between chunks, for the op's own kernels."""
    return lambda call: None if call.get("return_intermediate_states") else own_kernel(op)


def prefill_for(op: str) -> Callable[[Call], Run | None]:
    """Returns the prefill op of the same rule, for the calls that it can take."""
    overload = overload_of(op.replace("fused_recurrent", "chunk"))
    taken = {each.name for each in overload._schema.arguments}
    in_place = op.endswith("_")

    def run(call: Call) -> Any:
        results = overload(**{name: x for name, x in call.items() if name in taken})
        return results[0] if in_place else results[:2]

    def choose(call: Call) -> Run | None:
        others = [x for name, x in call.items() if name not in taken]  # channel gates, speculative decoding
        g, beta = call.get("g"), call.get("beta")
        by_head = g is not None and beta is not None and beta.dim() == 3
        return run if by_head and all(x is None for x in others) else None

    return choose


def short(problem: str) -> str:
    """Shortens a text to one line."""
    line = " ".join(problem.split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}..."
