"""Makes small random models of each kind, with heads that remember, and the questions that tests ask them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torch_gdn.integrations.transformers import small_models
from torch_gdn.integrations.transformers.patches import DRAFTED_MODELS, SERVED_MODELS, modeling_module
from torch_gdn.integrations.transformers.small_models import DELTA_NETS, SIZES, VOCABULARY
from torch_gdn.integrations.transformers.versions import cache_in, with_cache

__all__ = ["SIZES"]

PROMPT = 70  # one whole chunk and a part
KINDS = {kind: each for kind, each in DELTA_NETS.items() if modeling_module(kind) is not None}
SERVED_KINDS = {kind: KINDS[kind] for kind in SERVED_MODELS if kind in KINDS}


def available(kind: str) -> bool:
    return modeling_module(kind) is not None


DRAFTED_KINDS = tuple(filter(available, DRAFTED_MODELS))


def random_model(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0, **special: Any) -> Any:
    """Makes a model in f32 or another dtype. Its weights are bf16 numbers in any case, so they do not depend on the
    dtype.
    """
    model = small_models.make(kind, seed, **special)
    for module in model.modules():
        if type(module).__name__.endswith(("GatedDeltaNet", "ForgetGate")):
            # The initial gate forgets everything within a token. Trained heads remember: here 10 to 1,000 tokens.
            module.A_log.data.zero_()
            module.dt_bias.data.copy_(torch.logspace(-3, -1, module.dt_bias.numel()).expm1().log())
    return model.to(torch.bfloat16).to(dtype)


def attention_model(**special: Any) -> Any:
    """Makes a model without a delta rule."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    sizes = {name: SIZES[name] for name in names}
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**sizes, num_hidden_layers=2, initializer_range=0.1, **special)).eval()


def random_tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


@contextmanager
def torch_gdn_enabled() -> Iterator[Any]:
    """Yields the module with `status` and so on. Restores transformers afterwards, whatever happens."""
    from torch_gdn.integrations import transformers

    transformers.enable()
    try:
        yield transformers
    finally:
        transformers.disable()


def prefill(model: Any, device: torch.device) -> Tensor:
    tokens = random_tokens(1, PROMPT).to(device)
    return model(input_ids=tokens, use_cache=False).logits


def decode(
    model: Any, device: torch.device, prompt: int = PROMPT, steps: tuple[int, ...] = (1, 1, 1), batch: int = 1
) -> Tensor:
    """Runs a prompt, and then each number of tokens in `steps`."""
    tokens = random_tokens(batch, prompt + sum(steps)).to(device)
    output = model(input_ids=tokens[:, :prompt], use_cache=True)
    result, start = [output.logits], prompt
    for step in steps:
        following = tokens[:, start : start + step]
        output = model(input_ids=following, use_cache=True, **with_cache(cache_in(output)))
        result.append(output.logits)
        start += step
    return torch.cat(result, 1)


def continuation(model: Any, device: torch.device) -> Tensor:
    """Runs several tokens at once after a cached prompt, as for a next turn or to verify a draft."""
    return decode(model, device, prompt=66, steps=(5, 1, 3))


def short_prompt(model: Any, device: torch.device) -> Tensor:
    """The prompt is shorter than the convolution. There are many, so that rounding in bf16 evens out."""
    return decode(model, device, prompt=2, steps=(1, 1), batch=24)


def padded(model: Any, device: torch.device, lengths: tuple[int, ...] = (PROMPT, 9)) -> Tensor:
    """Runs prompts of unequal length in one batch, padded on the left, and returns the logits of their tokens."""
    tokens, mask = padded_tokens(lengths)
    output = model(input_ids=tokens.to(device), attention_mask=mask.to(device), use_cache=True)
    return output.logits[mask.bool().to(device)]


def padded_tokens(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    longest = max(lengths)
    tokens = random_tokens(len(lengths), longest)
    mask = torch.stack([torch.arange(longest) >= longest - length for length in lengths]).long()
    return tokens * mask, mask


def generated(model: Any, device: torch.device, new_tokens: int = 6, lengths: tuple[int, ...] = (20, 9)) -> Tensor:
    tokens, mask = padded_tokens(lengths)
    return model.generate(
        tokens.to(device), attention_mask=mask.to(device), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
    )


QUESTIONS = {
    "prefill": prefill,
    "decode": decode,
    "continuation": continuation,
    "short_prompt": short_prompt,
    "padded": padded,
}


def distance(result: Tensor, expected: Tensor) -> float:
    """Returns ||result - expected|| / ||expected||."""
    result, expected = result.cpu().double(), expected.cpu().double()
    return float((result - expected).norm() / expected.norm())
