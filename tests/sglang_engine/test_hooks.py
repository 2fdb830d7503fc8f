"""Tests the plugin's errors when it cannot work. SGLang would log them and continue."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.sglang_engine.conftest import environment

LOAD = "from sglang.srt.plugins import load_plugins; load_plugins(); print('loaded')"
RENAMED = "import sglang.kernels.ops.attention.linear.fused_gdn_gating as m; del m.fused_gdn_gating; "
UNAPPLIED = (
    "from sglang.srt.plugins.hook_registry import HookRegistry; "
    "HookRegistry._apply_target = classmethod(lambda cls, target, hooks: None); "
)
REFUSED = """
from sglang.srt.server_args import ServerArgs
for each in {arguments}:
    try:
        ServerArgs(model_path={path!r}, device="mps", **each).resolve_once()
    except ValueError as error:
        print("ValueError", error)
"""
VERSION = "import importlib.metadata; importlib.metadata.version = lambda name: '0.5.24'; "


def load(before: str = "", after: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", before + LOAD + after]
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    "before, variables, said",
    [
        (RENAMED, {}, "fused_gdn_gating.fused_gdn_gating does not exist"),
        (UNAPPLIED, {}, "elementwise.fused_sigmoid_mul is still SGLang's"),
        (VERSION, {}, "checked with SGLang 0.5.23, not with 0.5.24: install that version, or set TORCH_GDN_SGLANG=off"),
        ("", {"TORCH_GDN_SGLANG": "metal"}, "TORCH_GDN_SGLANG: expected one of auto, mps, off, got 'metal'"),
    ],
    ids=["renamed", "unapplied", "version", "mode"],
)
def test_a_process_ends_with_one_sentence(before: str, variables: dict[str, str], said: str) -> None:
    done = load(before, **variables)
    assert done.returncode == 1 and "loaded" not in done.stdout
    assert said in done.stderr.splitlines()[-1]


def test_what_is_not_supported_is_refused_before_a_model_is_loaded(model: Any) -> None:
    arguments = [
        {"speculative_algorithm": "NEXTN", "disable_radix_cache": True},
        {"enable_deterministic_inference": True},
        {"enable_linear_replayssm": True},
    ]
    done = load(after=REFUSED.format(path=str(model("qwen3_5")), arguments=arguments))
    said = [line for line in done.stdout.splitlines() if line.startswith("ValueError")]
    assert len(said) == len(arguments), done.stdout + done.stderr
    for line, given in zip(said, arguments, strict=True):
        assert f"{next(iter(given))}: torch_gdn's SGLang plugin does not support it on mps" in line
