"""Counts what a step of `generate` launches on `mps` with drafts of a prediction layer, as `launches` does plain ones.

A step is the model's verification of d drafts, what is taken back, and the next d drafts. Tokens are forced, so that
all drafts are accepted or none. The prediction layer is one of attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.modeling_layers import MtpModel

from bench.launch_counter import ONCE, Counts, Place, counting
from bench.launch_models import PROMPT, SMALL, small_model
from torch_gdn.integrations import transformers
from torch_gdn.integrations.transformers.prediction_layers import Configured, loaded
from torch_gdn.integrations.transformers.versions import with_cache

DRAFTS = (0, 1, 2, 4)
MODELS = ("Qwen3.5-35B-A3B", "Qwen3-Next-80B-A3B", "Qwen3.5-0.8B")  # whose files have a prediction layer
STEPS = 4  # of one generation; the last but one is counted
TAKEN_BACK = "taken back"
OTHER = 2  # a token that the model does not choose


class ForcedHead(nn.Module):
    """Computes logits as the model's head, but gives those of one token."""

    def __init__(self, head: nn.Module, tokens: int) -> None:
        super().__init__()
        self.head = head
        self.chosen = 1
        device = next(head.parameters()).device
        eye = torch.eye(SMALL["vocab_size"], dtype=torch.bfloat16).to(device)
        self.logits = eye[:, None, None].expand(-1, 1, tokens, -1)

    def forward(self, hidden: Tensor) -> Tensor:
        self.head(hidden)
        return self.logits[self.chosen, :, : hidden.shape[1]]


@contextmanager
def forced(model: Any, accepted: bool, tokens: int) -> Iterator[None]:
    """Makes the model choose token 1, and the prediction layer too if drafts shall be accepted."""
    head = model.lm_head = ForcedHead(model.lm_head, tokens)

    def choose(token: int) -> None:
        head.chosen = token

    hooks = [
        model.register_forward_pre_hook(lambda *_: choose(1)),
        model.register_forward_hook(lambda *_: choose(1 if accepted else OTHER)),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def cases() -> Iterator[tuple[str, int, bool]]:
    """Yields a column's name, the number of drafts, and whether they are accepted."""
    for drafts in DRAFTS:
        for accepted in (True, False) if drafts else (True,):
            yield f"drafts: {drafts}{', rejected' * (not accepted)}", drafts, accepted


def count(name: str, drafts: int, accepted: bool) -> dict[Place, Counts]:
    """Returns the counts of one step, of the small model that `launches` uses too."""
    transformers.enable(rollback=True, drafts=drafts or None)
    try:
        model = small_model(name, torch.bfloat16).to("mps")
        model.config.name_or_path = "random"
        with torch.no_grad(), forced(model, accepted, drafts + 1):
            model.prediction_layer = None
            if drafts:
                layer = MtpModel(Configured(model), 1).to("mps", torch.bfloat16).eval()
                loaded[model] = (model.device, model.dtype), layer
                model.prediction_layer = layer.layers  # so that its weights do not count as bytes
            return steps(model, STEPS * (drafts + 1))[STEPS - 2]
    finally:
        transformers.disable()


def steps(model: Any, tokens: int) -> list[dict[Place, Counts]]:
    """Returns the counts of each step. What a cache takes back counts for its layer."""
    ids = torch.ones(1, PROMPT, dtype=torch.long).to(model.device)
    result: list[dict[Place, Counts]] = [{}]

    def start() -> None:
        result.append({})
        counter.counts = result[-1]

    class Counted(DynamicCache):
        def crop(self, tokens_to_remove: int) -> None:
            for index, layer in enumerate(self.layers):
                counter.place = Place(index, TAKEN_BACK)
                layer.crop(tokens_to_remove)
            counter.place = Place(None, ONCE)

    options = with_cache(Counted(config=model.config)) | {"max_new_tokens": tokens, "do_sample": False}
    with counting(model, start) as counter:
        model.generate(ids, attention_mask=torch.ones_like(ids), use_mtp=model.prediction_layer is not None, **options)
    return result[1:]
