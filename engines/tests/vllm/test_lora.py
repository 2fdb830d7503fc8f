"""LoRA: requests with either of two adapters and without one, in the same batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engines.tests.vllm.conftest import CHUNKS, GREEDY_TOKENS, run_engine, scenario
from tests.helpers.small_models import adapter_of, generated


def test_products_are_of_the_rows_own_adapters() -> None:
    """Tests a layer, embeddings and logits, whose rows are requests. Index -1 means no adapter."""
    from vllm.lora.layers import LoRAMapping

    from torch_gdn_engines.vllm.lora import TorchGdnPunicaWrapper

    adapters, rank, size, rows = 3, 4, 10, 12
    numbers = (7, 0, 9, 9, 8, 0)  # LoRA ids of tokens; the slots of 7, 8 and 9 are 1, 2 and 0
    wrapper = TorchGdnPunicaWrapper(16, 8, torch.device("cpu"))
    wrapper.update_metadata(LoRAMapping(numbers, (0, 8), is_prefill=True), [9, 7, 8], adapters, 100)
    slot = {0: None, 7: 1, 8: 2, 9: 0}
    a, b = torch.randn(adapters, 1, rank, size), torch.randn(adapters, 1, rows, rank)

    def wanted(x: Any, y: Any, ids: tuple[int, ...], scale: float) -> Any:
        out = y.double().clone()
        for i, number in enumerate(ids):
            if slot[number] is not None:
                product = x[i].double() if x.shape[1] == rank else scale * (a[slot[number], 0].double() @ x[i].double())
                out[i] += b[slot[number], 0].double() @ product
        return out

    x, y = torch.randn(len(numbers), size), torch.randn(len(numbers), rows)
    expected = wanted(x, y, numbers, 0.5)
    wrapper.add_lora_linear(y, x, (a,), (b,), 0.5, (rows,))
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)

    embedded, y = torch.randn(len(numbers), rank), torch.randn(len(numbers), rows)
    expected = wanted(embedded, y, numbers, 1.0)
    wrapper.add_lora_embedding(y, embedded, b)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)

    x, y = torch.randn(2, size), torch.randn(2, rows)
    expected = wanted(x, y, (0, 8), 2.0)
    wrapper.add_lora_logits(y, x, a, b, 2.0)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_tokens_are_those_of_merged_weights(device: str, family: str, reference: Any, tmp_path: Path) -> None:
    path, texts, tokens, _ = reference(family)
    folders: list[str | None] = [None] * len(texts)
    wanted = list(tokens)
    for seed in (1, 2):  # of each three requests the first has no adapter
        adapter, merged = adapter_of(path, tmp_path, seed)
        wanted[seed::3] = generated(merged, texts[seed::3], GREEDY_TOKENS)[0]
        folders[seed::3] = [str(adapter)] * len(texts[seed::3])
        assert wanted[seed::3] != tokens[seed::3]
    options = {**CHUNKS, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    result = run_engine(device, scenario(path, texts, {"adapters": folders}, **options))
    assert result["rounds"][0]["tokens"] == wanted
