"""The file of a cache, a safetensors file: version 3.

Metadata: format "torch_gdn.aura", version "3", scheme, table, seed, dtype, tail, sinks, tile_means. Tensors, for "key"
and "value" each: <key or value>.codes [B, HK, T, W] int32 (u32 words), .norms [B, HK, T] float16, .codebook [2^bits],
.boundaries [2^bits - 1] and .signs [D] float32. The file thus has everything that reading it needs, even if later
tables differ. With means of keys there is "key.tile_means" [B, HK, ceil(T / 128), D] float16. "exact.keys" and
"exact.values" [B, HK, rows, D] in `dtype` are the tokens that are no codes: first those before the codes, then those
after them.

Older versions are still read. Version 2 has no means of tiles, and they become zeros. Version 1 has norms in float32,
and neither tail nor sinks.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_gdn.aura.coded_tensor import DTYPES, dtype_name, entries, has_tile_means
from torch_gdn.aura.scheme import Scheme

FORMAT, VERSIONS = "torch_gdn.aura", ("1", "2", "3")
NAMES = {dtype_name(dtype): dtype for dtype in DTYPES}


@dataclass(frozen=True)
class Content:
    scheme: Scheme
    seed: int
    dtype: torch.dtype
    tail: int
    sinks: int
    tensors: dict[str, Tensor]  # by name, such as "key.codes"; contiguous, on the CPU

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Returns B, HK, the number of tokens that are codes, and D."""
        batch, heads, tokens = self.tensors["key.norms"].shape
        return batch, heads, tokens, self.tensors["key.signs"].shape[0]

    @property
    def exact(self) -> int:
        """Returns the number of exact tokens."""
        rows = self.tensors.get("exact.keys")
        return rows.shape[2] if rows is not None and rows.dim() == 4 else 0

    @property
    def tokens(self) -> int:
        return self.shape[2] + self.exact

    def parts(self, name: str, like: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors of "key", "value" or "exact", which must have the shapes and dtypes of `like`."""
        result = {}
        for part, expected in like.items():
            x, shape = self.tensors.get(f"{name}.{part}"), list(expected.shape)
            fits = x is not None and list(x.shape) == shape and x.dtype == expected.dtype
            require(fits, f"{name}.{part} of shape {shape}, {dtype_name(expected.dtype)}", x)
            result[part] = self.tensors[f"{name}.{part}"]
        return result


def write(path: str | os.PathLike[str], content: Content) -> None:
    from safetensors.torch import save_file

    save_file(content.tensors, path, {"format": FORMAT, "version": VERSIONS[-1]} | description(content))


def description(content: Content) -> dict[str, str]:
    """Returns the metadata that reading the tensors needs."""
    scheme, dtype = content.scheme, dtype_name(content.dtype)
    told = {"scheme": scheme.name, "table": scheme.table, "seed": str(content.seed), "dtype": dtype}
    told |= {"tail": str(content.tail), "sinks": str(content.sinks)}
    return told | {"tile_means": str(has_tile_means(content.tail))}


def read(path: str | os.PathLike[str]) -> Content:
    metadata, tensors = opened(path, FORMAT)
    return described(metadata, tensors)


def opened(path: str | os.PathLike[str], expected_format: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Returns the metadata and tensors of a safetensors file of this format. Norms become float16 in every version."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
    except SafetensorError as error:
        raise ValueError(f"load: path: expected a safetensors file, got {error}") from None
    version = metadata.get("version")
    if metadata.get("format") != expected_format or version not in VERSIONS:
        expected = f"format {expected_format!r} version {' or '.join(map(repr, VERSIONS))}"
        raise ValueError(f"load: path: expected {expected}, got {metadata.get('format')!r} version {version!r}")
    means = metadata.get("means", "False")
    require(means == "False", "means 'False', because means of vectors are no longer read", means)
    if version == "1":
        tensors = {name: x.half() if name.endswith(".norms") else x for name, x in tensors.items()}
    return metadata, tensors


def described(metadata: dict[str, str], tensors: dict[str, Tensor]) -> Content:
    """Returns what `description` wrote about these tensors."""
    norms, signs = tensors.get("key.norms"), tensors.get("key.signs")
    require(norms is not None and norms.dim() == 3, "key.norms of shape [B, HK, T]", norms)
    require(signs is not None and signs.dim() == 1, "key.signs of shape [D]", signs)
    dtype, seed = metadata.get("dtype", ""), metadata.get("seed", "")
    require(dtype in NAMES, f"dtype {', '.join(NAMES)}", dtype)
    scheme = Scheme(metadata.get("scheme", ""), metadata.get("table", ""))
    require(seed.lstrip("-").isdecimal(), "a seed", seed)
    tail, sinks = exact_sizes(metadata)
    if has_tile_means(tail) and metadata.get("tile_means") != "True":
        assert norms is not None and signs is not None  # they were required above
        batch, heads, tokens = norms.shape
        tiles_shape = (batch, heads, entries("tile_means", tokens), signs.shape[0])
        tensors = tensors | {"key.tile_means": torch.zeros(tiles_shape, dtype=torch.float16)}
    return Content(scheme, int(seed), NAMES[dtype], tail, sinks, tensors)


def exact_sizes(metadata: dict[str, str]) -> tuple[int, int]:
    """Returns the sizes of the tail and of the sinks. A file of version 1 has neither."""
    tail, sinks = metadata.get("tail", "0"), metadata.get("sinks", "0")
    require(tail.isdecimal(), "a tail", tail)
    require(sinks.isdecimal(), "a number of sinks", sinks)
    return int(tail), int(sinks)


def require(holds: bool, expected: str, got: Any) -> None:
    if not holds:
        what = f"{dtype_name(got.dtype)} of shape {list(got.shape)}" if isinstance(got, Tensor) else repr(got)
        raise ValueError(f"load: path: expected {expected}, got {what}")
