"""Runs vLLM on torch_gdn's kernels: on `mps`, for which vLLM has no platform, and on vLLM's CPU platform.

You import nothing by hand: vLLM finds an installed torch_gdn by its entry points. The environment variable
TORCH_GDN_VLLM says what it does there:

    auto    (default) the mps platform where PyTorch has mps, unless another platform plugin is installed; elsewhere
            the Gated DeltaNet layers on vLLM's CPU platform; nothing on any other platform of vLLM's
    mps     the mps platform, or an error that says why there is none
    cpu     vLLM's CPU platform, even on a Mac
    off     nothing at all
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from functools import cache

import torch

from torch_gdn.integrations import draining
from torch_gdn_engines import torchvision_operators
from torch_gdn_engines.vllm import versions

MODES = ("auto", "mps", "cpu", "off")
PLATFORMS = "vllm.platform_plugins"

logger = logging.getLogger(__name__)


def mode() -> str:
    value = os.environ.get("TORCH_GDN_VLLM", "auto")
    if value not in MODES:
        raise ValueError(f"TORCH_GDN_VLLM: expected one of {', '.join(MODES)}, got {value!r}")
    return value


def platform() -> str | None:
    """The entry point of vllm.platform_plugins. Returns the platform's class, or None on another machine.

    It raises nothing, because vLLM would swallow the error and use its CPU platform. vLLM does report errors of the
    class's constructor, which checks the mode, the device and vLLM's version.
    """
    wanted = os.environ.get("TORCH_GDN_VLLM", "auto")
    if wanted == "off":
        return None
    torchvision_operators.declare()  # vLLM asks for its platform before it imports torchvision
    if wanted == "cpu":
        return None
    if wanted == "auto":
        if not torch.backends.mps.is_available():
            return None
        others = other_platforms()
        if others:
            logger.warning(
                "torch_gdn leaves vLLM to another platform plugin (%s), since vLLM accepts only one. Set "
                "VLLM_PLUGINS=torch_gdn to serve on PyTorch's mps, or TORCH_GDN_VLLM=off to silence this warning.",
                ", ".join(others),
            )
            return None
    return f"{__name__}.mps_platform.MpsPlatform"


def other_platforms() -> list[str]:
    """Returns the other platform plugins that vLLM loads: all installed ones, or those that VLLM_PLUGINS lists."""
    names = {point.name for point in importlib.metadata.entry_points(group=PLATFORMS)} - {"torch_gdn"}
    allowed = os.environ.get("VLLM_PLUGINS")
    return sorted(names if allowed is None else names.intersection(allowed.split(",")))


def require_mps() -> None:
    mode()
    if not torch.backends.mps.is_available():
        raise RuntimeError("TORCH_GDN_VLLM=mps: this PyTorch has no mps device")
    versions.require_checked_version()


@cache
def register() -> None:
    """The entry point of vllm.general_plugins: called in every process of the engine, in one perhaps more than once."""
    if mode() == "off":
        return
    from vllm.platforms import current_platform

    from torch_gdn_engines.vllm.mps_platform import MpsPlatform

    is_mps = isinstance(current_platform, MpsPlatform)
    if mode() == "mps" and not is_mps:
        raise RuntimeError(
            f"TORCH_GDN_VLLM=mps: expected vLLM on mps, got {type(current_platform).__name__}: unset "
            "VLLM_TARGET_DEVICE, and let VLLM_PLUGINS, if it is set, list torch_gdn"
        )
    if not is_mps and not current_platform.is_cpu():
        return
    from torch_gdn_engines.vllm import aura_attention, compat, kv_cache_dtype, layers, models

    versions.require_checked_version()
    compat.replace_on_each_platform()
    if current_platform.is_cpu():
        compat.replace_on_cpu()
    if draining.is_inherited():
        draining.silence_shutdown(logging.getLogger("vllm"))
    kv_cache_dtype.register()
    models.register()
    layers.register()
    if is_mps:
        from torch_gdn_engines.vllm import quantized, rotary

        compat.replace_on_mps()
        quantized.register()
        rotary.register()
    aura_attention.register()
