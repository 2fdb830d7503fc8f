"""vLLM's engine over torch_gdn's kernels: on `mps`, which vLLM itself has no platform for, and on vLLM's CPU platform.

Nothing is imported by hand: installed beside vLLM, torch_gdn is found by vLLM's entry points. What it does there the
environment variable TORCH_GDN_VLLM says:

    auto    (default) the mps platform where PyTorch has mps; elsewhere the Gated DeltaNet layers on vLLM's CPU
            platform; nothing on any other platform of vLLM's
    mps     the mps platform, or an error that says why there is none
    cpu     vLLM's CPU platform, even on a Mac
    off     nothing at all
"""

from __future__ import annotations

import os
from functools import cache

import torch

MODES = ("auto", "mps", "cpu", "off")


def mode() -> str:
    value = os.environ.get("TORCH_GDN_VLLM", "auto")
    if value not in MODES:
        raise ValueError(f"TORCH_GDN_VLLM: expected one of {', '.join(MODES)}, got {value!r}")
    return value


def platform() -> str | None:
    """The entry point of vllm.platform_plugins: the platform's class, None where this is not its machine."""
    if mode() in ("off", "cpu"):
        return None
    if not torch.backends.mps.is_available():
        if mode() == "mps":
            raise RuntimeError("TORCH_GDN_VLLM=mps: this PyTorch has no mps device")
        return None
    from torch_gdn.integrations.vllm import compat

    compat.require_checked_version()
    return "torch_gdn.integrations.vllm.platform.MpsPlatform"


@cache
def register() -> None:
    """The entry point of vllm.general_plugins: called in every process of the engine, in one perhaps more than once."""
    if mode() == "off":
        return
    from vllm.platforms import current_platform

    if current_platform.device_type not in ("cpu", "mps"):
        return
    from torch_gdn.integrations.vllm import attention, compat, layers, models

    compat.require_checked_version()
    compat.replace_state_copies()
    compat.replace_triton_allocator()
    if current_platform.is_cpu():
        compat.replace_cpu_attention()
        compat.replace_cpu_lora()
    models.register()
    layers.register()
    attention.register()
