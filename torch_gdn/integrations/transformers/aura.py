"""A transformers cache whose keys and values are held as AURA codes, and the attention that reads them.

Importing this module registers the attention implementation "aura" with transformers.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

import torch_gdn
from torch_gdn.aura.coded_tensor import dtype_name
from torch_gdn.aura.scheme import Scheme
from torch_gdn.integrations.serving import PagedBatch, attends_to_heads
from torch_gdn.integrations.transformers import aura_file
from torch_gdn.integrations.transformers.aura_layers import AuraLayer, Codes, Options, WindowLayer
from torch_gdn.integrations.transformers.functions import self_test_reason
from torch_gdn.integrations.transformers.versions import CACHE_NAMES

__all__ = ["AuraCache"]
WINDOW = "aura_window"  # attribute of a mask of starts: how many positions a query sees
UNPADDED = "aura_unpadded"  # attribute of a mask of starts that are all 0


class AuraCache(Cache):
    """A cache for transformers' decoders that holds keys and values in a few bits each.

    Layers of full attention and of sliding windows are held as AURA codes (`torch_gdn.aura.KVCache`), a window's with
    at most a quarter more tokens than it shows, or 128. Others stay as transformers keeps them: linear attention (the
    states of Gated DeltaNet layers in a hybrid) and chunked attention. A model whose attention implementation is "aura"
    attends to the codes; with any other, each layer's keys and values are decoded whenever it runs, which costs their
    memory for that time.

    The last `tail` tokens and the first `sinks` stay in the model's dtype, as `torch_gdn.aura.KVCache` says; a window
    has no sinks. A first prompt without padding, in heads of at most 256 values, attends to its keys and values as they
    are; the queries of any other see codes of its own tokens, but for the tail and sinks.

    Args:
        config: `model.config` itself and not a copy, because the attention implementation is read from it.
        scheme: a `torch_gdn.aura.Scheme` or its name. Default: "4v4t".
        capacity: of each layer at first, in tokens; it grows by a quarter at a time. Default: 256.
        tail: how many of the newest tokens stay exact at least, 0 for none; 32 to 256 pay. Default: 128.
        sinks: how many of the first tokens stay exact, padding included. Default: 4.

    Raises:
        TypeError: config is not a model's configuration.
        ValueError: an unknown scheme, a negative size, a model without a layer of full attention or of a sliding
            window, or one whose heads have a size that has no codes.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from torch_gdn.integrations.transformers.aura import AuraCache
        >>> config = LlamaConfig(
        ...     vocab_size=50, hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        ...     num_key_value_heads=1
        ... )
        >>> model = LlamaForCausalLM(config).eval()
        >>> model.set_attn_implementation("aura")
        >>> cache = AuraCache(model.config)
        >>> prompt = torch.tensor([[1, 2, 3, 4]])
        >>> options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        >>> model.generate(prompt, cache=cache, **options).shape  # past_key_values=cache before transformers 5.24
        torch.Size([1, 9])
        >>> cache.get_seq_length(), cache.bytes_used
        (8, 8192)
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        scheme: Scheme | str = "4v4t",
        capacity: int = 256,
        *,
        tail: int = 128,
        sinks: int = 4,
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            got = repr(config) if isinstance(config, str) else f"a {type(config).__name__}"
            raise TypeError(f"AuraCache: config: expected a model's configuration, as model.config, got {got}")
        for argument, value in (("tail", tail), ("sinks", sinks)):
            if value < 0:
                raise ValueError(f"AuraCache: {argument}: expected at least 0, got {value}")
        options = Options(scheme if isinstance(scheme, Scheme) else Scheme(scheme), tail, sinks)
        decoder = config.get_text_config(decoder=True)
        kinds = getattr(decoder, "layer_types", None) or []
        layers = [
            coded_layer(layer, decoder, options, capacity, i, kinds[i] if i < len(kinds) else "")
            for i, layer in enumerate(DynamicCache(config=decoder).layers)
        ]
        if not any(isinstance(layer, AuraLayer) for layer in layers):
            result = ", ".join(sorted({type(layer).__name__ for layer in layers}))
            raise ValueError(
                f"AuraCache: config: expected a model with layers of full attention or sliding windows, got {result}"
            )
        super().__init__(layers=layers)

    @property
    def bytes_used(self) -> int:
        """Returns the bytes of the tokens in all compressed layers, exact tokens included."""
        caches = (layer.cache for layer in self.layers if isinstance(layer, AuraLayer))
        return sum(cache.bytes_used for cache in caches if cache is not None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the cache to a safetensors file, exactly. Requires the package `safetensors`.

        Raises:
            ValueError: a layer that is neither of codes, linear attention nor keys and values.
        """
        aura_file.write(path, self.layers)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        config: PreTrainedConfig,
        device: torch.device | str = "cpu",
        capacity: int = 256,
    ) -> AuraCache:
        """Reads a file that `save` wrote. The model then continues as if it had never stopped.

        Args:
            path: the file.
            config: the model's, as for `AuraCache`.
            device: of the cache. Default: "cpu".
            capacity: as for `AuraCache`. Default: 256.

        Raises:
            ValueError: not such a file, of another version, of a model with other layers, or one whose parts do not fit
                together.
        """
        content = aura_file.read(path)
        scheme, tail, sinks = content.options
        cache = cls(config, scheme, capacity, tail=tail, sinks=sinks)
        content.fill(cache.layers, torch.device(device))
        return cache


def coded_layer(layer: Any, config: Any, options: Options, capacity: int, index: int, kind: str) -> Any:
    """Returns a compressed layer in place of `layer`, or `layer` itself if its kind has none."""
    if type(layer) is DynamicLayer:
        return AuraLayer(config, options, capacity, index)
    chunked = "chunked" in kind or (not kind and getattr(config, "attention_chunk_size", None) is not None)
    if type(layer) is DynamicSlidingWindowLayer and not chunked:
        return WindowLayer(config, options, index, layer.sliding_window)
    return layer


def aura_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor | Codes,
    value: Tensor | Codes,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Implements transformers' attention interface for codes. For tensors (no AuraCache, a window) it calls sdpa."""
    expect("dropout", dropout == 0.0, "0", dropout)
    expect("softcap", kwargs.get("softcap") is None, "None", kwargs.get("softcap"))
    window = getattr(attention_mask, WINDOW, None) or sliding_window or 0
    if not isinstance(key, Codes):
        expect(
            "s_aux", s_aux is None, "None where the cache holds no codes (a sliding window, or no AuraCache)", "sinks"
        )
        if could_be_codes(module, attention_mask, is_causal) and not torch.compiler.is_compiling():
            warn_of_tensors()
        L, T = query.shape[2], key.shape[2]
        if attention_mask is None and 1 < L < T:  # sdpa's own causal mask is that of the first L positions
            attention_mask = torch.zeros(query.shape[0], dtype=torch.int32, device=query.device)
        if attention_mask is not None and attention_mask.dim() == 1:
            attention_mask = mask_of_starts(attention_mask, L, T, window)
        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options, **kwargs)
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    expect("is_causal", is_causal, "True", is_causal)
    expect("position_bias", kwargs.get("position_bias") is None, "None", kwargs.get("position_bias"))
    fits = attention_mask is None or attention_mask.dim() == 1
    expect("attention_mask", fits, "left padding, [B, T]", attention_mask)
    sinks = None if s_aux is None else s_aux.detach().float()
    takes_prompt = attends_to_heads(query.shape[3]) and not self_test_reason("paged_attention_", query.device)
    if key.prompt is not None and is_unpadded(attention_mask) and takes_prompt:
        return attend_to_prompt(query, *key.prompt, scaling, window, sinks), None
    o = key.cache.attend(query, scale=scaling, window=window, starts=attention_mask, sinks=sinks)
    return o.transpose(1, 2), None


def is_unpadded(starts: Tensor | None) -> bool:
    return starts is None or getattr(starts, UNPADDED, False)


def attend_to_prompt(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int, sinks: Tensor | None) -> Tensor:
    """Lets a first prompt attend to its own keys and values before they become codes.

    Computes causal attention of q [B, HQ, L, D] to k, v [B, HK, L, D] as [B, L, HQ, D]. Each batch row is a page.
    """
    B, HQ, L, D = q.shape
    rows = torch.arange(B + 1, dtype=torch.int32)
    batch = PagedBatch(rows[:B, None], L * rows, torch.full((B,), L, dtype=torch.int32), L, L)
    q, key_pages, value_pages = (x.transpose(1, 2) for x in (q, k, v))
    options = batch.sequences | {"scale": scale, "window": window, "sinks": sinks}
    o = torch_gdn.paged_attention(q.flatten(0, 1), key_pages, value_pages, **options)
    return o.view(B, L, HQ, D)


def could_be_codes(module: torch.nn.Module, attention_mask: Tensor | None, is_causal: bool | None) -> bool:
    """Returns whether an AuraCache compresses the keys and values of this layer."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    chunked = getattr(getattr(module, "config", None), "attention_chunk_size", None) is not None
    return causal and not chunked and (attention_mask is None or attention_mask.dim() == 1)


@cache
def warn_of_tensors() -> None:
    warnings.warn(
        'the attention implementation is "aura", but the keys and values are not held as codes: pass '
        f"{CACHE_NAMES.model}=AuraCache(model.config)",
        stacklevel=3,
    )


def aura_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """For causal attention, returns where each row starts, [B] int32, or None if there is no padding and no window. For
    other attention, returns sdpa's mask."""
    window = window_of(mask_function)
    if window is None and (mask_function is not causal_mask_function or kwargs.get("local_size") is not None):
        return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **kwargs)
    starts = starts_of(attention_mask, kv_length, kv_offset)
    if window is not None:
        if starts is None:
            starts = torch.zeros(batch_size, dtype=torch.int32, device=kwargs.get("device"))
            setattr(starts, UNPADDED, True)
        setattr(starts, WINDOW, window)
    return starts


def starts_of(attention_mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    if attention_mask is None:
        return None
    mask = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    starts = (~mask).sum(-1, dtype=torch.int32)
    left = torch.arange(mask.shape[1], device=mask.device) >= starts[:, None]
    expected = f"[B, {kv_length}], with a column for each token that the cache already holds"
    expect("attention_mask", mask.shape[1] == kv_length, expected, attention_mask)
    expect("attention_mask", torch.equal(mask, left), f"left padding, [B, {kv_length}]", attention_mask)
    return starts if bool(starts.any()) else None


def window_of(mask_function: Callable[..., Any]) -> int | None:
    """Returns the window of transformers' causal mask, which consists of two functions, or None for another mask."""
    model = sliding_window_causal_mask_function(1)
    if getattr(mask_function, "__code__", None) is not model.__code__:
        return None
    overlay, *others = inspect.getclosurevars(mask_function).nonlocals["mask_functions"]
    own_mask, *_ = inspect.getclosurevars(model).nonlocals["mask_functions"]
    if others != [causal_mask_function] or getattr(overlay, "__code__", None) is not own_mask.__code__:
        return None
    window: int = inspect.getclosurevars(overlay).nonlocals["sliding_window"]
    return window


def mask_of_starts(starts: Tensor, L: int, T: int, window: int) -> Tensor:
    """Returns for sdpa which keys each of the last L positions sees, [B, 1, L, T]. As in sdpa, padding sees itself."""
    keys = torch.arange(T, device=starts.device)
    queries = keys[T - L :, None]
    seen = (keys <= queries) & (keys > queries - window) if window else keys <= queries
    return (keys == queries) | seen & (keys >= starts[:, None, None, None])


def expect(argument: str, holds: bool, expected: str, got: object) -> None:
    if not holds:
        what = f"{dtype_name(got.dtype)} of shape {list(got.shape)}" if isinstance(got, Tensor) else got
        raise ValueError(f"aura attention: {argument}: expected {expected}, got {what}")


AttentionInterface.register("aura", aura_attention)
AttentionMaskInterface.register("aura", aura_mask)
