"""Times a training step of one Gated DeltaNet layer of Qwen3.5 and measures its memory, next to transformers' code:

    OMP_WAIT_POLICY=PASSIVE python -m evidence.lab.studies.training_layer [--rounds N] [--tokens T]

The ways take turns, on the CPU, in float32, with all threads: transformers' code, ours, and the layer's projections
alone, which are the same in both and so bound what a faster rule can gain. A time is the CPU time of forward and
backward, the median of the rounds. Memory is the largest sum of the tensors that a step makes, while they live. The
gradients of the weights are there before it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

import torch_gdn

HIDDEN = 1024


def make_layer() -> Any:
    config = Qwen3_5TextConfig(
        hidden_size=HIDDEN,
        intermediate_size=3584,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        vocab_size=128,
    )
    torch.manual_seed(0)
    return modeling.Qwen3_5GatedDeltaNet(config, 0).float()


def peak_bytes(step: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    changes: list[tuple[int, int]] = []

    def collect(events: Sequence[Any]) -> None:
        for event in events:
            if str(event.tag).endswith("Allocation"):
                changes.append((event.start_time_ns, event.extra_fields.alloc_size))
            collect(event.children)

    collect(profiler.profiler.kineto_results.experimental_event_tree())
    held = peak = 0
    for _, size in sorted(changes):
        held += size
        peak = max(peak, held)
    return peak


class Layer:
    """A layer, its input, and the gradient of its output."""

    def __init__(self, tokens: int):
        self.layer = make_layer()
        self.x = torch.randn(1, tokens, HIDDEN, requires_grad=True)
        self.dy = torch.randn(1, tokens, HIDDEN)
        own = self.layer
        self.projections = [own.in_proj_qkv, own.in_proj_z, own.in_proj_b, own.in_proj_a]
        self.outer = [torch.randn(1, tokens, each.weight.shape[0]) for each in self.projections]
        self.heads = torch.randn(1, tokens, own.out_proj.weight.shape[1], requires_grad=True)

    def outputs(self, way: str) -> tuple[list[Tensor], list[Tensor]]:
        """Returns outputs, and the gradients that they get."""
        if way == "projections":
            results = [each(self.x) for each in self.projections] + [self.layer.out_proj(self.heads)]
            return results, [*self.outer, self.dy]
        result = self.layer(self.x)
        return [result[0] if isinstance(result, tuple) else result], [self.dy]

    def step(self, way: str) -> tuple[float, float]:
        """Returns the CPU seconds of the forward and of the backward."""
        (torch_gdn.enable if way == "torch_gdn" else torch_gdn.disable)()
        start = time.process_time()
        outputs, gradients = self.outputs(way)
        middle = time.process_time()
        torch.autograd.backward(outputs, gradients)
        return middle - start, time.process_time() - middle


WAYS = ("transformers", "torch_gdn", "projections")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", metavar="N", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--tokens", metavar="T", type=int, default=2048, help="default: %(default)s")
    options = parser.parse_args(arguments)
    layer = Layer(options.tokens)
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for round_ in range(options.rounds + 1):
        for way in WAYS:
            seconds = layer.step(way)
            if round_:  # the first one warms up
                times[way].append(seconds)
    print("| way | forward, s | backward, s | peak, MB |\n|---|---|---|---|")
    for way, each in times.items():
        forward, backward = (statistics.median(column) for column in zip(*each, strict=True))
        peak = peak_bytes(partial(layer.step, way))
        print(f"| {way} | {forward:.3f} | {backward:.3f} | {peak / 1e6:.0f} |")


if __name__ == "__main__":
    main()
