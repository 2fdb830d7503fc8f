"""Tests what the plugin's classes do with rows that are padding, and with configurations that lack what they need."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch


def test_attention_clears_the_rows_of_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_gdn_engines.vllm.attention import PagedAttention

    attention: Any = PagedAttention(2, 16, 0.25)
    monkeypatch.setattr(attention, "attend", lambda layer, q, k, v, cache, m, out: out.fill_(1))
    out, query = torch.full((5, 2, 16), torch.nan), torch.zeros(5, 2, 16)
    attention.forward(None, query, None, None, torch.empty(0), SimpleNamespace(num_actual_tokens=3), out)
    assert (out[:3] == 1).all() and (out[3:] == 0).all()


@pytest.mark.parametrize("lacking", ["bits", "group_size"])
def test_a_configuration_of_mlx_without_its_sizes_is_refused(lacking: str) -> None:
    from torch_gdn_engines.vllm.mlx_files import PackedMLXConfig

    config = {"bits": 4, "group_size": 64}
    del config[lacking]
    with pytest.raises(ValueError, match=f"^quantization: expected .*, got MLX's configuration without {lacking}$"):
        PackedMLXConfig.from_config(config)
