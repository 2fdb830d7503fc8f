"""Puts something else in the place of what failed the self-test: see `torch_gdn.self_test`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from torch_gdn import _C
from torch_gdn.self_test.verdicts import Verdict

Call = dict[str, Any]
Run = Callable[[Call], Any]
MPS = torch._C.DispatchKey.MPS
REPORT = "Please report this line with what `python -m torch_gdn.check` writes"
RULES = {"gated_delta_rule": False, "kda": True}  # by the end of their ops' names: whether key channels have decays
LONGEST = 300  # characters of a problem in a line

erring: set[str] = set()  # ops that raise, since nothing can take their place
replaced: dict[str, str] = {}  # by op, or op:algorithm: what is wrong with it, and what runs instead
_libraries: dict[str, torch.library.Library] = {}  # by op; an implementation lives as long as its library


def replace_failed(failed: Iterable[Verdict], machine: str) -> None:
    """From now on nothing that failed is run; what was replaced before and has not failed is back."""
    restore()
    problems: dict[str, dict[str, str]] = {}  # by op and algorithm, "" where the op has none
    for each in failed:
        problems.setdefault(each.op, {}).setdefault(each.algorithm or "", short(each.problem))
    for ending, channel_decays in RULES.items():
        of_both = {suffix: problems.pop(f"chunk_{ending}{suffix}", {}) for suffix in ("", "_")}
        wrong = of_both[""] | of_both["_"]  # the kernels are the same
        decoding = {
            op: problems.pop(op) for op in (f"fused_recurrent_{ending}{x}" for x in ("", "_")) if op in problems
        }
        for op, problem in decoding.items():
            wrong.setdefault("recurrent", f"{op}: {problem['']}")
        exclude_algorithms(ending, channel_decays, wrong, machine)
        for op, problem in decoding.items():
            other = prefill_for(op) if len(wrong) < len(_C.prefill_algorithms()) else None
            put_in_place(op, problem[""], machine, other)
    for op, problem in problems.items():
        put_in_place(op, problem[""], machine)


def restore() -> None:
    """Every op runs its own kernel again."""
    for library in _libraries.values():
        library._destroy()
    _libraries.clear()
    erring.clear()
    replaced.clear()
    for channel_decays in RULES.values():
        _C.exclude_prefill_algorithms([], channel_decays)


def exclude_algorithms(ending: str, channel_decays: bool, wrong: dict[str, str], machine: str) -> None:
    _C.exclude_prefill_algorithms(sorted(wrong), channel_decays)
    left = [each for each in _C.prefill_algorithms() if each not in wrong]
    for algorithm, problem in wrong.items():
        replaced[f"chunk_{ending}:{algorithm}"] = f"{problem}; {' and '.join(left) or 'none'} left to run instead"
    for op in (f"chunk_{ending}", f"chunk_{ending}_"):
        if not left:
            put_in_place(op, next(iter(wrong.values())), machine)
        elif "chunked" in wrong:  # which alone has states between chunks
            put_in_place(op, wrong["chunked"], machine, without_intermediate_states(op), listed=False)


def put_in_place(
    op: str, problem: str, machine: str, other: Callable[[Call], Run | None] | None = None, listed: bool = True
) -> None:
    """other: What takes a call instead, if something does. Else a call runs on the CPU, or is an error."""
    overload = getattr(torch.ops.gdn, op).default
    writes = overload._schema.is_mutable

    def implementation(*args: Any, **kwargs: Any) -> Any:
        call = named(overload, args, kwargs)
        if other is not None and (run := other(call)) is not None:
            return run(call)
        if writes:
            raise RuntimeError(
                f"{op}: the self-test found this kernel wrong on {machine}: {problem}. Nothing can take its place, "
                f"because it writes its arguments. {REPORT}. TORCH_GDN_SELF_TEST=off runs the kernel all the same"
            )
        return on_the_cpu(overload, call)

    library = torch.library.Library("gdn", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is overridden
        library.impl(op, implementation, "MPS", allow_override=True)
    _libraries[op] = library
    if writes and other is None:
        erring.add(op)
    if listed:
        otherwise = "an error takes its place" if writes else "the CPU's kernel runs instead, on copies"
        replaced[op] = f"{problem}; " + (otherwise if other is None else "a prefill algorithm runs instead")


def named(overload: Any, args: Any, kwargs: Call) -> Call:
    """The arguments of a call by name, without those left at their defaults by position."""
    names = [each.name for each in overload._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def on_the_cpu(overload: Any, call: Call) -> Any:
    """The op's CPU kernel on copies of the arguments; what it returns is on their device."""
    device = next(x.device for x in call.values() if isinstance(x, Tensor) and x.device.type != "cpu")
    results = overload(**{name: x.cpu() if isinstance(x, Tensor) else x for name, x in call.items()})
    return tree_map_only(Tensor, lambda x: x.to(device), results)


def without_intermediate_states(op: str) -> Callable[[Call], Run | None]:
    """The op's own kernels, unless the call wants the states between chunks."""
    kernel = torch.library.get_kernel(f"gdn::{op}", "MPS")
    keys = torch._C.DispatchKeySet(MPS)
    return lambda call: None if call.get("return_intermediate_states") else lambda own: kernel.call_boxed(keys, **own)


def prefill_for(op: str) -> Callable[[Call], Run | None]:
    """The prefill of the same rule, for the calls that it takes."""
    overload = getattr(torch.ops.gdn, op.replace("fused_recurrent", "chunk")).default
    taken = {each.name for each in overload._schema.arguments}
    in_place = op.endswith("_")

    def run(call: Call) -> Any:
        results = overload(**{name: x for name, x in call.items() if name in taken})
        return results[0] if in_place else results[:2]

    def choose(call: Call) -> Run | None:
        others = [x for name, x in call.items() if name not in taken]  # gates of channels, a speculative decoding's
        g, beta = call.get("g"), call.get("beta")
        by_head = g is not None and beta is not None and beta.dim() == 3
        return run if by_head and all(x is None for x in others) else None

    return choose


def short(problem: str) -> str:
    """In one line."""
    line = " ".join(problem.split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}..."
