"""A transformers cache whose full-attention layers are held as AURA codes, and the attention that reads them.

Importing this module registers the attention implementation "aura" with transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from torch_gdn.aura.kv_cache import KVCache
from torch_gdn.aura.scheme import Scheme

__all__ = ["AuraCache"]


class AuraCache(Cache):
    """A cache for transformers' decoders that holds keys and values in a few bits each.

    Layers of full attention are held as AURA codes (`torch_gdn.aura.KVCache`). Others stay as transformers keeps them:
    linear attention (the states of Gated DeltaNet layers in a hybrid), and sliding windows, which never grow beyond the
    window. A model whose attention implementation is "aura" attends to the codes; with any other, each layer's keys and
    values are decoded whenever it runs, which costs their memory for that time.

    Args:
        config: the model's, and the very object (`model.config`), since the attention implementation is read from it.
        scheme: a `torch_gdn.aura.Scheme` or its name. Default: "8v4".
        capacity: of each layer at first, in tokens; it grows by a quarter at a time. Default: 256.

    Raises:
        ValueError: a scheme that is none, or a model without a layer of full attention.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from torch_gdn.integrations.aura import AuraCache
        >>> config = LlamaConfig(
        ...     vocab_size=50, hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        ...     num_key_value_heads=1
        ... )
        >>> model = LlamaForCausalLM(config).eval()
        >>> model.set_attn_implementation("aura")
        >>> cache = AuraCache(model.config, scheme="8v4")
        >>> prompt = torch.tensor([[1, 2, 3, 4]])
        >>> model.generate(prompt, past_key_values=cache, max_new_tokens=5, do_sample=False, pad_token_id=0).shape
        torch.Size([1, 9])
        >>> cache.get_seq_length(), cache.bytes_used
        (8, 1664)
    """

    def __init__(self, config: PreTrainedConfig, scheme: Scheme | str = "8v4", capacity: int = 256) -> None:
        scheme = scheme if isinstance(scheme, Scheme) else Scheme(scheme)
        decoder = config.get_text_config(decoder=True)
        layers = DynamicCache(config=decoder).layers
        layers = [
            AuraLayer(decoder, scheme, capacity, i) if type(layer) is DynamicLayer else layer
            for i, layer in enumerate(layers)
        ]
        if not any(isinstance(layer, AuraLayer) for layer in layers):
            kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
            raise ValueError(f"AuraCache: config: expected a model with layers of full attention, got {kinds}")
        super().__init__(layers=layers)

    @property
    def bytes_used(self) -> int:
        """What the tokens held as codes take, in all layers."""
        caches = (layer.cache for layer in self.layers if isinstance(layer, AuraLayer))
        return sum(cache.bytes_used for cache in caches if cache is not None)


class AuraLayer(CacheLayerMixin):
    """One layer of an AuraCache; its KVCache is made when the first keys come."""

    is_croppable = True

    def __init__(self, config: PreTrainedConfig, scheme: Scheme, capacity: int, index: int) -> None:
        super().__init__()
        self.config, self.scheme, self.capacity, self.index = config, scheme, capacity, index
        self.cache: KVCache | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if key_states.shape != value_states.shape:
            shapes = f"{list(key_states.shape)} and {list(value_states.shape)}"
            raise ValueError(f"AuraCache: expected keys and values of one shape, got {shapes}")
        batch, heads, tokens, size = key_states.shape
        capacity, device = max(tokens, self.capacity), key_states.device
        self.cache = KVCache(self.scheme, batch, heads, size, capacity, device, key_states.dtype, seed=self.index)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self.cache is None:
            self.lazy_initialization(key_states, value_states)
        cache = self.cache
        assert cache is not None
        wanted = len(cache) + key_states.shape[2]
        if wanted > cache.capacity:
            cache.reserve(max(wanted, cache.capacity + cache.capacity // 4))
        cache.append(key_states, value_states)
        if self.config._attn_implementation == "aura":
            return Codes(cache), Codes(cache)
        return cache.decoded(cache.dtype)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return 0 if self.cache is None else len(self.cache)

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.16

    def reset(self) -> None:
        if self.cache is not None:
            self.cache.crop(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last -tokens_to_remove; a positive number is how many to keep (transformers before 5.16)."""
        if self.cache is not None:
            length = len(self.cache)
            self.cache.crop(min(tokens_to_remove, length) if tokens_to_remove > 0 else length + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.cache is not None:
            self.cache.reorder(beam_idx)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.cache is not None:
            self.cache.reorder(torch.arange(self.cache.batch).repeat_interleave(repeats))

    def offload(self) -> None:
        raise NotImplementedError("AuraCache: offloading is not supported: the codes are small enough to stay")

    prefetch = offload


class Codes:
    """Keys and values on their way to the attention: no tensor, so a model that computes with them fails instead of
    attending to something else."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"AuraCache: expected keys and values to go straight to the attention, got .{name} of them"
        )


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
    """transformers' attention interface over codes; over tensors (no AuraCache, a window) its sdpa."""
    expect("dropout", dropout == 0.0, "0", dropout)
    expect("softcap", kwargs.get("softcap") is None, "None", kwargs.get("softcap"))
    if not isinstance(key, Codes):
        expect(
            "s_aux", s_aux is None, "None where the cache holds no codes (a sliding window, or no AuraCache)", "sinks"
        )
        L, T = query.shape[2], key.shape[2]
        if attention_mask is None and 1 < L < T:  # sdpa's own causal mask is that of the first L positions
            attention_mask = torch.zeros(query.shape[0], dtype=torch.int32, device=query.device)
        if attention_mask is not None and attention_mask.dim() == 1:
            attention_mask = mask_of_starts(attention_mask, L, T)
        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options, **kwargs)
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    expect("is_causal", is_causal, "True", is_causal)
    expect("position_bias", kwargs.get("position_bias") is None, "None", kwargs.get("position_bias"))
    fits = attention_mask is None or attention_mask.dim() == 1
    expect("attention_mask", fits, "left padding, [B, T]", attention_mask)
    sinks = None if s_aux is None else s_aux.detach().float()
    window = sliding_window or 0
    o = key.cache.attend(query, scale=scaling, window=window, starts=attention_mask, sinks=sinks)
    return o.transpose(1, 2), None


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
    """Of plain causal attention where each row starts, [B] int32, or None for no padding; of any other, sdpa's mask."""
    if mask_function is not causal_mask_function or kwargs.get("local_size") is not None:
        return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **kwargs)
    if attention_mask is None:
        return None
    mask = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    starts = (~mask).sum(-1, dtype=torch.int32)
    left = torch.arange(mask.shape[1], device=mask.device) >= starts[:, None]
    fits = mask.shape[1] == kv_length and torch.equal(mask, left)
    expect("attention_mask", fits, f"left padding, [B, {kv_length}]", attention_mask)
    return starts if bool(starts.any()) else None


def mask_of_starts(starts: Tensor, L: int, T: int) -> Tensor:
    """For sdpa: which keys each of the last L positions sees, [B, 1, L, T]. A row of padding sees itself, as there."""
    keys = torch.arange(T, device=starts.device)
    queries = keys[T - L :, None]
    return (keys == queries) | (keys <= queries) & (keys >= starts[:, None, None, None])


def expect(argument: str, holds: bool, expected: str, got: object) -> None:
    if not holds:
        what = f"{got.dtype} of shape {list(got.shape)}" if isinstance(got, Tensor) else got
        raise ValueError(f"aura attention: {argument}: expected {expected}, got {what}")


AttentionInterface.register("aura", aura_attention)
AttentionMaskInterface.register("aura", aura_mask)
