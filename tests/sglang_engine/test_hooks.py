"""What the plugin says where it cannot work. SGLang would log the error and go on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.sglang_engine.conftest import environment

LOAD = "from sglang.srt.plugins import load_plugins; load_plugins(); print('loaded')"
RENAMED = "import sglang.kernels.ops.attention.linear.fused_gdn_gating as m; del m.fused_gdn_gating; "
UNAPPLIED = (
    "from sglang.srt.plugins.hook_registry import HookRegistry; "
    "HookRegistry._apply_target = classmethod(lambda cls, target, hooks: None); "
)
VERSION = "import importlib.metadata; importlib.metadata.version = lambda name: '0.5.24'; "


def load(before: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", before + LOAD]
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
