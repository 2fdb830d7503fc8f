"""Counts on the simulated device what one layer of a server's step dispatches, for the table of docs/serving.md."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.devices import on_a_mac, profiled, ready
from torch_gdn.tools.prefill import prefill_algorithm

pytestmark = pytest.mark.skipif(on_a_mac(), reason="a Mac does not report which kernels ran")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "serving.md"
H, HV, K, V, W = 1, 2, 32, 16, 4
CHANNELS = 2 * H * K + HV * V
SLOTS = 90


def on_mps(numbers: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device="mps")


class Layer:
    """The inputs, weights and pools on the device, for `batch` rows of `tokens` tokens."""

    def __init__(self, batch: int, tokens: int, columns: int = W - 1) -> None:
        def random(*size: int) -> Tensor:
            return torch.randn(size).to("mps")

        self.x, self.z = random(batch, tokens, CHANNELS), random(batch, tokens, HV, V)
        self.raw_g, self.raw_beta = random(batch, tokens, HV), random(batch, tokens, HV)
        self.weight, self.norm, self.A_log, self.dt_bias = random(CHANNELS, W), random(V), random(HV), random(HV)
        self.columns, self.states = random(SLOTS, CHANNELS, columns), random(SLOTS, HV, K, V)
        self.o = torch.empty(batch, tokens, HV, V, device="mps")
        torch.mps.synchronize()

    def convolve(self, indices: Tensor, **options: Any) -> tuple[Tensor, ...]:
        """Returns q, k, v and the raw gates."""
        mixed = torch_gdn.causal_conv1d_update_(
            self.x, self.weight, self.columns, indices, activation="silu", **options
        )
        heads = mixed.split([H * K, H * K, HV * V], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, size)) for part, size in zip(heads, (K, K, V), strict=True))
        return q, k, v, self.raw_g, self.raw_beta

    def rule(
        self, op: Callable[..., Any], inputs: tuple[Tensor, ...], indices: Tensor, first: int, last: int, **options: Any
    ) -> None:
        """Computes tokens [first, last), into the buffer."""
        part = (x[:, first:last] for x in inputs)
        gates = {"use_gate_in_kernel": True, "A_log": self.A_log, "dt_bias": self.dt_bias}
        gates |= {"use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True}
        op(*part, self.states, indices, **gates, out=self.o[:, first:last], **options)

    def finish(self) -> None:
        torch_gdn.rms_norm_gated(self.o, self.z, self.norm)


def decode(sequences: int) -> Callable[[], None]:
    layer, indices = Layer(sequences, 1), on_mps(list(range(sequences)))

    def step() -> None:
        layer.rule(torch_gdn.fused_recurrent_gated_delta_rule_, layer.convolve(indices), indices, 0, 1)
        layer.finish()

    return step


def verify_drafts() -> Callable[[], None]:
    layer, slots = Layer(2, 4, W - 2 + 4), on_mps([[0, 1, 2, 3], [4, 5, 6, 7]])
    own, accepted = on_mps([0, 1]), on_mps([2, 4])

    def step() -> None:
        inputs = layer.convolve(own, num_accepted_tokens=accepted)
        op = torch_gdn.fused_recurrent_gated_delta_rule_
        layer.rule(op, inputs, slots, 0, 4, num_accepted_tokens=accepted)
        layer.finish()

    return step


def prefill(algorithm: str, has_checkpoints: bool = False) -> Callable[[], None]:
    layer, indices, boundaries = Layer(1, 170), on_mps([3, 1]), on_mps([0, 100, 170], torch.int64)
    options: dict[str, Any] = {"cu_seqlens": boundaries}
    if has_checkpoints:
        options |= {"checkpoint_offsets": on_mps([64, 0]), "checkpoint_indices": on_mps([8, -1])}

    def step() -> None:
        with prefill_algorithm(algorithm):
            inputs = layer.convolve(indices, **options)
            layer.rule(torch_gdn.chunk_gated_delta_rule_, inputs, indices, 0, 170, **options)
        layer.finish()

    return step


def mixed() -> Callable[[], None]:
    """Runs 3 decodes, then 2 prompts."""
    layer, indices = Layer(1, 3 + 100), on_mps([3, 1, 4, 0, 5])
    every, decodes = on_mps([0, 1, 2, 3, 40, 103], torch.int64), on_mps([0, 1, 2, 3], torch.int64)
    prompts = on_mps([0, 37, 100], torch.int64)

    def step() -> None:
        inputs = layer.convolve(indices, cu_seqlens=every)
        recurrent, chunked = torch_gdn.fused_recurrent_gated_delta_rule_, torch_gdn.chunk_gated_delta_rule_
        layer.rule(recurrent, inputs, indices[:3], 0, 3, cu_seqlens=decodes)
        with prefill_algorithm("fused_chunk"):
            layer.rule(chunked, inputs, indices[3:], 3, 103, cu_seqlens=prompts)
        layer.finish()

    return step


def copy_blocks() -> Callable[[], None]:
    pool = torch.zeros(4096, dtype=torch.uint8, device="mps")
    numbers = [on_mps(x, torch.int64) for x in ([0, 1024], [512, 2048], [512, 600])]
    torch.mps.synchronize()
    return lambda: torch_gdn.batch_copy_(pool, *numbers)


STEPS: dict[str, Callable[[], Callable[[], None]]] = {
    "decoding, up to 32 sequences": lambda: decode(32),
    "decoding, more sequences": lambda: decode(33),
    "speculative decoding": verify_drafts,
    "prefill, fused chunk": lambda: prefill("fused_chunk"),
    "prefill, recurrent": lambda: prefill("recurrent"),
    "prefill, chunked": lambda: prefill("chunked"),
    "prefill with checkpoints": lambda: prefill("fused_chunk", has_checkpoints=True),
    "decodes and prefills, one buffer": mixed,
    "copies of blocks, of all layers": copy_blocks,
}


def rows() -> dict[str, tuple[int, Counter[str]]]:
    """Returns the dispatches and kernels of each step."""
    table = re.search(r"\| step \| dispatches \| kernels \|\n\|[-|]+\n((?:\|.*\n)+)", PAGE.read_text())
    assert table is not None
    result = {}
    for line in table[1].splitlines():
        step, dispatches, kernels = (cell.strip() for cell in line.strip("|").split("|"))
        names = re.findall(r"`(\w+)`( twice)?", kernels)
        result[step] = (int(dispatches), Counter({name: 2 if twice else 1 for name, twice in names}))
    return result


def dispatches_run() -> int:
    from mps_simulator.device import device_module

    return sum(figures.dispatches for figures in device_module().figures().values())


def test_the_table_has_every_step() -> None:
    assert set(rows()) == set(STEPS)
    assert all(count == sum(kernels.values()) for count, kernels in rows().values())


@pytest.mark.parametrize("name", STEPS)
def test_dispatches_and_waits(name: str) -> None:
    """The simulated device runs kernels when the host waits. None may have run when the step returns."""
    ready("mps")
    step = STEPS[name]()
    step()  # the first run compiles
    with profiled() as profile:
        before = dispatches_run()
        step()
        assert dispatches_run() == before
    variants = {variant: figures.dispatches for variant, figures in profile.kernels.items()}
    count, kernels = rows()[name]
    counted = Counter[str]()
    for variant, dispatches in variants.items():
        named = (kernel for kernel in kernels if variant.startswith(f"{kernel}_"))
        counted[max(named, key=len, default=variant)] += dispatches
    assert counted == kernels
    assert counted.total() == count
    assert profile.fallbacks == {}
