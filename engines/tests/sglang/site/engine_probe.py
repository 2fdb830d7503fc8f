"""A plugin of SGLang that tells the tests what the scheduler's process holds, launched and compiled."""

from __future__ import annotations

import sys
from typing import Any

PROFILES: list[Any] = []  # the context of the simulated device's profile that is running
RETRACTED: list[int] = []


def pipelines() -> list[str]:
    from torch_gdn import _C

    return sorted(facts["name"] for facts in _C.pipelines())


def pools(scheduler: Any) -> dict[str, list[int]]:
    """Returns the number of free slots and of all slots of each pool."""
    requests, tokens = scheduler.req_to_token_pool, scheduler.token_to_kv_pool_allocator
    sizes = {"requests": (requests, requests.size), "tokens": (tokens, tokens.size)}
    states = getattr(requests, "mamba_allocator", None)
    if states is not None:
        sizes["states"] = (states, states.size)
    return {name: [pool.available_size(), size] for name, (pool, size) in sizes.items()}


def launched() -> list[str]:
    """Returns the kernels that ran since the last call, which are unknown on a Mac."""
    if "mps_simulator" not in sys.modules:
        return []
    kernels: list[str] = []
    if PROFILES:
        context, profile = PROFILES.pop()
        context.__exit__(None, None, None)
        kernels = sorted(profile.kernels)
    context = sys.modules["mps_simulator"].profile()
    PROFILES.append((context, context.__enter__()))
    return kernels


def report(result: Any, scheduler: Any, *others: Any) -> Any:
    result.internal_state["probe"] = {
        "pools": pools(scheduler),
        "launched": launched(),
        "pipelines": pipelines(),
        "retracted": sum(RETRACTED),
    }
    return result


def count_retracted(result: Any, *others: Any) -> None:
    RETRACTED.append(len(result[0]))


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.get_internal_state", report)
    HookRegistry.register("sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode", count_retracted)
