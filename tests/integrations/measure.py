"""Measures how far each model's logits are from the fallback's, as JSON: `python -m tests.integrations.measure`."""

from __future__ import annotations

import copy
import json
from typing import Any

import torch

from tests.helpers.devices import ready
from tests.integrations.models import KINDS, QUESTIONS, distance, random_model, torch_gdn_enabled

QUESTIONS_OF = {"cpu": tuple(QUESTIONS), "mps": ("decode",)}  # the simulated device is slow


def answers(model: Any, device: str) -> dict[str, torch.Tensor]:
    where = ready(device)
    model = copy.deepcopy(model).to(where)
    return {question: QUESTIONS[question](model, where).cpu() for question in QUESTIONS_OF[device]}


def measure(kind: str, device: str) -> dict[str, float]:
    """Returns the largest distance in f32, and the largest ratio of our bf16 distance from f32 to the fallback's."""
    exact_model, rounded_model = random_model(kind), random_model(kind, torch.bfloat16)
    # PyTorch computes everything without torch_gdn, and on the simulated device that means the CPU.
    exact, rounded = answers(exact_model, "cpu"), answers(rounded_model, "cpu")
    with torch_gdn_enabled() as transformers:
        result, found_rounded = answers(exact_model, device), answers(rounded_model, device)
        assert not transformers.status().fallbacks, transformers.status()
    ratios = {x: distance(found_rounded[x], exact[x]) / distance(rounded[x], exact[x]) for x in result}
    return {"f32": max(distance(result[x], exact[x]) for x in result), "bf16": max(ratios.values())}


@torch.no_grad()
def main() -> None:
    import transformers

    measured = {kind: {device: measure(kind, device) for device in QUESTIONS_OF} for kind in KINDS}
    print(json.dumps({"transformers": transformers.__version__, "measured": measured}))


if __name__ == "__main__":
    main()
