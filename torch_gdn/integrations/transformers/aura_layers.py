"""Defines the layers of an AuraCache that are held as codes."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from torch_gdn.aura.codebooks import DIMENSIONS
from torch_gdn.aura.coded_tensor import has_tile_means
from torch_gdn.aura.kv_cache import KVCache
from torch_gdn.aura.scheme import Scheme
from torch_gdn.reference.aura import TILE


def layer_config(config: PreTrainedConfig, index: int) -> PreTrainedConfig:
    """Returns the configuration of one layer. Since transformers 5.23, layers may differ."""
    layers = getattr(config, "per_layer_config", None)
    return config if layers is None else layers[index]


def head_size(layer: PreTrainedConfig) -> int | None:
    """Returns the key size of a layer, as far as its configuration gives it."""
    size: int | None = getattr(layer, "head_dim", None) or getattr(layer, "attention_head_dim", None)
    if size is None and hasattr(layer, "hidden_size") and hasattr(layer, "num_attention_heads"):
        size = layer.hidden_size // layer.num_attention_heads
    return size


class Options(NamedTuple):
    """Holds what all layers of an AuraCache share."""

    scheme: Scheme
    tail: int
    sinks: int


class AuraLayer(CacheLayerMixin):
    """One layer of an AuraCache. Its KVCache is made when the first keys arrive."""

    is_croppable = True

    def __init__(self, config: PreTrainedConfig, options: Options, capacity: int, index: int) -> None:
        super().__init__()
        size = head_size(layer_config(config, index))
        if size is not None and size not in DIMENSIONS:
            expected = f"heads of {', '.join(map(str, DIMENSIONS[:-1]))} or {DIMENSIONS[-1]} values"
            raise ValueError(f"AuraCache: config: expected {expected}, got {size} in layer {index}")
        self.config, self.options, self.capacity, self.index = config, options, capacity, index
        self.cache: KVCache | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> AuraLayer:
        """Copies all but the configuration, because a copy must also read which attention the model has."""
        result = object.__new__(type(self))
        memo |= {id(self): result, id(self.config): self.config}
        result.__dict__ |= copy.deepcopy(self.__dict__, memo)
        return result

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if key_states.shape != value_states.shape:
            shapes = f"{list(key_states.shape)} and {list(value_states.shape)}"
            raise ValueError(f"AuraCache: expected keys and values of one shape, got {shapes}")
        batch, heads, tokens, size = key_states.shape
        capacity, device = max(tokens, self.capacity), key_states.device
        scheme, tail, sinks = self.options
        options = {"seed": self.index, "tail": tail, "sinks": sinks}
        self.cache = KVCache(scheme, batch, heads, size, capacity, device, key_states.dtype, **options)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self.cache is None:
            self.lazy_initialization(key_states, value_states)
        cache = self.cache
        assert cache is not None
        is_prompt = len(cache) == 0 and cache.tail > 0
        wanted = len(cache) + key_states.shape[2]
        if wanted > cache.capacity:
            cache.reserve(max(wanted, cache.capacity + cache.capacity // 4))
        cache.append(key_states, value_states)
        if self.config._attn_implementation == "aura":
            codes = Codes(cache, (key_states, value_states) if is_prompt else None)
            return codes, codes
        return (key_states, value_states) if is_prompt else cache.decoded(cache.dtype)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        self.expect_tokens(query_length)
        return self.get_seq_length() + query_length, 0

    def expect_tokens(self, tokens: int) -> None:
        """Refuses no tokens. transformers' generate() passes none if a cache holds as many tokens as the prompt."""
        if tokens == 0:
            raise ValueError(
                f"AuraCache: expected new tokens, got none: it already holds {self.get_seq_length()}, behind which "
                "generate() continues. Pass the whole conversation so far, or make a new AuraCache for another one"
            )

    def get_seq_length(self) -> int:
        return 0 if self.cache is None else len(self.cache)

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # the name before transformers 5.16

    def reset(self) -> None:
        if self.cache is not None:
            self.cache.crop(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last -tokens_to_remove tokens. A positive number keeps so many (transformers before 5.16)."""
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


class WindowLayer(AuraLayer):
    """Holds the keys of a sliding window. To move them seldom, it holds up to a quarter more of them than are seen, or
    a tile more if codes leave in whole tiles. It also holds what one call of the model brings until the next one. The
    first tokens leave it, because it has no sinks.
    """

    is_sliding = True

    def __init__(self, config: PreTrainedConfig, options: Options, index: int, window: int) -> None:
        more = max(window // 4, TILE if has_tile_means(options.tail) and window > options.tail else 1)
        super().__init__(config, options._replace(sinks=0), window - 1 + more, index)
        self.needed = window - 1  # tokens before the next one that it sees
        self.window = window
        self.seen = 0
        self.recording = False

    def activate_past_recording(self) -> None:
        """Drops nothing until `crop`."""
        self.recording = True

    def held_before(self, tokens: int) -> int:
        """Returns how many of the held tokens stay when `tokens` more arrive."""
        if self.cache is None:
            return 0
        held = len(self.cache)
        if self.recording or held + tokens <= self.cache.capacity <= self.capacity:
            return held
        return self.cache.kept_by(min(held, self.needed))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        tokens = key_states.shape[2]
        held = self.held_before(tokens)
        if self.cache is not None and held < len(self.cache):
            self.cache.keep_last(held, max(self.capacity, held + tokens))
        self.seen += tokens
        return super().update(key_states, value_states, *args, **kwargs)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        self.expect_tokens(query_length)
        held = self.held_before(query_length)
        return held + query_length, self.seen - held

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return self.window

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        super().reset()
        self.seen = 0

    def crop(self, tokens_to_remove: int) -> None:
        if self.cache is None:
            return
        removed = self.seen - tokens_to_remove if tokens_to_remove > 0 else -tokens_to_remove
        removed = max(removed, 0)
        held, wanted = len(self.cache) - removed, min(self.needed, self.seen - removed)
        if held < wanted or removed > self.seen:
            most = len(self.cache) - min(self.needed, len(self.cache)) if self.seen > len(self.cache) else self.seen
            raise ValueError(
                f"AuraCache: crop: expected at most {most} tokens of the sliding window of layer {self.index} to be "
                f"removed, got {removed}: those before it are gone"
            )
        self.cache.crop(held)
        self.seen -= removed
        if self.recording and held > self.capacity:
            self.cache.keep_last(self.needed, self.capacity)


class Codes:
    """Keys and values on their way to the attention. This is no tensor, so a model that computes with them fails and
    does not attend to something else. `prompt` has the original ones if there are no others.
    """

    def __init__(self, cache: KVCache, prompt: tuple[Tensor, Tensor] | None = None) -> None:
        self.cache, self.prompt = cache, prompt

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"AuraCache: expected keys and values to go straight to the attention, got .{name} of them"
        )
