"""What the plugin decides before vLLM is there: modes, versions, the command."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from torch_gdn.integrations import vllm
from torch_gdn.integrations.vllm import compat

ROOT = Path(__file__).resolve().parents[2]


def test_entry_points_are_declared() -> None:
    for group, function in (("vllm.platform_plugins", "platform"), ("vllm.general_plugins", "register")):
        values = {point.value for point in importlib.metadata.entry_points(group=group, name="torch_gdn")}
        assert values == {f"torch_gdn.integrations.vllm:{function}"}


def test_an_unknown_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GDN_VLLM", "metal")
    with pytest.raises(ValueError, match="TORCH_GDN_VLLM: expected one of auto, mps, cpu, off, got 'metal'"):
        vllm.platform()


@pytest.mark.parametrize("mode", ["off", "cpu"])
def test_no_platform_where_none_is_wanted(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GDN_VLLM", mode)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert vllm.platform() is None


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0"])
def test_another_version_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_GDN_VLLM", raising=False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(compat, "version_of_vllm", lambda: version)
    with pytest.raises(RuntimeError, match=rf"was checked with vLLM .*, not with {version}: install one of those"):
        vllm.platform()


def test_the_platform_of_a_checked_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_GDN_VLLM", raising=False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(compat, "version_of_vllm", lambda: f"{compat.CHECKED[0]}.1")
    assert vllm.platform() == "torch_gdn.integrations.vllm.platform.MpsPlatform"


def test_registering_twice_registers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM may load its plugins again in a process; what wraps a function of vLLM's must not wrap itself."""
    calls: list[str] = []

    def stub(module: str, *functions: str) -> None:
        made = types.ModuleType(module)
        for function in functions:
            setattr(made, function, lambda name=f"{module}.{function}": calls.append(name))
        monkeypatch.setitem(sys.modules, f"torch_gdn.integrations.vllm.{module}", made)
        monkeypatch.setattr(vllm, module, made, raising=False)

    changes = ["replace_state_copies", "replace_triton_allocator", "replace_cpu_attention", "replace_cpu_lora"]
    stub("compat", "require_checked_version", *changes)
    for module in ("attention", "layers", "models"):
        stub(module, "register")
    platforms = types.ModuleType("vllm.platforms")
    setattr(platforms, "current_platform", types.SimpleNamespace(device_type="cpu", is_cpu=lambda: True))  # noqa: B010
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setenv("TORCH_GDN_VLLM", "cpu")
    vllm.register.cache_clear()
    try:
        vllm.register()
        vllm.register()
    finally:
        vllm.register.cache_clear()
    wanted = ["compat.require_checked_version", *(f"compat.{change}" for change in changes)]
    assert sorted(calls) == sorted([*wanted, "attention.register", "layers.register", "models.register"])


def test_without_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setenv("TORCH_GDN_VLLM", "auto")
    assert vllm.platform() is None
    monkeypatch.setenv("TORCH_GDN_VLLM", "mps")
    with pytest.raises(RuntimeError, match="TORCH_GDN_VLLM=mps: this PyTorch has no mps device"):
        vllm.platform()


@pytest.mark.skipif(torch.backends.mps.is_built(), reason="the sentence is for a PyTorch without mps")
def test_serve_says_what_is_missing() -> None:
    done = subprocess.run([sys.executable, "-m", "torch_gdn.serve", "model"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search("this PyTorch has no mps device.*; TORCH_GDN_VLLM=cpu serves on the CPU", done.stderr)
