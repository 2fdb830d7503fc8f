"""SGLang's torch runner on `mps`, with torch_gdn's kernels where SGLang has Triton's.

You import nothing by hand: SGLang finds an installed torch_gdn by its entry point. The environment variable
TORCH_GDN_SGLANG says what it does there:

    auto    (default) it replaces the kernels where PyTorch has mps, unless SGLANG_USE_MLX or SGLANG_USE_CPU_ENGINE
            chooses another runner; elsewhere it does nothing
    mps     the same, or an error that says why there is no mps
    off     nothing at all

SGLang logs an error that a plugin raises and continues. An error here therefore ends the process, with one sentence.
"""

from __future__ import annotations

import os

import torch

MODES = ("auto", "mps", "off")


def register() -> None:
    """The entry point of sglang.srt.plugins. SGLang calls it once in each process of the engine."""
    mode = os.environ.get("TORCH_GDN_SGLANG", "auto")
    if mode == "cpu":
        raise SystemExit(
            "TORCH_GDN_SGLANG=cpu: SGLang's CPU engine runs kernels of the package sgl_kernel, which has no build for "
            "the CPU on PyPI; set auto, mps or off"
        )
    if mode not in MODES:
        raise SystemExit(f"TORCH_GDN_SGLANG: expected one of {', '.join(MODES)}, got {mode!r}")
    if mode == "off":
        return
    if not torch.backends.mps.is_available():
        if mode == "mps":
            raise SystemExit("TORCH_GDN_SGLANG=mps: this PyTorch has no mps device")
        return
    if mode == "auto" and uses_another_runner():
        return
    from torch_gdn_engines.sglang import hooks

    hooks.require_checked_version()
    hooks.register()


def uses_another_runner() -> bool:
    from sglang.srt.environ import envs

    return bool(envs.SGLANG_USE_MLX.get()) or os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"
