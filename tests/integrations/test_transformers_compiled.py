"""Tests `enable()` with `torch.compile` on mps: Inductor's Metal code and torch_gdn's kernels are in one graph."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch
from torch._dynamo.utils import counters

from bench import compiled, launch_models
from tests.helpers.devices import on_a_mac, ready

pytestmark = [
    pytest.mark.usefixtures("enabled"),
    pytest.mark.skipif(not version("transformers").startswith("5.24."), reason="other versions launch other operators"),
    pytest.mark.skipif(on_a_mac(), reason="the simulated device counts launches"),
    pytest.mark.sweep(1, seeds=2),
]
# A linear layer launches two kernels between its projections, and an attention layer two around its attention.
OURS = {
    "causal_conv1d_update": 1,
    "gdn_decode": 1,
    "qk_norm_rope": 1,
    "act_and_mul": 1,
    "moe_router": 2,
    "moe_gate_up": 2,
    "moe_down": 2,
}


@pytest.mark.sweep(1, seeds=3)
def test_a_compiled_model_generates_the_same_tokens_in_few_launches() -> None:
    """The prompt has a graph, the first token has one, and all further tokens share one. No graph breaks."""
    ready("mps")
    model = launch_models.small_model("Qwen3-Next-80B-A3B", torch.float32, (compiled.LINEAR, compiled.FULL)).to("mps")
    ids = torch.randint(1, launch_models.SMALL["vocab_size"], (2, launch_models.PROMPT)).to("mps")
    counters.clear()  # other tests of this process counted too
    with torch.no_grad():
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=compiled.TOKENS, do_sample=False
        )
        result, step = compiled.generate(model, ids)
    assert result.tolist() == expected.tolist()
    assert counters["stats"]["unique_graphs"] == 3 and not counters["graph_break"]
    kernels = {name: sum(n for each, n in step.items() if each.startswith(f"{name}_")) for name in OURS}
    assert kernels == OURS
    assert (step["aten::mm"], step["generated"], step["copy"]) == (12, 12, 3), step
