"""Decides how a hostile call ends on a device, and whether two endings agree."""

from __future__ import annotations

import contextlib
import re
import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.hostile.changes import Hostile, base_call
from torch_gdn import reference
from torch_gdn_check.registry import REGISTRY

# PyTorch's own words when it refuses arguments before it calls an op.
REFUSED_BY_PYTORCH = r"(argument|Argument)s? '?{name}'?|Overflow when unpacking long|There were no tensor arguments"


# On the device the other tensors are elsewhere, so these changes make another call than on the CPU.
ELSEWHERE = ("on the CPU", "on meta")

# These arguments name the slots that their ops write to.
STORES = {
    ("aura_encode_", "slots"),
    ("aura_paged_tile_means_", "block_table"),
    ("qk_norm_rope_and_cache_", "slot_mapping"),
    ("reshape_and_cache_", "slot_mapping"),
}


@dataclass
class Outcome:
    """Results and written tensors on the CPU, or an error, or the reason why the device cannot make the call."""

    results: list[Tensor] = field(default_factory=list)
    error: Exception | None = None
    impossible: str = ""


def outcome(hostile: Hostile, device: torch.device) -> Outcome:
    call = base_call(hostile.op, hostile.base, device)
    try:
        call[hostile.argument] = hostile.change(call)
    except (RuntimeError, TypeError, NotImplementedError) as why:
        return Outcome(impossible=str(why))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = getattr(torch.ops.gdn, hostile.op)(**call)
        results = [] if result is None else list(result) if isinstance(result, tuple) else [result]
        results += [call[name] for name in REGISTRY[hostile.op].written if isinstance(call.get(name), Tensor)]
        if device.type == "mps":
            torch.mps.synchronize()
        return Outcome([torch.zeros(x.shape, dtype=x.dtype) if x.is_meta else x.detach().cpu() for x in results])
    except Exception as error:
        settle(device)
        return Outcome(error=error)


def settle(device: torch.device) -> None:
    """Clears what kernels of a refused call reported, so that the next call does not raise it."""
    if device.type == "mps":
        with contextlib.suppress(RuntimeError):
            torch.mps.synchronize()


def is_clear(hostile: Hostile, error: Exception) -> bool:
    """The error names an argument, as '<op>: <argument>: ...', or is PyTorch's for an invalid value."""
    message = str(error)
    if "INTERNAL ASSERT" in message or "Please report" in message:
        return False
    if re.search(REFUSED_BY_PYTORCH.format(name=hostile.argument), message):
        return True
    ours = re.match(rf"^(gdn::)?{hostile.op}: (\w+): expected .+, got .+", message)
    return ours is not None and ours[2] in REGISTRY[hostile.op].arguments


def is_open(hostile: Hostile, cpu: Outcome, there: Outcome) -> bool:
    """Returns whether the ops allow the two devices to differ."""
    if there.error is not None and hostile.what in ELSEWHERE:
        return True
    if hostile.op.startswith("causal_conv1d") and (hostile.argument, hostile.what) == ("x", "dimension 1 of 0"):
        return "cu_seqlens" in str(cpu.error)  # without tokens no kernel runs, and none reads the boundaries
    if (hostile.op, hostile.argument, hostile.what) == ("aura_paged_tile_means_", "tile_means", "dimension 0 of 0"):
        return (
            "block_table" in str(cpu.error) and there.error is None
        )  # without blocks no kernel runs, and none reads the table
    if hostile.op in reference.gradients.__all__ and hostile.argument == "g" and "1e" in hostile.what:
        return True  # a state that grows by e^1e30: which products are infinite depends on their order
    if hostile.op in reference.stages.__all__ and hostile.argument == "g" and "inf" in hostile.what:
        return True  # g is a sum of log decays, which no op returns infinite; the difference of two is NaN
    if (hostile.op, hostile.argument) in STORES:
        return "data race" in str(there.error)  # either of two writers may come last
    if hostile.op == "batch_copy_" and "what another one reads or writes" in str(cpu.error):
        return True  # ranges on the device leave open which bytes stay
    if hostile.op == "aura_flash_p1" and hostile.argument == "tile_scores" and hostile.what.endswith("-inf"):
        return True  # m of a block without weight is -inf or the lowest number
    if hostile.op.startswith("aura_encode") and hostile.argument == "codebook":
        return "1e" in hostile.what  # its squares exceed float32
    # With equal signs, the first coordinate of a vector without a mean is a sum that is 0 except for rounding.
    return hostile.op.startswith("aura_encode") and hostile.argument == "signs"


def disagreement(hostile: Hostile, device: torch.device) -> str:
    """Returns how the CPU and the device disagree, or an empty string."""
    cpu, on_device = outcome(hostile, torch.device("cpu")), outcome(hostile, device)
    if is_open(hostile, cpu, on_device):
        return ""
    for name, each in (("cpu", cpu), (device.type, on_device)):
        if each.error is not None and not is_clear(hostile, each.error):
            return f"{hostile}: unclear on {name}: {type(each.error).__name__}: {str(each.error)[:300]}"
    if cpu.impossible or on_device.impossible:
        return ""
    if (cpu.error is None) != (on_device.error is None):
        return f"{hostile}: cpu {shown(cpu)}, {device.type} {shown(on_device)}"
    if cpu.error is not None and on_device.error is not None:
        return ""
    if is_finite(on_device) != is_finite(cpu):
        return f"{hostile}: finite on the {device.type if is_finite(on_device) else 'cpu'} alone"
    # A factor of 1e30 shows single elements of sums, whose relative errors exceed that of a whole tensor.
    is_gradient = hostile.op in reference.gradients.__all__
    bound = bound_of(hostile) * (10 if is_gradient and "1e+30" in hostile.what else 1)
    for i, (ours, theirs) in enumerate(zip(on_device.results, cpu.results, strict=True)):
        apart = difference(ours, theirs, bound)
        if apart:
            return f"{hostile}: result {i}: {apart}"
    return ""


def shown(outcome: Outcome) -> str:
    if outcome.error is None:
        return "gives a result"
    return f"raises {type(outcome.error).__name__}: {str(outcome.error)[:200]}"


BOUNDS = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def is_finite(outcome: Outcome) -> bool:
    """Both devices must agree on it. How far NaN and infinities spread within a chunk is open."""
    return all(bool(x.isfinite().all()) for x in outcome.results if x.dtype.is_floating_point)


def bound_of(hostile: Hostile) -> float:
    """Returns the bound of the roughest dtype among the inputs, because the CPU may multiply in it."""
    call = base_call(hostile.op, hostile.base, torch.device("cpu"))
    with contextlib.suppress(RuntimeError, TypeError, NotImplementedError):
        call[hostile.argument] = hostile.change(call)
    return max(BOUNDS.get(x.dtype, 0) for x in call.values() if isinstance(x, Tensor))


def difference(ours: Tensor, theirs: Tensor, bound: float) -> str:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f"{ours.dtype} {tuple(ours.shape)} and {theirs.dtype} {tuple(theirs.shape)}"
    if not ours.dtype.is_floating_point:
        return "" if torch.equal(ours, theirs) else f"{int((ours != theirs).sum())} integers differ"
    finite = ours.isfinite() & theirs.isfinite()
    left, right = ours[finite].double(), theirs[finite].double()
    apart, size = (left - right).norm().item(), right.norm().item()
    if apart > max(bound, BOUNDS[ours.dtype]) * size:
        return f"{apart / size if size else float('inf'):.2g} apart"
    return ""
