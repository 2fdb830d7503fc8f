"""Says what runs in the place of kernels that failed the self-test, and runs it: see `torch_gdn.self_test`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_gdn import _C
from torch_gdn.self_test.copies import Call, on_the_cpu
from torch_gdn.self_test.verdicts import Verdict

RULES = {"gated_delta_rule": False, "kda": True}  # whether each key channel has its own decay
LONGEST = 300  # characters of a problem in a line

on_cpu: set[str] = set()  # ops of which something failed that only the CPU's kernel replaces
replaced: dict[str, str] = {}  # by op, or op:algorithm: its problem, and what runs instead


@dataclass
class Plan:
    """The replacements for everything that failed."""

    excluded: dict[str, list[str]] = field(default_factory=dict)  # by rule: prefill algorithms
    on_cpu: set[str] = field(default_factory=set)
    reasons: dict[str, str] = field(default_factory=dict)


def plan(failed: Iterable[Verdict]) -> Plan:
    problems: dict[str, dict[str, str]] = {}  # by op and algorithm, or "" without one
    for each in failed:
        problems.setdefault(each.op, {}).setdefault(each.algorithm or "", short(each.problem))
    result = Plan()
    for rule in RULES:
        prefills = [f"chunk_{rule}", f"chunk_{rule}_"]  # which have the same kernels
        wrong = problems.pop(prefills[0], {}) | problems.pop(prefills[1], {})
        recurrent = {
            op: problems[op][""] for op in (f"fused_recurrent_{rule}", f"fused_recurrent_{rule}_") if op in problems
        }
        for op, problem in recurrent.items():
            wrong.setdefault("recurrent", f"{op}: {problem}")
        left = [each for each in _C.prefill_algorithms() if each not in wrong]
        result.excluded[rule] = sorted(wrong)
        instead = " or ".join(left) or "the CPU's kernel"
        result.reasons |= {f"chunk_{rule}:{name}": f"{x}; {instead} runs instead" for name, x in wrong.items()}
        if left:
            result.reasons |= {op: f"{x}; another prefill algorithm runs instead" for op, x in recurrent.items()}
        else:
            result.on_cpu |= {*prefills}
    others = {op: problem[""] for op, problem in problems.items() if op not in result.reasons}
    result.on_cpu |= others.keys()
    result.reasons |= {op: f"{x}; the CPU's kernel runs instead, on copies" for op, x in others.items()}
    return result


def replace_failed(failed: Iterable[Verdict]) -> None:
    """Replaces everything in `failed`, and nothing else."""
    result = plan(failed)
    for rule, channel_decays in RULES.items():
        _C.exclude_prefill_algorithms(result.excluded[rule], channel_decays)
    for mine, theirs in ((on_cpu, result.on_cpu), (replaced, result.reasons)):
        mine.clear()
        mine.update(theirs)  # type: ignore[arg-type]


def run_instead(op: str, call: Call) -> Any:
    """Runs a call of an op whose kernel failed. Its algorithm is no longer chosen where there is another one."""
    overload = getattr(torch.ops.gdn, op).default
    if op.startswith("fused_recurrent") and op not in on_cpu:
        prefill = getattr(torch.ops.gdn, op.replace("fused_recurrent", "chunk")).default
        taken = {each.name for each in prefill._schema.arguments}
        beta, others = call.get("beta"), [x for name, x in call.items() if name not in taken]
        by_head = call.get("g") is not None and beta is not None and beta.dim() == 3
        if by_head and all(x is None for x in others):  # no channel gates, no speculative decoding
            results = prefill(**{name: x for name, x in call.items() if name in taken})
            return results[0] if op.endswith("_") else results[:2]
    return on_the_cpu(overload, call)


def short(problem: str) -> str:
    """Shortens a text to one line."""
    line = " ".join(problem.split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}..."
