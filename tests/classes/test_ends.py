"""Tests every op with sinks on sinks and scores that are a hundred apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.helpers.entries import assert_exact, fields_of
from torch_gdn.testing import REGISTRY

OF_A_HUNDRED = 100 * 2**-24  # the relative error of exp(x), where x is a float32 of that size
WITH_SINKS = [op for op, entry in REGISTRY.items() if "sinks" in entry.arguments]


@pytest.mark.parametrize("size", [1.0, 30.0], ids=["scores", "scores that are far apart"])
@pytest.mark.parametrize("op", WITH_SINKS)
def test_sinks_far_above_and_below_the_scores(device: torch.device, op: str, size: float) -> None:
    """Exponentials of the differences overflow or vanish; heads whose sink outweighs every key are nearly zeros."""
    entry = REGISTRY[op]
    point = replace(entry.small, plain=False) if "plain" in fields_of(entry) else entry.small  # plain: zeros
    call = entry.call(point)
    if "q" in call:
        call["q"] = call["q"] * size
    heads = point.HQ if "plain" in fields_of(entry) else len(call["sinks"])
    for sinks in ([-100.0, 30.0, -torch.inf, 0.0], [80.0, -1e4, 20.0, -100.0]):
        call["sinks"] = torch.tensor(sinks).repeat(heads)[:heads]
        assert_exact(entry, point, call, device, OF_A_HUNDRED)
