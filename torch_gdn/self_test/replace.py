"""Says what runs in the place of kernels that failed the self-test, and runs it: see `torch_gdn.self_test`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from torch_gdn import _C
from torch_gdn.self_test.shadow import Call, Copies
from torch_gdn.self_test.verdicts import Verdict

RULES = {"gated_delta_rule": False, "kda": True}  # whether each key channel has its own decay

on_cpu: set[str] = set()  # ops of which something failed that only the CPU's kernel replaces
replaced: dict[str, str] = {}  # by op, or op:algorithm: its problem, and what runs instead


class Plan(NamedTuple):
    """The replacements for everything that failed."""

    excluded: dict[str, list[str]]  # by rule: prefill algorithms
    on_cpu: set[str]
    reasons: dict[str, str]


def plan(failed: Iterable[Verdict]) -> Plan:
    problems: dict[str, dict[str, str]] = {}  # by op and algorithm, or "" without one
    for each in failed:
        problems.setdefault(each.op, {}).setdefault(each.algorithm or "", each.problem)
    result = Plan({}, set(), {})
    for rule in RULES:
        prefills = [f"chunk_{rule}", f"chunk_{rule}_"]  # which have the same kernels
        wrong = problems.pop(prefills[0], {}) | problems.pop(prefills[1], {})
        decodes = [op for op in (f"fused_recurrent_{rule}", f"fused_recurrent_{rule}_") if op in problems]
        for op in decodes:
            wrong.setdefault("recurrent", f"{op}: {problems[op]['']}")
        remaining = [each for each in _C.prefill_algorithms() if each not in wrong]
        result.excluded[rule] = sorted(wrong)
        instead = " or ".join(remaining) or "the CPU's kernel"
        result.reasons.update({f"chunk_{rule}:{name}": f"{x}; {instead} runs instead" for name, x in wrong.items()})
        if not remaining:
            result.on_cpu.update(prefills)
        for op in decodes if remaining else ():
            result.reasons[op] = f"{problems.pop(op)['']}; another prefill algorithm runs instead"
    result.on_cpu.update(problems)
    result.reasons.update({op: f"{x['']}; the CPU's kernel runs instead, on copies" for op, x in problems.items()})
    return result


def replace_failed(failed: Iterable[Verdict]) -> None:
    """Replaces everything in `failed`, and nothing else."""
    result = plan(failed)
    for rule, channel_decays in RULES.items():
        _C.exclude_prefill_algorithms(result.excluded[rule], channel_decays)
    on_cpu.clear()
    on_cpu.update(result.on_cpu)
    replaced.clear()
    replaced.update(result.reasons)


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
