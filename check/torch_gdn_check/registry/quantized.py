"""Entries of the ops on packed weights: codes of 4 and 8 bits, e4m3 numbers, and MXFP4."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torch_gdn_check.registry import invalid
from torch_gdn_check.registry.gdn import LARGE
from torch_gdn_check.registry.inputs import Call, columns_apart, unaligned
from torch_gdn_check.registry.invalid import change, put
from torch_gdn_check.registry.models import BF16, DTYPES, F16, F32
from torch_gdn_check.registry.registry import Change, Hostile, Invalid, Named, OpEntry, Point, register

# The bounds are for sums in f32 of up to a thousand products, or of a few hundred in tiles, which add 8 at a time to
# one sum.
F32_BOUND = 6e-7


BLOCK = 128  # rows and columns of e4m3 numbers that share a scale


def draw_packed(
    *rows: int, columns: int, bits: int, group: int, dtype: torch.dtype, zero_points: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws codes of all values, and scales and biases (or zero points) that turn them into numbers around 0."""
    weight = torch.randint(-(2**31), 2**31, (*rows, columns * bits // 32), dtype=torch.int64).int()
    scales = (0.5 + torch.rand(*rows, columns // group)) / 2 ** (bits - 1)
    biases = -(2 ** (bits - 1)) * scales + 0.1 * torch.randn(scales.shape)
    points = torch.randint(0, 2**bits, scales.shape, dtype=torch.uint8)
    return weight, scales.to(dtype), points if zero_points else biases.to(dtype)


def draw_e4m3(*rows: int, columns: int, scales: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Draws bytes of all finite numbers, and so many rows and columns of scales."""
    weight = torch.randint(0, 256, (*rows, columns)).byte()
    weight -= ((weight & 0x7F) == 0x7F).byte()  # NaN
    return weight, ((0.5 + torch.rand(*rows[:-1], *scales)) / 128).to(dtype)


def draw_mxfp4(*rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Draws e2m1 numbers, and exponents that make them numbers around 0."""
    weight = torch.randint(-(2**31), 2**31, (*rows, columns // 8), dtype=torch.int64).int()
    return weight, torch.randint(122, 128, (*rows, columns // 32)).byte()


@dataclass(frozen=True)
class PackedPoint(Point):
    """How weights are packed."""

    bits: int = 4
    group: int = 32
    scale_dtype: torch.dtype | None = None  # None means dtype
    zero_points: bool = False
    aligned: bool = True  # rows start at a multiple of 4 elements
    e4m3: bool = False  # numbers in place of codes; bits are 8
    e4m3_scales: str = "blocks"  # what has a scale: blocks, rows or all
    mxfp4: bool = False  # numbers in place of codes; bits are 4

    def placed(self, x: Tensor) -> Tensor:
        return x if self.aligned else unaligned(x)

    def tensors(self, *rows: int, columns: int, bits: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Draws codes or numbers, scales, and the biases of codes."""
        N, dtype, biases = rows[-1], self.scale_dtype or self.dtype, None
        if self.mxfp4:
            weight, scales = draw_mxfp4(*rows, columns=columns)
        elif self.e4m3:
            blocks = (-(-N // BLOCK), -(-columns // BLOCK))
            sizes = {"blocks": blocks, "rows": (N, 1), "all": (1, 1)}[self.e4m3_scales]
            weight, scales = draw_e4m3(*rows, columns=columns, scales=sizes, dtype=dtype)
        else:
            options: Any = {"bits": bits, "group": self.group, "dtype": dtype, "zero_points": self.zero_points}
            weight, scales, biases = draw_packed(*rows, columns=columns, **options)
        return self.placed(weight), self.placed(scales), None if biases is None else self.placed(biases)


@dataclass(frozen=True)
class QuantizedPoint(PackedPoint):
    """M rows of K numbers, times a packed [N, K]."""

    M: int = 3
    N: int = 40
    K: int = 128
    biased: bool = False
    indexed: bool = False

    def draw_weight(self) -> Call:
        tensors = self.tensors(self.N, columns=self.K, bits=self.bits)
        return dict(zip(("weight", "scales", "biases"), tensors, strict=True))


def draw_linear(point: QuantizedPoint) -> Call:
    call: Call = {"x": point.placed(torch.randn(point.M, point.K).to(point.dtype))} | point.draw_weight()
    return call | ({"bias": torch.randn(point.N).to(point.dtype)} if point.biased else {})


def draw_dequantize(point: QuantizedPoint) -> Call:
    call = point.draw_weight() | {"bits": point.bits, "dtype": point.dtype}
    return call | ({"indices": torch.randint(0, point.N, (point.M, 2))} if point.indexed else {})


def linear_bounds(point: QuantizedPoint, call: Call, exact: Named) -> dict[str, float]:
    return dict.fromkeys(exact, F32_BOUND) if point.dtype == F32 else {}


def wrong_scales(weight: str, scales: str, biases: str) -> Iterator[Invalid]:
    """Yields wrong scales and biases of a call with packed weights."""
    yield Invalid(weight, TypeError, "floats", change(weight, torch.Tensor.float))
    yield Invalid(weight, ValueError, "a word too few", change(weight, lambda w: w[..., 1:]))
    yield Invalid(scales, TypeError, "integers", change(scales, torch.Tensor.int))
    yield Invalid(scales, ValueError, "a group too few", change(scales, lambda x: x[..., 1:]))
    yield Invalid(scales, ValueError, "no groups", change(scales, lambda x: x[..., :0]))
    yield Invalid(scales, ValueError, "groups of 16", change(scales, lambda x: torch.cat([x, x], -1)))
    yield Invalid(biases, TypeError, "another dtype", change(biases, torch.Tensor.half))
    yield Invalid(biases, TypeError, "zero points for scales of 32 bits", zero_points_of_float32(scales, biases))
    yield Invalid(biases, ValueError, "a row fewer", change(biases, lambda x: x[..., 1:, :]))
    yield from invalid.apart(weight, scales, biases)


def zero_points_of_float32(scales: str, biases: str) -> Callable[[Call], Call]:
    return lambda call: call | {scales: call[scales].float(), biases: call[biases].byte()}


def of_another(entry: OpEntry[Any], point: Point, form: str, wrong: Iterable[Invalid]) -> Iterator[Invalid]:
    """Yields these changes of the call at a point, which replaces the small call."""

    def of_point(change: Change) -> Change:
        return lambda call: change(entry.call(point))

    for bad in wrong:
        yield replace(bad, what=f"{form}, {bad.what}", change=of_point(bad.change))


def wrong_e4m3(weight: str, scales: str, biases: str) -> Iterator[Invalid]:
    """Yields changes of a call with e4m3 numbers."""
    codes = change(weight, lambda w: torch.zeros(*w.shape[:-1], w.shape[-1] // 4, dtype=torch.int32))
    yield Invalid(biases, ValueError, "biases", lambda call: call | {biases: call[scales]})
    yield Invalid(biases, ValueError, "none for codes", codes)
    yield Invalid(scales, TypeError, "integers", change(scales, torch.Tensor.int))
    yield Invalid(scales, ValueError, "a row too many", change(scales, lambda x: torch.cat([x, x], -2)))
    yield Invalid(scales, ValueError, "a column too many", change(scales, lambda x: torch.cat([x, x], -1)))
    yield Invalid(scales, ValueError, "no columns", change(scales, lambda x: x[..., :0]))
    yield Invalid(scales, ValueError, "a dimension too few", change(scales, lambda x: x[0]))
    yield from invalid.apart(weight)


def wrong_mxfp4(weight: str, scales: str, biases: str) -> Iterator[Invalid]:
    """Yields changes of a call with MXFP4."""
    yield Invalid(biases, ValueError, "biases", lambda call: call | {biases: call[scales]})
    yield Invalid(scales, ValueError, "a group too few", change(scales, lambda x: x[..., 1:]))
    yield Invalid(scales, ValueError, "a row fewer", change(scales, lambda x: x[..., 1:, :]))
    yield Invalid(scales, ValueError, "columns apart", change(scales, columns_apart))
    yield Invalid(biases, ValueError, "scales of floats", change(scales, Tensor.float))
    yield Invalid(scales, ValueError, "twice the codes", change(weight, lambda w: torch.cat([w, w], -1)))


MXFP4_SMALL = QuantizedPoint(N=40, K=96, mxfp4=True)
E4M3_SMALL = QuantizedPoint(N=200, K=130, bits=8, e4m3=True)


def wrong_numbers(entry: OpEntry[QuantizedPoint]) -> Iterator[Invalid]:
    yield from of_another(entry, E4M3_SMALL, "e4m3", wrong_e4m3("weight", "scales", "biases"))
    yield from of_another(entry, MXFP4_SMALL, "MXFP4", wrong_mxfp4("weight", "scales", "biases"))


def wrong_linear(entry: OpEntry[QuantizedPoint]) -> Iterator[Invalid]:
    yield from wrong_scales("weight", "scales", "biases")
    yield from wrong_numbers(entry)
    yield Invalid("x", ValueError, "no dimension", change("x", lambda x: x[0, 0]))


def wrong_dequantize(entry: OpEntry[QuantizedPoint]) -> Iterator[Invalid]:
    yield from (bad for bad in wrong_scales("weight", "scales", "biases") if bad.what != "a word too few")  # it is K
    yield from wrong_numbers(entry)
    yield Invalid("bits", ValueError, "3", put("bits", 3))
    yield Invalid("dtype", TypeError, "integers", put("dtype", torch.int32))


# There is each dtype with one row, few and many; blocks, rows and all together; and sizes that end within a word.
E4M3 = [
    QuantizedPoint(BF16, M=1, N=260, K=400, bits=8, e4m3=True, scale_dtype=F32),
    QuantizedPoint(F32, M=1, N=70, K=131, bits=8, e4m3=True, biased=True),
    QuantizedPoint(F16, M=5, N=130, K=257, bits=8, e4m3=True, scale_dtype=BF16, aligned=False),
    QuantizedPoint(BF16, M=8, N=140, K=256, bits=8, e4m3=True, e4m3_scales="rows"),
    QuantizedPoint(BF16, M=40, N=260, K=400, bits=8, e4m3=True),
    QuantizedPoint(F16, M=9, N=129, K=127, bits=8, e4m3=True, scale_dtype=F32, biased=True),
    QuantizedPoint(F32, M=33, N=130, K=160, bits=8, e4m3=True, e4m3_scales="all"),
]
MXFP4 = [
    QuantizedPoint(BF16, M=1, N=70, K=1088, mxfp4=True),
    QuantizedPoint(F16, M=7, N=33, K=96, mxfp4=True, aligned=False, biased=True),
    QuantizedPoint(F32, M=40, N=130, K=160, mxfp4=True),
]
# There is each dtype and number of bits with one row, few and many; each group and dtype of scales and biases; and
# sizes that no tile divides.
POINTS = [
    QuantizedPoint(BF16, M=1, N=70, K=1088, bits=4, group=64),
    QuantizedPoint(BF16, M=1, N=9, K=640, bits=8, group=128, scale_dtype=F32, aligned=False),
    QuantizedPoint(F16, M=1, N=65, K=544, bits=4, group=32, scale_dtype=F32, biased=True),
    QuantizedPoint(F16, M=1, N=33, K=96, bits=8, group=32),
    QuantizedPoint(F32, M=1, N=17, K=384, bits=4, group=128, scale_dtype=F16, aligned=False),
    QuantizedPoint(F32, M=1, N=64, K=192, bits=8, group=64, biased=True),
    QuantizedPoint(BF16, M=8, N=70, K=640, bits=4, group=128, scale_dtype=F16, zero_points=True, biased=True),
    QuantizedPoint(BF16, M=5, N=9, K=576, bits=8, group=64, scale_dtype=F16),
    QuantizedPoint(F16, M=2, N=65, K=96, bits=4, group=32, scale_dtype=BF16, zero_points=True, aligned=False),
    QuantizedPoint(F16, M=7, N=33, K=640, bits=8, group=128, scale_dtype=F32),
    QuantizedPoint(F32, M=3, N=17, K=320, bits=4, group=64),
    QuantizedPoint(F32, M=6, N=64, K=288, bits=8, group=32, aligned=False),
    QuantizedPoint(BF16, M=40, N=70, K=192, bits=4, group=64, scale_dtype=F32),
    QuantizedPoint(BF16, M=33, N=9, K=256, bits=8, group=128, scale_dtype=F16, zero_points=True, biased=True),
    QuantizedPoint(F16, M=64, N=65, K=96, bits=4, group=32),
    QuantizedPoint(F16, M=9, N=33, K=64, bits=8, group=64, aligned=False),
    QuantizedPoint(F32, M=10, N=130, K=128, bits=4, group=128, biased=True),
    QuantizedPoint(F32, M=35, N=64, K=96, bits=8, group=32),
    *E4M3,
    *MXFP4,
]
ROWS = [
    QuantizedPoint(BF16, N=7, K=192, bits=4, group=64, scale_dtype=F16, zero_points=True),
    QuantizedPoint(F16, N=5, K=96, bits=8, group=32, scale_dtype=F32, indexed=True),
    QuantizedPoint(F32, N=3, K=256, bits=4, group=128, aligned=False, indexed=True),
    QuantizedPoint(BF16, N=130, K=133, bits=8, e4m3=True, scale_dtype=F32, indexed=True),
    QuantizedPoint(BF16, N=30, K=96, mxfp4=True, indexed=True),
]


CODES: tuple[dict[str, Any], ...] = ({"bits": 4}, {"bits": 8}, {"bits": 8, "e4m3": True}, {"bits": 4, "mxfp4": True})


def compiled() -> Iterator[QuantizedPoint]:
    for dtype, codes, M in itertools.product(DTYPES, CODES, (1, 4, 40)):
        yield QuantizedPoint(dtype, M=M, **codes)


OUTSIDE = (Hostile("indices", [[0, 40], [LARGE, 2], [-LARGE, -1]]),)

register(
    OpEntry(
        "quantized_linear",
        draw=draw_linear,
        small=QuantizedPoint(biased=True),
        points=POINTS,
        quick=[POINTS[0], POINTS[6], POINTS[12], *E4M3[:1]],
        compiled=compiled,
        bound=linear_bounds,
        heads={"y": None},
        operations=lambda call: 2 * call["x"].numel() * call["weight"].shape[0],
        takes={"x": "float rank 0", "bias": "float"},
        invalid=wrong_linear,
    ),
    OpEntry(
        "dequantize",
        draw=draw_dequantize,
        small=QuantizedPoint(indexed=True),
        points=ROWS,
        quick=ROWS[:1],
        compiled=lambda: [QuantizedPoint(dtype, **codes) for dtype in DTYPES for codes in CODES],
        heads={"rows": None},
        result="rows",
        launches=None,
        takes={"indices": "rank 0 1"},
        invalid=wrong_dequantize,
        hostile=OUTSIDE,
    ),
)
