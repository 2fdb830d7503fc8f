"""Attention to pages that hold AURA's codes in place of keys and values: additional_config={"aura": "8v4"}.

A page is [block_size, KV heads, cell]. A cell is [key codes | value codes | key norm | value norm]. It has
Scheme.bytes_per_token(D) bytes, from which vLLM computes the size of its pools. Codes are whole 32-bit words, and the
two float16 norms share one. Slots of a page have one stride, so `aura_encode_` writes in place. Attention reads a
request's newest and first tokens from exact rows. The means of keys are in a tensor of their own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_layout import KVCacheLayout

import torch_gdn
from torch_gdn.aura import Scheme
from torch_gdn.aura.codebooks import aura_signs, boundaries
from torch_gdn_engines.vllm.attention import PagedAttention, PagedBackend, PagedMetadata, PagedMetadataBuilder

if TYPE_CHECKING:
    from torch_gdn_engines.vllm.ring_buffers import LayerRows


class AuraPagedAttention(PagedAttention):
    scheme: ClassVar[Scheme]
    exact: LayerRows | None = None  # the model runner sets this
    tile_means: Tensor | None = None  # [blocks, block_size / 128, KV heads, D], likewise

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tables: list[tuple[Tensor, Tensor | None, Tensor]] = []

    def parts(self, kv_cache: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns views of the pool, [blocks, block_size, KV heads, ..]: codes and norms of keys, then of values."""
        words = kv_cache.transpose(1, 2).view(torch.int32)
        key, value = (-(-self.head_size * bits // 32) for bits in (self.scheme.key_bits, self.scheme.value_bits))
        norms = words[..., key + value :].view(torch.float16)
        return words[..., :key], norms[..., 0], words[..., key : key + value], norms[..., 1]

    def tables_of(self, layer: Any, device: torch.device) -> list[tuple[Tensor, Tensor | None, Tensor]]:
        """Returns the tables of keys and of values: signs, boundaries (None for a trellis) and codebook.

        Signs differ between layers. A layer that reads another layer's codes has that layer's signs.
        """
        if not self.tables:
            name = self.kv_sharing_target_layer_name or layer.layer_name
            seed = next((int(part) for part in name.split(".") if part.isdigit()), 0)
            for own, table in zip((2 * seed, 2 * seed + 1), self.scheme.codebooks(self.head_size), strict=True):
                between = boundaries(table)
                signs = aura_signs(self.head_size, own).to(device)
                self.tables.append((signs, None if between is None else between.to(device), table.to(device)))
        return self.tables

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        slots = slot_mapping[: key.shape[0]]
        parts = self.parts(kv_cache)
        means = None if self.tile_means is None else flat_slots(self.tile_means)
        encoded = ((key, *parts[:2], means), (value, *parts[2:], None))
        for (x, codes, norms, its_means), tables in zip(encoded, self.tables_of(layer, key.device), strict=True):
            x = x[: slots.shape[0]].transpose(0, 1)[None]
            torch.ops.gdn.aura_encode_(x, slots, *tables, flat_slots(codes), flat_slots(norms), its_means)

    def attend(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        m: PagedMetadata,
        output: Tensor,
    ) -> Tensor:
        """Encodes `key` and `value`, attends to them and to the exact rows of earlier steps, and then stores them as
        exact rows."""
        key_codes, key_norms, value_codes, value_norms = self.parts(kv_cache)
        (key_signs, _, key_table), (value_signs, _, value_table) = self.tables_of(layer, query.device)
        exact = self.exact if m.exact is not None else None
        new = [x[: m.num_actual_tokens] for x in (key, value) if x is not None]
        if exact is not None and self.tile_means is not None:
            exact.find_means(m, new[0], self.tile_means)
        if new and self.kv_sharing_target_layer_name is None:
            self.do_kv_cache_update(layer, new[0], new[1], kv_cache, m.slot_mapping)
        out = torch_gdn.aura_paged_attention(
            query,
            key_codes,
            key_norms,
            key_table,
            key_signs,
            value_codes,
            value_norms,
            value_table,
            value_signs,
            scale=self.scale,
            causal=m.causal,
            window=self.window,
            sinks=self.sinks,
            out=output,
            key_tile_means=self.tile_means,
            **m.sequences,
            **(exact.arguments(m.exact, *new) if exact is not None else {}),
        )
        if exact is not None:
            exact.write(m.exact, *new)
        return out


class AuraMetadataBuilder(PagedMetadataBuilder):
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PagedMetadata:
        m = super().build(common_prefix_len, common_attn_metadata, fast_build)
        layers = self.vllm_config.compilation_config.static_forward_context
        exact = next((x for x in (layers[name].impl.exact for name in self.layer_names) if x is not None), None)
        if exact is not None:
            m.exact = exact.slots.step(m.cu_seqlens, m.seq_lens, m.num_actual_tokens)
        return m


def flat_slots(part: Tensor) -> Tensor:
    """Returns [blocks, block_size, KV heads, ..] as a view [1, KV heads, slots, ..], which `aura_encode_` takes."""
    blocks, block_size, heads, *rest = part.shape
    strides = part.stride()
    if strides[0] != block_size * strides[1]:
        raise ValueError(f"kv_cache: expected blocks without gaps between them, got strides {strides}")
    shape, order = (1, heads, blocks * block_size, *rest), (0, strides[2], strides[1], *strides[3:])
    return part.as_strided(shape, order, part.storage_offset())


class AuraPagedBackend(PagedBackend):
    implementation: ClassVar[type[AuraPagedAttention]]
    forward_includes_kv_cache_update = True  # which needs the metadata

    @classmethod
    def get_impl_cls(cls) -> type[PagedAttention]:
        return cls.implementation

    @staticmethod
    def get_builder_cls() -> type[PagedMetadataBuilder]:
        return AuraMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBNHC,)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        if spec.state_content_bytes is not None:
            return spec
        return replace(spec, state_content_bytes=cls.implementation.scheme.bytes_per_token(spec.head_size))


@cache
def backend_of(scheme: str) -> type[AuraPagedBackend]:
    """Returns the class for a scheme. vLLM asks the class for sizes in places where it has no configuration."""
    own = {"__module__": __name__}  # otherwise an abstract class has the module abc
    implementation = type(f"AuraPagedAttention_{scheme}", (AuraPagedAttention,), {"scheme": Scheme(scheme), **own})
    return type(f"AuraPagedBackend_{scheme}", (AuraPagedBackend,), {"implementation": implementation, **own})


def aura_scheme() -> str | None:
    """Returns the scheme of the engine's additional_config, or None if it asks for keys and values as they are."""
    config = get_current_vllm_config_or_none()
    additional = config.additional_config if config is not None else None
    return additional.get("aura") if isinstance(additional, dict) else None


def backend_path() -> str:
    scheme = aura_scheme()
    backend = PagedBackend if scheme is None else backend_of(scheme)
    return f"{backend.__module__}.{backend.__name__}"


def register() -> None:
    register_backend(AttentionBackendEnum.CUSTOM, f"{PagedBackend.__module__}.{PagedBackend.__name__}")


def __getattr__(name: str) -> Any:
    """Finds the classes of `backend_of` by name, because vLLM imports a backend by its path."""
    prefix, _, scheme = name.partition("_")
    if prefix != "AuraPagedBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return backend_of(scheme)
