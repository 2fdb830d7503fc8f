"""Tests that gradient checkpointing stays in effect while torch_gdn is enabled."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.models import KINDS, available
from torch_gdn.integrations import transformers
from torch_gdn.integrations.transformers import known_forms, small_models
from torch_gdn.integrations.transformers.patches import KDA_MODELS, MODELS

TRAINED = [kind for kind in (*KINDS, *KDA_MODELS) if available(kind) and kind in {*MODELS, *small_models.OTHERS}]


def step(kind: str, **options: Any) -> tuple[Counter[str], dict[str, Tensor]]:
    """Trains a model for one step. Returns how often each module ran, and the gradients."""
    model, ran, tokens = small_models.make(kind).train(), Counter[str](), torch.arange(1, 9).view(1, 8)
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: ran.update([name]))
    if options:
        model.gradient_checkpointing_enable(**options)
    model(input_ids=tokens, labels=tokens).loss.backward()
    return ran, {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.sweep(8)
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("where", [nullcontext, known_forms.on_every_device], ids=["cpu", "as on mps"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", TRAINED)
def test_layers_run_again_for_the_backward(
    kind: str, reentrant: bool, where: type[AbstractContextManager[None]], request: pytest.FixtureRequest
) -> None:
    options = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    once, gradients = step(kind)
    expected, _ = step(kind, **options)
    transformers.enable()
    request.addfinalizer(transformers.disable)
    with where():
        result, found_gradients = step(kind, **options)
    ran = Counter(transformers.status().ran)
    mixers = [name for name in once if name.endswith(("linear_attn", "self_attn"))]
    assert ran["chunk_gated_delta_rule"] + ran["chunk_kda"] == 2, "the layer with states ran twice on torch_gdn"
    assert mixers and all(expected[name] == 2 * once[name] for name in mixers)
    assert result == expected
    torch.testing.assert_close(found_gradients, gradients)
