"""Counts what a decode step of `generate` launches on `mps` if `torch.compile` compiled the model's forward.

The kernels that Inductor generates run on the simulated device, which counts them as it counts torch_gdn's. Attention
is one launch, as on a Mac. Three small models with other numbers of layers give what each kind of layer launches.
"""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from bench.launch_counter import ONCE
from bench.launch_models import PROMPT, SMALL, TOTAL, configuration, small_model
from torch_gdn.integrations import transformers

FULL, LINEAR = "full_attention", "linear_attention"
ATTENTION = "bench_attention"
SMALL_MODELS = ((LINEAR, FULL), (LINEAR, LINEAR, FULL), (LINEAR, FULL, FULL))
TOKENS = 5  # the first step is a prompt, two are compiled for one length and for any, and the last one is not counted


@functools.cache
def register_attention() -> None:
    """Registers an attention that is one operator and returns zeros, because results mean nothing here."""

    @torch.library.custom_op(f"bench::{ATTENTION}", mutates_args=())
    def attention(q: Tensor, v: Tensor) -> Tensor:
        return torch.zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3], dtype=q.dtype, device="cpu").to(q.device)

    @attention.register_fake
    def _(q: Tensor, v: Tensor) -> Tensor:
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])

    def attend(layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
        return attention(q, v), None

    importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
    masks = importlib.import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
    masks.register(ATTENTION, masks["sdpa"])


def step(name: str, kinds: tuple[str, ...], batch: int) -> Counter[str]:
    """Returns the launches of a decode step of a model with these layers, by kernel or operator."""
    register_attention()
    model = small_model(name, torch.bfloat16, kinds).to("mps")
    model.config._attn_implementation = ATTENTION
    ids = torch.randint(1, SMALL["vocab_size"], (batch, PROMPT)).to("mps")
    _, result = generate(model, ids)
    return result + Counter(attention=kinds.count(FULL))


def generate(model: Any, ids: Tensor) -> tuple[Tensor, Counter[str]]:
    """Returns the tokens that a compiled model generates, and the launches of its last but one step."""
    import mps_simulator

    profiles: list[Any] = []
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, fullgraph=True)
    with ExitStack() as settings, ExitStack() as blocks:
        settings.enter_context(mps_simulator.settings(all_lanes=False, watch=False))

        @functools.wraps(model.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            blocks.close()
            profiles.append(blocks.enter_context(mps_simulator.profile()))
            return compiled(*args, **kwargs)

        model.forward = forward
        settings.callback(delattr, model, "forward")
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
    return tokens, launched(profiles[TOKENS - 2])


def launched(profile: Any) -> Counter[str]:
    result = Counter(copy=profile.copies.get("on the device", 0))
    for kernel, figures in profile.kernels.items():
        result["generated" if kernel.startswith("generated_kernel") else kernel] += figures.dispatches
    for operator, calls in profile.fallbacks.items():
        result[operator.partition(".")[0]] += calls
    return result


def count(name: str, batch: int) -> dict[str, int]:
    """Returns the launches of a layer of each kind, those outside of layers, and those of the whole published model."""
    transformers.enable()
    try:
        with torch.no_grad():
            both, linear, full = (step(name, kinds, batch).total() for kinds in SMALL_MODELS)
    finally:
        transformers.disable()
    kinds = list(configuration(name).layer_types)
    each = {LINEAR: linear - both, FULL: full - both}
    once = both - sum(each.values())
    parts = {f"{kinds.count(kind)} {kind.split('_')[0]} layers": number for kind, number in each.items()}
    return {ONCE: once, **parts, TOTAL: once + sum(each[kind] for kind in kinds)}
