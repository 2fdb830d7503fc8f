"""A step of the check and its result."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_gdn._recorder import KernelVariant
from torch_gdn_check.registry.bounds import Part, worst

# sections with special treatment
FACTS, USE, PYTORCH, PROBE, COMPILE = "facts", "use", "pytorch", "probe", "compile"
PASS, FAIL, SKIPPED = "pass", "FAIL", "skipped"


class Skipped(Exception):
    """Raised by a step that cannot run here. The message has the reason."""


@dataclass(frozen=True)
class Outcome:
    figures: dict[str, Any] = field(default_factory=dict)
    problem: str = ""  # empty if passed


@dataclass(frozen=True)
class Step:
    section: str
    group: str  # the kernel, op or model, which is a line of the table
    case: str
    run: Callable[[torch.device], Outcome]  # sent to another process: a module's function, or a partial of one
    kernels: tuple[str, ...] = ()  # known kernels that it launches
    variant: KernelVariant | None = None  # the variant that it compiles

    @property
    def name(self) -> str:
        return f"{self.section} {self.group} {self.case}".rstrip()

    def result(self, status: str, message: str = "") -> Result:
        return Result(self.section, self.group, self.case, status, message=message, kernels=self.kernels)


@dataclass
class Result:
    section: str
    group: str
    case: str
    status: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    message: str = ""  # why it failed or was skipped, in full
    traceback: str = ""
    kernels: tuple[str, ...] = ()


def on_simulated_device() -> bool:
    return sys.platform != "darwin"


def refuse_simulated(device: torch.device, why: str = "times on the simulated device say nothing about a Mac") -> None:
    if on_simulated_device() and device.type == "mps":
        raise Skipped(why)


def judged(parts: Sequence[Part]) -> Outcome:
    """Judges comparisons. For each tensor it returns the error and bound that are closest."""
    figures = {}
    for tensor in dict.fromkeys(part.tensor for part in parts):
        closest = worst(part for part in parts if part.tensor == tensor)
        figures[tensor] = {"error": closest.error, "bound": closest.bound, "of": closest.part}
    return Outcome({"tensors": figures}, "\n".join(str(part) for part in parts if not part.kept))


def execute(step: Step, device: torch.device) -> Result:
    """Runs the step and waits for the device, so that an error of the GPU is this step's."""
    result = step.result(PASS)
    start = time.perf_counter()
    try:
        outcome = step.run(device)
        if device.type == "mps" and step.section not in (FACTS, COMPILE):
            torch.mps.synchronize()
        result.figures, result.message = outcome.figures, outcome.problem
        result.status = FAIL if outcome.problem else PASS
    except Skipped as reason:
        result.status, result.message = SKIPPED, str(reason)
    except Exception as error:
        result.status, result.message = FAIL, f"{type(error).__name__}: {error}"
        result.traceback = "".join(traceback.format_exception(error))
    result.seconds = time.perf_counter() - start
    return result
