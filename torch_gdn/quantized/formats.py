"""Describes the formats of quantised files: their tensors, how to convert them, and what is refused.

A format has a function `read`, which makes its `Format` of a file's `quantization_config` and raises what
`configuration.read` does. What an engine or transformers knows about a format, it asks the `Format`.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from torch_gdn.quantized.packed_weight import PackedWeight
from torch_gdn.reference.quantized import BLOCK

EXPERTS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}  # experts' tensors: their matrices
Sizes = tuple[int, ...]
SUPPORTED = (
    "weights of bfloat16, float16, float32, of FP8 as fp8 (in blocks of 128 x 128), ModelOpt and compressed-tensors "
    "(float-quantized) write them, or of 4 or 8 bits as compressed-tensors (pack-quantized, mxfp4-pack-quantized), "
    "GPTQ, AWQ, AutoRound and, except in SGLang, MLX (affine, mxfp4) write them"
)


class OtherFormat(ValueError):
    """The files have weights that torch_gdn has no kernels for. transformers may load them by its own code."""


def refusal(got: str, error: type[ValueError] = ValueError) -> ValueError:
    return error(f"quantization: expected {SUPPORTED}, on mps, got {got}")


class Stored(NamedTuple):
    """A tensor of the files, which belongs to a matrix [N, K]. `rows` and `columns` are what one of its own covers."""

    name: str
    rows: str = "one"  # "one", or "word": as many as an int32 word holds codes
    columns: str = "one"  # or "word", or "group": those that share a scale
    transposed: bool = False  # [columns, rows]
    is_e4m3: bool = False  # bytes of float8_e4m3fn
    is_exponent: bool = False  # bytes of e8m0

    @property
    def has_words(self) -> bool:
        return "word" in (self.rows, self.columns)

    @property
    def is_float(self) -> bool:
        return not self.has_words and not self.is_e4m3 and not self.is_exponent

    def shape(self, rows: int, columns: int, packing: Packing) -> tuple[int, int]:
        """Returns the tensor's shape, by the rows and columns of the matrix."""
        per = {"one": 1, "word": packing.per_word, "group": packing.group_size}
        rows, columns = -(-rows // per[self.rows]), -(-columns // per[self.columns])
        return (columns, rows) if self.transposed else (rows, columns)


@dataclass(frozen=True)
class Packing:
    """Says how a matrix is packed."""

    bits: int  # 4 or 8
    group_size: int  # the columns that share a scale
    tensors: tuple[Stored, ...]  # those of its format that the files have for it
    is_ordered: bool = False  # whether they have the group of each column, too
    is_e4m3: bool = False  # whether it has numbers of 8 bits, and not codes
    is_mxfp4: bool = False  # whether it has numbers of 4 bits

    @property
    def per_word(self) -> int:
        """Returns the columns in an element of the weight."""
        return 1 if self.is_e4m3 else 32 // self.bits


@dataclass(frozen=True)
class Format:
    """What the files of a quantised model hold, by their configuration."""

    method: str  # the format's name in a configuration
    tensors: tuple[Stored, ...]  # of a packed matrix; first the codes, then the scales
    convert: Callable[..., PackedWeight]  # takes the tensors by name, and `bits`
    optional: tuple[str, ...] = ()  # which of these tensors a matrix may lack
    g_idx: str | None = None  # the name of a tensor with the group of each column [K], which a matrix may have
    ignored: tuple[str, ...] = ()  # names of tensors that say nothing new
    group_sizes: frozenset[int] = frozenset()  # those of all matrices, if the configuration names them
    act_order: bool = False  # whether the configuration announces columns in another order than their groups'
    experts_are_stacked: bool = False  # whether a layer's experts are one tensor
    # The format in which an engine holds this one's tensors until a layer is complete, because converting a layer from
    # there needs no second copy. None for the same format.
    held_as: Format | None = None
    translate: Callable[[str, Tensor, int], Tensor] | None = None  # makes a tensor of that format, by its name and rows
    left_out: str = ""  # what else the files quantise, which stays in the model's dtype

    @property
    def held(self) -> Format:
        return self.held_as or self

    @property
    def has_float8(self) -> bool:
        return any(each.is_e4m3 for each in self.tensors)

    @property
    def endings(self) -> tuple[str, ...]:
        """Returns the last parts of all names that a packed matrix may have."""
        return (*(each.name for each in self.tensors), *([self.g_idx] if self.g_idx else []), *self.ignored)

    def tensors_of(self, name: str, shapes: Mapping[str, Sizes]) -> dict[str, Sizes]:
        """Returns the shapes of a matrix's tensors, by the last part of their names, or none if it is not packed.

        A tensor "weight" alone is not: MLX names the unquantised one so, too.
        """
        own = {ending: shapes[f"{name}.{ending}"] for ending in self.endings if f"{name}.{ending}" in shapes}
        return own if own.keys() - {"weight"} else {}

    def matrices(self, layer: str, names: Iterable[str], shapes: Mapping[str, Sizes]) -> dict[str, dict[str, Sizes]]:
        """Returns `tensors_of` the matrices of a layer, or nothing if none is packed.

        Raises:
            ValueError: some are packed, and some are not.
        """
        own = {name: self.tensors_of(name, shapes) for name in names}
        if any(own.values()) and (plain := [name for name, tensors in own.items() if not tensors]):
            raise unlike(layer, f"unquantised {', '.join(plain)}")
        return own if all(own.values()) else {}

    def packing(self, name: str, shapes: Mapping[str, Sizes], columns: int, rows: int | None = None) -> Packing:
        """Reads how a matrix is packed from the shapes of its tensors, whatever the configuration says.

        Args:
            name: the matrix's, for errors.
            shapes: by the last part of the tensors' names. Dimensions before the last two are experts.
            columns: of the matrix.
            rows: of the matrix. Default: as many as it has scales.

        Raises:
            ValueError: a tensor is missing, has another shape, or the ops do not take bits or group size.
        """
        self.expect_tensors(name, shapes)
        codes, scales = self.tensors[:2]
        scale_rows, groups = shapes[scales.name][-2:][:: -1 if scales.transposed else 1]
        rows = rows or scale_rows
        bits = 32 * math.prod(shapes[codes.name][-2:]) / (rows * columns)
        if bits not in (4, 8):
            raise ValueError(f"{name}: expected weights of 4 or 8 bits on mps, got {bits:g} bits")
        size = columns // groups
        if size < 32 or size % 32 or columns % size:
            limits = f"a multiple of 32 and divides {columns} columns"
            raise ValueError(f"{name}: expected a group size that is {limits}, got {size}")
        if self.group_sizes and groups > 1 and size not in self.group_sizes:
            sizes = " or ".join(map(str, sorted(self.group_sizes)))
            raise ValueError(f"{name}: expected a group size of {sizes}, as the configuration says, got {size}")
        held = tuple(each for each in self.held.tensors if each.name in shapes)
        packing = Packing(int(bits), size, held, self.g_idx in shapes)
        for each in self.tensors:
            expected = each.shape(rows, columns, packing)
            if (got := shapes.get(each.name, expected)[-2:]) != expected:
                raise ValueError(f"{name}: expected {each.name} of shape {list(expected)}, got {list(got)}")
        return packing

    def expect_tensors(self, name: str, shapes: Mapping[str, Sizes]) -> None:
        required = [each.name for each in self.tensors if each.name not in self.optional]
        if missing := [each for each in required if each not in shapes]:
            raise ValueError(
                f"{name}: expected the tensors {', '.join(required)} in the files, got no {', '.join(missing)}"
            )

    def by_expert(self, shapes: Mapping[str, Sizes]) -> dict[str, Sizes]:
        """Returns the shapes, and those of the first expert's matrices where FP8 files have a layer's experts, gate
        above up, in one tensor. Engines cut its rows, and those of its scales, into halves.

        Raises:
            ValueError: scales that cannot be cut so.
        """
        added: dict[str, Sizes] = {}
        weight, scale = (each.name for each in self.tensors[:2])
        for fused, parts in EXPERTS.items() if self.has_float8 else ():
            ending = f".experts.{fused}"
            for name in (name for name in shapes if name.endswith(ending + scale.removeprefix(weight))):
                layer = name[: name.rindex(ending)]
                codes, scales = shapes.get(f"{layer}{ending}", ()), shapes[name]
                if not are_cut_alike(codes, scales, len(parts)):
                    expected = f"scales [experts, rows, columns] of rows, or of blocks of {BLOCK} rows of gate or of up"
                    raise ValueError(f"{name}: expected {expected}, got {list(scales)} for {list(codes)}")
                for part in parts:
                    added[f"{layer}.experts.0.{part}.{weight}"] = (codes[1] // len(parts), codes[2])
                    added[f"{layer}.experts.0.{part}.{scale}"] = (scales[1] // len(parts), scales[2])
        return {**shapes, **added}

    def say_what_is_left_out(self) -> None:
        if self.left_out:
            warnings.warn(f"torch_gdn: the weights stay in FP8; {self.left_out} are left out", stacklevel=3)


def are_cut_alike(codes: Sizes, scales: Sizes, parts: int) -> bool:
    """Returns whether parts of the rows of FP8 numbers have their own rows of scales."""
    if len(codes) != 3 or len(scales) != 3 or scales[1] % parts or codes[1] % parts:
        return False
    return parts == 1 or scales[1] == codes[1] or codes[1] // parts % BLOCK == 0


def unlike(layer: str, got: object) -> ValueError:
    return ValueError(f"{layer}: expected matrices that are all quantised the same way, got {got}")


def shapes_in(files: Iterable[Any] | None) -> dict[str, Sizes]:
    """Returns the shapes of all tensors of safetensors files by name.

    Raises:
        ValueError: files that are not safetensors, or none.
    """
    shapes: dict[str, Sizes] = {}
    for path in files or ():
        if not str(path).endswith(".safetensors"):
            raise ValueError(f"quantization: expected safetensors files, got {path}")
        shapes |= {name: tuple(x["shape"]) for name, x in tensors_in(path).items()}
    if not shapes:
        raise ValueError("quantization: expected the files of the model, got a state dict or no file")
    return shapes


def tensors_in(path: str | Path) -> dict[str, Any]:
    """Returns the shape, dtype and data_offsets of the tensors of a safetensors file, by name.

    Raises:
        ValueError: another file, such as Git LFS leaves where it fetched none, or a part of one.
    """
    with open(path, "rb") as file:
        start, size = file.read(8), Path(path).stat().st_size
        length = int.from_bytes(start, "little")
        if not 0 < length <= size - 8:
            raise ValueError(f"{path}: expected a safetensors file, got {size} bytes that begin with {start!r}")
        header = file.read(length)
    try:
        tensors: dict[str, Any] = {name: x for name, x in json.loads(header).items() if name != "__metadata__"}
        whole = 8 + length + max((x["data_offsets"][1] for x in tensors.values()), default=0)
    except (ValueError, AttributeError, TypeError, LookupError) as error:
        got = f"{size} bytes that begin with {start + header[:8]!r}"
        raise ValueError(f"{path}: expected a safetensors file, got {got}") from error
    if size < whole:
        raise ValueError(f"{path}: expected a whole safetensors file of {whole} bytes, got {size}")
    return tensors
