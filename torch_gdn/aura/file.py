"""A cache as a safetensors file: version 1.

Metadata: format "torch_gdn.aura", version "1", scheme, table, means, seed, dtype. Tensors, for "key" and "value" each:
<half>.codes [B, HK, T, W] int32 (u32 words), .norms and perhaps .means [B, HK, T], .codebook [2^bits], .boundaries
[2^bits - 1] and .signs [D] float32: what it takes to read them is in the file, whatever later tables or seeds are.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from torch_gdn.aura.kv_cache import DTYPES, KVCache
from torch_gdn.aura.scheme import Scheme

FORMAT, VERSION = "torch_gdn.aura", "1"
TABLES = ("codebook", "boundaries", "signs")
NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def write(cache: KVCache, path: str | os.PathLike[str]) -> None:
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, half in (("key", cache.keys), ("value", cache.values)):
        parts = {part: x[:, :, : cache.length] for part, x in half.tensors().items()}
        parts |= {part: getattr(half, part) for part in TABLES}
        tensors |= {f"{name}.{part}": x.cpu().contiguous() for part, x in parts.items()}
    scheme = cache.scheme
    metadata = {"format": FORMAT, "version": VERSION, "scheme": scheme.name, "table": scheme.table}
    metadata |= {"means": str(scheme.means), "seed": str(cache.seed), "dtype": str(cache.dtype).removeprefix("torch.")}
    save_file(tensors, path, metadata)


def read(path: str | os.PathLike[str], device: torch.device | str, capacity: int | None) -> KVCache:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
    except SafetensorError as error:
        raise ValueError(f"load: path: expected a safetensors file, got {error}") from None
    identity = f"{metadata.get('format')!r} version {metadata.get('version')!r}"
    if identity != f"{FORMAT!r} version {VERSION!r}":
        raise ValueError(f"load: path: expected format {FORMAT!r} version {VERSION!r}, got {identity}")
    cache = empty(metadata, tensors, device, capacity)
    for name, half in (("key", cache.keys), ("value", cache.values)):
        for part in half.tensors():
            getattr(half, part)[:, :, : cache.length] = tensors[f"{name}.{part}"].to(device)
        for part in TABLES:
            setattr(half, part, tensors[f"{name}.{part}"].to(device))
    return cache


def empty(
    metadata: dict[str, str], tensors: dict[str, Tensor], device: torch.device | str, capacity: int | None
) -> KVCache:
    """A cache that the file's tensors fit into, which is checked."""
    norms, signs = tensors.get("key.norms"), tensors.get("key.signs")
    dtype = NAMES.get(metadata.get("dtype", ""))
    require(norms is not None and norms.dim() == 3, "key.norms of shape [B, HK, T]", norms)
    require(signs is not None and signs.dim() == 1, "key.signs of shape [D]", signs)
    require(dtype is not None, f"dtype {', '.join(NAMES)}", metadata.get("dtype"))
    assert norms is not None and signs is not None and dtype is not None
    batch, heads, length = norms.shape
    scheme = Scheme(metadata.get("scheme", ""), metadata.get("table", ""), metadata.get("means") == "True")
    seed = metadata.get("seed", "")
    require(seed.lstrip("-").isdecimal(), "a seed", seed)
    room = length if capacity is None else capacity
    if room < length:
        raise ValueError(f"load: capacity: expected at least the {length} tokens of the file, got {room}")
    cache = KVCache(scheme, batch, heads, signs.shape[0], room, device, dtype, seed=int(seed))
    cache.length = length
    for name, half in (("key", cache.keys), ("value", cache.values)):
        fits = half.tensors() | {part: getattr(half, part) for part in TABLES}
        for part, like in fits.items():
            x, shape = tensors.get(f"{name}.{part}"), list(like.shape)
            if part not in TABLES:
                shape[2] = length
            expected = f"{name}.{part} of shape {shape}, {like.dtype}"
            require(x is not None and list(x.shape) == shape and x.dtype == like.dtype, expected, x)
    return cache


def require(holds: bool, expected: str, got: Any) -> None:
    if not holds:
        what = f"{got.dtype} of shape {list(got.shape)}" if isinstance(got, Tensor) else repr(got)
        raise ValueError(f"load: path: expected {expected}, got {what}")
