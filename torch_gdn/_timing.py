"""Times calls on a device."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def wait(device: torch.device) -> None:
    if device.type == "mps":
        torch.mps.synchronize()


def median_seconds(call: Callable[[], Any], device: torch.device, repeats: int, calls: int) -> float:
    """Times one call. `calls` of them are encoded before the device is waited for, as a model's layers are."""
    return statistics.median(encoded + waited for encoded, waited in samples(call, device, repeats, calls))


def samples(call: Callable[[], Any], device: torch.device, repeats: int, calls: int) -> list[tuple[float, float]]:
    """Returns two times per call: until the call returned, and from then until the device was done.

    PyTorch's stream starts nothing before it is waited for, so the second is the GPU's time.
    """
    call()  # to compile
    result = []
    for _ in range(repeats):
        wait(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        encoded = time.perf_counter()
        wait(device)
        result.append(((encoded - start) / calls, (time.perf_counter() - encoded) / calls))
    return result
