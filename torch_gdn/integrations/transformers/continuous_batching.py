"""transformers' continuous batching for models with Gated DeltaNet layers: `generate_batch` and its manager.

transformers gives each layer type its own allocator, of pages of keys and values, and has none for
`linear_attention`. Here these layers have no pages; their states are in a pool with one slot per running request. The
cache admits a request if both have room, and frees both. A prompt continues from the pages and states of a prefix that
it shares with another prompt.
"""

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from transformers.generation.continuous_batching import cache as paged_cache
from transformers.generation.continuous_batching import continuous_api, initialization, input_outputs, scheduler
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION
from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.continuous_batching.utils import get_device_and_memory_breakdown
from transformers.modeling_utils import AttentionInterface

from torch_gdn import _C
from torch_gdn.integrations.transformers import known_forms, paged_attention
from torch_gdn.integrations.transformers.calls import Binder
from torch_gdn.integrations.transformers.patches import SERVED_MODELS, Patch, rebind
from torch_gdn.integrations.transformers.prefix_states import PrefixStates
from torch_gdn.integrations.transformers.state_pool import Part, StatePool, StateSizes

LINEAR = "linear_attention"
SHARE_OF_STATES = 0.25  # the largest part of continuous batching's memory
REFUSED_OPTIONS = {  # options of ContinuousBatchingConfig that would lose the states, and why
    "use_async_batching": "it prepares a batch while the previous one runs, before its states exist",
    "varlen_compile_config": "a compiled batch is padded with sequences that have no request",
    "decode_compile_config": "a compiled batch is padded with sequences that have no request",
    "cpu_offload_space": "it would swap out a request's pages without its states",
}
Groups = dict[str, list[int]]


def serving_patches(modules: dict[str, ModuleType]) -> Iterator[Patch]:
    """Yields the patches. `modules` are those of the models."""
    for owner in (paged_cache, initialization):
        yield rebind(owner, "group_layers_by_attn_type", groups_without_linear)
    yield rebind(continuous_api, "resolve_continuous_batching_config", resolve)
    yield rebind(continuous_api, "PagedAttentionCache", cache_for)
    yield rebind(continuous_api, "ContinuousBatchingIOs", inputs_for)
    yield rebind(scheduler.Scheduler, "_schedule_request", part_of_prompt)
    yield rebind(paged_cache, "PagedAttentionMemoryHandler", memory_of_pages)
    yield rebind(input_outputs, "attn_mask_is_needed", mask_is_needed)
    functions = AttentionInterface._global_mapping
    bind = Binder(paged_attention.attend_to_pages, functions["sdpa"], {}).bind
    yield rebind(functions, "sdpa", functools.partial(paged_attention.attention_over_pages, bind))
    for module in modules.values():
        for layer in known_forms.classes(module, "GatedDeltaNet"):
            yield rebind(layer, "forward", forward_with_states)


def linear_layers(config: Any) -> list[int]:
    """Returns the layers whose states torch_gdn keeps. It knows none of an unknown model."""
    package = type(config).__module__.split(".")
    if package[:2] != ["transformers", "models"] or package[2] not in SERVED_MODELS:
        return []
    return [n for n, layer_type in enumerate(config.layer_types) if layer_type == LINEAR]


def groups_without_linear(original: Callable[[Any], Groups], config: Any) -> Groups:
    linear = set(linear_layers(config))
    if not linear:
        return original(config)
    others = [n for n in range(len(config.layer_types)) if n not in linear]
    result = original(SimpleNamespace(layer_types=[config.layer_types[n] for n in others]))
    return {layer_type: [others[n] for n in layers] for layer_type, layers in result.items()}


def resolve(original: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuses, in the caller's thread, options that would lose the states."""
    resolved = original(config, *args, **kwargs)
    layers = linear_layers(config)
    if not layers:
        return resolved
    if len(layers) == len(config.layer_types):
        raise ValueError("continuous batching: layer_types: expected at least one attention layer, got none")
    for name, why in REFUSED_OPTIONS.items():
        if value := getattr(resolved, name, None):
            raise ValueError(
                f"continuous batching of Gated DeltaNet models: {name}: expected the option to be off, "
                f"got {value}: {why}"
            )
    return resolved


def cache_for(original: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> Any:
    kind = HybridCache if linear_layers(config) else original
    return kind(config, *args, **kwargs)


def inputs_for(original: Callable[..., Any], cache: Any, *args: Any, **kwargs: Any) -> Any:
    kind = HybridInputs if isinstance(cache, HybridCache) else original
    return kind(cache, *args, **kwargs)


def memory_of_pages(original: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> Any:
    """Gives the pages the memory that attention to the pages themselves does not need."""
    memory = original(config, *args, **kwargs)
    if attends_to_pages(config):
        memory.num_attention_masks = 0
        memory.kv_heads_at_peak = 0
    return memory


def mask_is_needed(original: Callable[[Any], bool], config: Any) -> bool:
    return original(config) and not attends_to_pages(config)


def attends_to_pages(config: Any) -> bool:
    return bool(linear_layers(config)) and paged_attention.takes(config)


def part_of_prompt(
    original: Callable[..., None], self: Any, state: Any, request_tokens: list[int], token_budget: int, *args: Any
) -> None:
    """Cuts prompts at the tokens after which a state is needed."""
    prompt = state.status < RequestStatus.DECODING
    if prompt and isinstance(self.cache, HybridCache) and self.cache.use_prefix_sharing:
        token_budget = self.cache.prefixes.part(state, len(request_tokens), token_budget)
    original(self, state, request_tokens, token_budget, *args)


def forward_with_states(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Passes the layer's states, and all other arguments, to its convolution and its delta rule.

    Since 5.24 the layer would ask the cache itself for them.
    """
    if isinstance(pages := kwargs.get("cache"), HybridCache):
        kwargs |= {"layer_states": pages.states.layers[layer.layer_idx], "cache": None}
    return original(layer, *args, **kwargs)


class HybridCache(paged_cache.PagedAttentionCache):
    """A cache with pages for the attention layers and a pool with the states of the others."""

    def __init__(
        self,
        config: Any,
        continuous_batching_config: Any,
        device: torch.device | str,
        distributed_helper: Any,
        dtype: torch.dtype = torch.float16,
        **options: Any,
    ) -> None:
        if distributed_helper.tp_size > 1:
            raise ValueError(
                "continuous batching of Gated DeltaNet models: tensor parallel size: expected 1, "
                f"got {distributed_helper.tp_size}"
            )
        layers, sizes = linear_layers(config), StateSizes.of(config, dtype)
        slots, share = slots_and_share(continuous_batching_config, len(layers) * sizes.layer_bytes)
        for_pages = copy.copy(continuous_batching_config)
        for_pages.max_memory_percent -= share
        super().__init__(config, for_pages, device, distributed_helper, dtype, **options)
        self.states = StatePool(layers, sizes, slots, torch.device(device))
        self.prefixes = PrefixStates(self.states, self.cache_allocators[FULL_ATTENTION])
        self.attends = attends_to_pages(config)
        self.paged_step: paged_attention.PagedStep | None = None  # set while torch_gdn computes the attention
        self.use_prefix_sharing &= set(self.cache_allocators) == {FULL_ATTENTION}

    def update(self, key_states: Any, value_states: Any, layer_idx: int, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Leaves keys and values to the attention, if that is torch_gdn's. Since 5.24 the layers call this."""
        if self.paged_step is not None:
            kwargs["cache"] = self
            return key_states, value_states
        updated: tuple[Any, Any] = super().update(key_states, value_states, layer_idx, kwargs)
        return updated

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        if not self.states.has_room_for(state.request_id):
            return False
        stored: bool = super().can_store_request_tokens(state, request_len, dry_run)
        if stored and not dry_run:
            self.states.hold(state.request_id)
        return stored

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Returns the known pages of the prompt up to the last one after which states are known."""
        tokens, name = self.prefixes.longest(request_id, prompt_ids) if self.use_prefix_sharing else (0, None)
        if name is None:
            return 0
        result: int = super().search_prefix_match(request_id, prompt_ids[: tokens + 1])  # never its last token
        self.states.hold_copy(request_id, name)
        return result

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        super().mark_complete_blocks(state, complete_blocks)
        self.prefixes.after(state.request_id)

    def extend_read_and_write_indices(
        self, request_id: str, past_length: int, query_length: int, read_index: Any, write_index: Any
    ) -> None:
        """Adds no indices, because attention to the pages themselves gathers none."""
        gathered = None if self.attends else read_index
        super().extend_read_and_write_indices(request_id, past_length, query_length, gathered, write_index)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        super().free_blocks(request_id, no_cache)
        self.prefixes.drop(request_id)
        self.states.release(request_id)

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        super().free_all_requests(clear_ledgers)
        self.prefixes.drop_all()
        self.states.release_all()
        if clear_ledgers:
            self.states.forget_names()

    def prepare_fork_request(self, src_state: Any, dst_req_ids: list[str], copies: Any) -> list[str]:
        """Forks a request. Children beyond the free slots or the free pages are prefilled separately."""
        with_slots = dst_req_ids[: len(self.states.free)]
        forked: list[str] = super().prepare_fork_request(src_state, with_slots, copies)
        source = self.states.slot_of[src_state.request_id]
        self.states.copy([source] * len(forked), [self.states.hold(request) for request in forked])
        return forked


def longest_buffer() -> int:
    """Returns the largest size of a pool on mps, in bytes. A pool is one tensor."""
    return _C.device_facts()["max_buffer_length"] if torch.backends.mps.is_available() else sys.maxsize


def slots_and_share(cb_config: Any, slot_bytes: int) -> tuple[int, float]:
    """Returns the number of requests that get states, and their part of the memory."""
    _, total, reserved, allocated = get_device_and_memory_breakdown()
    slots, available = cb_config.max_requests_per_batch, total - max(reserved, allocated)
    if available <= 0:  # unknown
        return slots, 0.0
    affordable = int(available * cb_config.max_memory_percent * SHARE_OF_STATES) // slot_bytes
    slots = max(1, min(slots, affordable, longest_buffer() // slot_bytes))
    return slots, slots * slot_bytes / available


class HybridInputs(input_outputs.ContinuousBatchingIOs):
    def get_model_kwargs(self, use_padding: bool = False) -> Any:
        arguments = super().get_model_kwargs(use_padding)
        if self.cache.attends:  # transformers passes a mask of four dimensions on unchanged
            arguments |= {"attention_mask": self.position_ids.new_ones(1, 1, 1, 1), "is_causal": False}
        if isinstance(arguments["attention_mask"], dict):  # the masks by type of layer
            arguments["attention_mask"] |= {LINEAR: None}
        return arguments

    def prepare_batch_tensors(self, requests_in_batch: list[Any], *args: Any, **kwargs: Any) -> None:
        if continuous_api.ContinuousBatchingIOs is input_outputs.ContinuousBatchingIOs:
            raise RuntimeError(
                "continuous batching: expected torch_gdn to stay enabled while a manager serves a model, got disable()"
            )
        parts = [Part(x.state.request_id, x.state.position_offset, x.query_length) for x in requests_in_batch]
        sharing = self.cache.use_prefix_sharing
        checkpoints = self.cache.prefixes.begin(requests_in_batch) if sharing else {}
        super().prepare_batch_tensors(requests_in_batch, *args, **kwargs)  # this moves the requests' positions
        self.cache.states.begin_step(parts, checkpoints)
        if self.cache.attends:
            pages = self.cache.cache_allocators[FULL_ATTENTION]
            self.cache.paged_step = paged_attention.step_of(pages, parts, self.device)
