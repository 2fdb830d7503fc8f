"""Tests the script behind the plot of docs/transformers-serving.md: what it serves, and that the memory stays flat."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.integrations.serving import other_version
from torch_gdn.integrations import transformers

if reason := other_version("bench.transformers_memory"):
    pytest.skip(reason, allow_module_level=True)

from bench import transformers_memory


@pytest.mark.sweep(1, seeds=3)
def test_memory_is_flat(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_memory, "BUDGET", 2**20)
    try:
        result = run(tmp_path / "plot.png")
    finally:
        transformers.disable()
    batching, conversations, unbounded = result.values()
    assert max(batching) - min(batching) < 1000  # bytes
    assert max(conversations) <= 2**20
    assert unbounded[-1] > 2 * 2**20
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert capsys.readouterr().out.startswith(f"continuous batching: {batching[-1]:,} bytes")


def run(plot: Path) -> dict[str, list[int]]:
    """Runs the script, and returns the measurements that it draws."""
    measured = {}
    original = transformers_memory.draw

    def draw(bytes_by_name: dict[str, list[int]], path: Path) -> None:
        measured.update(bytes_by_name)
        original(bytes_by_name, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_memory, "draw", draw)
        transformers_memory.main(["--requests", "15", "--plot", str(plot)])
    return measured


def test_tensors_without_memory_do_not_count() -> None:
    """Other tests leave such tensors behind."""
    before = transformers_memory.held()
    with FakeTensorMode():
        fake = torch.empty(1 << 20)
    meta, real = torch.empty(1 << 20, device="meta"), torch.empty(1 << 10)
    assert transformers_memory.held() - before == real.nbytes
    assert (fake.device.type, meta.is_meta) == ("cpu", True)
