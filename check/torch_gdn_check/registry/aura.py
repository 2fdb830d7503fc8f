"""Entries of AURA's codec, and of attention to codes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_gdn import reference
from torch_gdn.aura import Scheme, codebooks, trellis
from torch_gdn.aura.coded_tensor import entries
from torch_gdn.reference.trellis import windows
from torch_gdn_check.registry import invalid
from torch_gdn_check.registry.gdn import LARGE
from torch_gdn_check.registry.inputs import Call, columns_apart
from torch_gdn_check.registry.invalid import change, put
from torch_gdn_check.registry.models import BF16, DTYPES, F16, F32
from torch_gdn_check.registry.registry import Hostile, Invalid, Named, OpEntry, Point, register

HEAD_SIZES = codebooks.DIMENSIONS
BITS = codebooks.BITS
SCHEMES = ("8v8", "8v4", "5v5", "4v4", "4v2", "3v3", "2v2", "8v4t", "4v4t", "3v3t", "2v2t")
# Each has bits of keys and of values, and whether these are trellis codes.
CODES = [((scheme.key_bits, scheme.value_bits), scheme.trellis) for scheme in map(Scheme, SCHEMES)]
TRELLIS = trellis.RATES[codebooks.WINDOW]  # bits of trellis codes
FORMS = (1, 2, 4, 8, 17)  # queries x query heads per KV head; each number takes another variant of pass 1


@dataclass
class Codec:
    """Signs, and the default table or the trellis's if there is one for the number of bits."""

    D: int
    bits: int
    seed: int = 3
    trellis: bool = False

    def __post_init__(self) -> None:
        self.signs = reference.aura_signs(self.D, self.seed)
        table = "trellis" if self.trellis and self.bits in TRELLIS else "lloyd-max"
        self.codebook = codebooks.codebook(self.bits, self.D, table)
        self.boundaries = codebooks.boundaries(self.codebook)

    @property
    def tables(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns arguments of aura_encode."""
        return self.signs, self.boundaries, self.codebook

    @property
    def words(self) -> int:
        return (self.D * self.bits + 31) // 32

    def to(self, device: torch.device) -> Codec:
        moved = Codec(self.D, self.bits, self.seed, self.trellis)
        moved.signs, moved.codebook = self.signs.to(device), self.codebook.to(device)
        moved.boundaries = None if self.boundaries is None else self.boundaries.to(device)
        return moved


def poisoned_cache(codec: Codec, B: int, HK: int, S: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns codes and norms of a cache with sentinel content, whose heads and slots are not in order."""
    codes = torch.full((B, S, HK, codec.words), 0x5A5A5A5A, dtype=torch.int32, device=device).transpose(1, 2)
    return codes, torch.full((HK, B, S), torch.nan, dtype=F16, device=device).transpose(0, 1)


@dataclass
class Cache:
    """Encoded keys and values, [B, HK, T, ..] on the CPU, as slices of a cache of greater capacity."""

    key: Codec
    value: Codec
    keys: tuple[Tensor, Tensor]  # codes, norms
    values: tuple[Tensor, Tensor]

    def parts(self, with_signs: bool) -> dict[str, Tensor]:
        """Returns the parts by the ops' names."""
        result: dict[str, Any] = {}
        for name, codec, (codes, norms) in (("key", self.key, self.keys), ("value", self.value, self.values)):
            result |= {f"{name}_codes": codes, f"{name}_norms": norms, f"{name}_codebook": codec.codebook}
            if with_signs:
                result[f"{name}_signs"] = codec.signs
        return result


def make_cache(key: Codec, value: Codec, B: int, HK: int, T: int, slack: int = 3) -> Cache:
    encoded: list[Any] = []
    for codec in (key, value):
        x = torch.randn(B, HK, T, codec.D) * torch.randn(B, HK, T, 1).mul(0.3).exp() + 0.2
        cache = poisoned_cache(codec, B, HK, T + slack, torch.device("cpu"))
        for whole, part in zip(cache, reference.aura_encode(x, *codec.tables), strict=True):
            whole[:, :, :T] = part
        encoded.append(tuple(part[:, :, :T] for part in cache))
    return Cache(key, value, *encoded)


# ---- the codec -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CodecPoint(Point):
    D: int = 64
    bits: int = 3
    tokens: int = 5
    rotated: bool = False  # decoded without rotating back
    trellis: bool = False

    def codec(self) -> Codec:
        return Codec(self.D, self.bits, trellis=self.trellis)

    def rows(self) -> Tensor:
        return torch.randn(2, 2, self.tokens, self.D).to(self.dtype)

    def to_encode(self) -> tuple[Tensor, Codec]:
        """Returns vectors and a codec. For a trellis, each vector is what one stream decodes to, so that every right
        encoder finds this stream.

        With other vectors, streams may cost nearly the same, and a small error of a coordinate changes many codes.
        These vectors are turned rings of one stream, so they all have the norm of its labels.
        """
        codec = self.codec()
        if not self.trellis or self.bits not in TRELLIS:
            return self.rows(), codec
        ring = codec.codebook.flatten()[windows(stream_of(self.D, self.bits), codec.codebook, self.bits)]
        codec.codebook = codec.codebook / ring.norm()
        turned = torch.stack([(ring / ring.norm()).roll(-i) for i in range(4 * self.tokens)])
        x = reference.aura_rotate(turned.double(), codec.signs, inverse=True).view(2, 2, self.tokens, self.D)
        return (x * torch.arange(1.0, 1 + self.tokens)[:, None]).to(self.dtype), codec


def stream_of(D: int, bits: int) -> Tensor:
    return torch.randint(256, (D * bits // 8,), dtype=torch.uint8)


CODECS = [CodecPoint(F32), CodecPoint(BF16, D=128, bits=4, tokens=13), CodecPoint(F16, D=80, bits=3, tokens=13)]
CODECS += [CodecPoint(BF16, D=96, bits=2, tokens=13), CodecPoint(F32, D=512, bits=8, tokens=13)]
CODECS.append(CodecPoint(F16, D=80, bits=5, tokens=13))
CODECS += [
    CodecPoint(dtype, D=D, bits=bits, tokens=13, trellis=True)
    for dtype, D, bits in ((F32, 80, 3), (BF16, 128, 4), (F16, 64, 2), (F32, 512, 4), (F32, 96, 4))
]
QUICK_CODECS = [CodecPoint(BF16, D=128, bits=8, tokens=13), CodecPoint(BF16, D=128, bits=4, tokens=13, trellis=True)]


CODES_OF_VECTORS = [(bits, False) for bits in BITS] + [(bits, True) for bits in TRELLIS]


def compiled_codecs(
    codes: Iterable[tuple[int, bool]] = CODES_OF_VECTORS,
    rotations: tuple[bool, ...] = (False,),
) -> Iterator[CodecPoint]:
    """Yields codecs. `codes` are bits, and whether a trellis code has them."""
    for (bits, is_trellis), D, dtype, rotated in itertools.product(codes, HEAD_SIZES, DTYPES, rotations):
        yield CodecPoint(dtype, D=D, bits=bits, tokens=2, rotated=rotated, trellis=is_trellis)


def draw_encode(point: CodecPoint) -> Call:
    x, codec = point.to_encode()
    return {"x": x, "signs": codec.signs, "boundaries": codec.boundaries, "codebook": codec.codebook}


def draw_encode_in_place(point: CodecPoint) -> Call:
    """Draws a call that writes into a cache with three slots more."""
    call, size = draw_encode(point), point.tokens + 3
    call = {"x": call.pop("x"), "slots": torch.arange(point.tokens)} | call
    call["codes"] = torch.zeros(2, 2, size, point.codec().words, dtype=torch.int32)
    tile_means = torch.randn(2, 2, 1, point.D).half()
    call["x"] = (call["x"] + tile_means.float()).to(point.dtype)
    return call | {"norms": torch.zeros(2, 2, size, dtype=F16), "tile_means": tile_means}


def exact_encode_in_place(call: Call) -> None:
    tables = {name: call[name] for name in ("signs", "boundaries", "codebook")}
    means = call.get("tile_means")
    encoded = reference.aura_encode(call["x"].double() - (0.0 if means is None else means.double()), **tables)
    for name, part in zip(("codes", "norms"), encoded, strict=True):
        call[name][:, :, call["slots"]] = part.to(call[name].dtype)


def encoding_bounds(point: CodecPoint, call: Call, exact: Named) -> dict[str, float]:
    """Returns bounds. A coordinate next to a boundary may get the other code, which changes the vector's norm. The norm
    is rounded to float16.
    """
    return {"codes": 5e-3, "norms": 5e-4}


def draw_decode(point: CodecPoint) -> Call:
    codec = point.codec()
    codes, norms = reference.aura_encode(point.rows().float(), *codec.tables)
    call = {"codes": codes, "norms": norms.half(), "codebook": codec.codebook, "signs": codec.signs}
    return call | {"dtype": point.dtype, "rotated": point.rotated, "tile_means": torch.randn(2, 2, 1, point.D).half()}


def wrong_codec(entry: OpEntry[Any]) -> Iterator[Invalid]:
    """Yields, by an argument's name, what no op takes."""
    for name in entry.call(entry.small):
        if name in ("x", "q"):  # activations
            yield Invalid(name, ValueError, "a head size of 72", change(name, partial(invalid.zeros, size=72)))
        elif name.endswith("codes"):
            yield Invalid(name, TypeError, "int64", change(name, torch.Tensor.long))
    if "dtype" in entry.arguments:
        yield Invalid("dtype", TypeError, "float64", put("dtype", torch.float64))


def wrong_encode_in_place(entry: OpEntry[CodecPoint]) -> Iterator[Invalid]:
    yield from wrong_codec(entry)
    yield Invalid("slots", ValueError, "one for each head", change("slots", lambda x: x.expand(2, 2, 5)))
    yield Invalid("codes", ValueError, "words apart", change("codes", columns_apart))


OF_VECTORS = {"x": "float rank 0 1 2"}


def wrong_rotate(entry: OpEntry[CodecPoint]) -> Iterator[Invalid]:
    yield from wrong_codec(entry)
    yield Invalid("x", ValueError, "no dimension", put("x", torch.tensor(1.0)))


register(
    OpEntry(
        "aura_encode",
        takes=OF_VECTORS,
        draw=draw_encode,
        small=CodecPoint(),
        points=CODECS,
        quick=QUICK_CODECS,
        compiled=compiled_codecs,
        bound=encoding_bounds,
        heads={"norms": 1},
        invalid=wrong_codec,
    ),
    OpEntry(
        "aura_encode_",
        takes={"x": "float"},
        draw=draw_encode_in_place,
        exact=exact_encode_in_place,
        small=CodecPoint(),
        points=CODECS,
        quick=QUICK_CODECS,
        bound=encoding_bounds,
        heads={"norms": 1},
        invalid=wrong_encode_in_place,
        hostile=[Hostile("slots", [0, 8, 2, LARGE, 4])],  # there are 8 slots
    ),
    OpEntry(
        "aura_decode",
        draw=draw_decode,
        small=CodecPoint(BF16),
        points=[*CODECS, CodecPoint(BF16, D=128, bits=4, rotated=True), CodecPoint(F32, D=80, rotated=True)],
        quick=QUICK_CODECS,
        compiled=partial(compiled_codecs, rotations=(False, True)),
        bound=lambda point, call, exact: {"x": {F32: 1e-6}.get(point.dtype, 0.0)} if point.dtype == F32 else {},
        heads={"x": None},
        result="x",
        invalid=wrong_codec,
    ),
    OpEntry(
        "aura_rotate",
        takes=OF_VECTORS,
        draw=lambda point: {"x": point.rows(), "signs": point.codec().signs, "scale": 0.5, "inverse": point.rotated},
        small=CodecPoint(),
        points=[*CODECS, CodecPoint(BF16, D=128, rotated=True)],
        quick=QUICK_CODECS,
        compiled=partial(compiled_codecs, codes=[(4, False)], rotations=(False, True)),
        bound=lambda point, call, exact: {"y": 4e-7},
        heads={"y": None},
        invalid=wrong_rotate,
    ),
)


# ---- attention -------------------------------------------------------------------------------------------------------


def tiles_of(tokens: int) -> int:
    return entries("tile_means", tokens)


@dataclass(frozen=True)
class AuraPoint(Point):
    bits: tuple[int, int] = (3, 4)
    D: int = 64
    ratio: int = 2  # query heads of each of the 2 KV heads
    queries: int = 3
    keys: int = 20
    batch: int = 2
    masked: bool = False  # use sinks, a window, and `starts` that mask the first keys
    exact: tuple[int, int] = (0, 0)  # exact rows, and how many of them precede the codes, which then have tiles' means
    trellis: bool = False

    def cache(self) -> Cache:
        key, value = (Codec(self.D, bits, seed, self.trellis) for bits, seed in zip(self.bits, (3, 4), strict=True))
        return make_cache(key, value, self.batch, 2, self.keys)

    def q(self, dtype: torch.dtype) -> Tensor:
        return torch.randn(self.batch, 2 * self.ratio, self.queries, self.D).to(dtype)

    def masks(self) -> Call:
        if not self.masked:
            return {}
        block_size = 16 if self.keys < 64 else 64
        return {"starts": 2 * torch.arange(self.batch), "window": self.keys // 2 - 1, "block_size": block_size}

    def exact_rows(self) -> Call:
        """Returns them with one more row, which the op ignores."""
        length, sinks = self.exact
        if length == 0:
            return {}
        rows = (self.batch, 2, length + 1, self.D)
        names = ("exact_keys", "exact_values")
        result: Call = {name: torch.randn(rows).to(self.dtype) for name in names}
        result["key_tile_means"] = torch.randn(self.batch, 2, tiles_of(self.keys), self.D).half()
        return result | {"exact_sinks": sinks, "exact_length": length}


SMALL = AuraPoint(masked=True)
SMALL_EXACT = AuraPoint(masked=True, exact=(7, 3))
ATTENTIONS = [
    AuraPoint(dtype, bits=bits, D=D, ratio=ratio, queries=queries, keys=203, batch=1, masked=ratio == 7)
    for bits, D, dtype in (((4, 4), 128, BF16), ((8, 4), 64, F32), ((3, 2), 80, F16), ((3, 3), 96, BF16))
    for ratio, queries in ((1, 1), (2, 1), (4, 1), (7, 1), (4, 9))
]
ATTENTIONS.append(AuraPoint(F32, bits=(2, 2), D=512, queries=9, keys=203, batch=1))
ATTENTIONS += [
    SMALL_EXACT,
    AuraPoint(BF16, bits=(4, 4), D=128, ratio=4, queries=1, keys=203, batch=1, exact=(260, 4)),
    AuraPoint(F16, bits=(4, 4), D=80, ratio=4, queries=9, keys=40, exact=(133, 0)),
    AuraPoint(F32, bits=(4, 4), D=512, ratio=1, queries=9, keys=20, batch=1, exact=(20, 4)),
]
ATTENTIONS += [
    AuraPoint(F32, bits=bits, D=D, ratio=form, queries=1, keys=203, batch=1, trellis=is_trellis)
    for bits, D, is_trellis, forms in (
        ((4, 4), 128, True, (4, 8, 17)),
        ((3, 2), 80, True, (4, 8, 17)),
        ((8, 3), 64, True, (4, 8)),
        ((5, 5), 80, False, (4, 8, 17)),
        ((2, 4), 512, True, (2, 8)),
    )
    for form in forms
]
QUICK_ATTENTIONS = [
    AuraPoint(BF16, bits=(8, 4), D=128, ratio=form, queries=1, keys=203, batch=1, masked=form == 4) for form in (4, 17)
]
QUICK_ATTENTIONS.append(AuraPoint(BF16, bits=(8, 4), D=128, queries=1, keys=128, batch=1, exact=(132, 4)))


def compiled_attention() -> Iterator[AuraPoint]:
    for (bits, is_trellis), D, dtype, form in itertools.product(CODES, HEAD_SIZES, DTYPES, FORMS):
        one = AuraPoint(dtype, bits=bits, D=D, ratio=form, queries=1, keys=2, batch=1, exact=(1, 1))
        yield replace(one, trellis=is_trellis)


def draw_flash_p1(point: AuraPoint) -> Call:
    q, cache = point.q(F32), point.cache()
    tiles = (point.batch, 2 * point.ratio, point.queries, tiles_of(point.keys))
    scores = {"tile_scores": torch.randn(tiles)} if point.masked else {}
    return {"q_rot": q} | cache.parts(False) | scores | point.masks()


def draw_flash_p2(point: AuraPoint) -> Call:
    """Draws two blocks."""
    rows = (point.batch, 2 * point.ratio, point.queries, 2)
    call: Call = {"o_partials": torch.randn(*rows, point.D), "m_partials": torch.randn(rows)}
    call |= {"l_partials": torch.rand(rows) + 1, "value_signs": Codec(point.D, point.bits[1]).signs}
    call |= {"sinks": torch.randn(2 * point.ratio)} if point.masked else {}
    return call | {"dtype": point.dtype}


def draw_attention(point: AuraPoint) -> Call:
    cache = point.cache()
    call = {"q": point.q(point.dtype)} | cache.parts(True) | point.masks()
    call |= point.exact_rows()
    return call | ({"sinks": torch.randn(2 * point.ratio), "length": point.keys - 2} if point.masked else {})


def wrong_attention(entry: OpEntry[AuraPoint]) -> Iterator[Invalid]:
    yield from wrong_codec(entry)
    yield Invalid("window", ValueError, "not causal", put("causal", False))
    yield Invalid("q_offset", ValueError, "2^31", put("q_offset", 2**31))
    yield Invalid("block_size", ValueError, "24", put("block_size", 24))
    yield Invalid("block_size", ValueError, "0", put("block_size", 0))
    yield Invalid("key_codebook", ValueError, "64 centroids", put("key_codebook", torch.zeros(64)))
    if "length" in entry.arguments:
        yield Invalid("length", ValueError, "more than there are", put("length", 21))
        yield from wrong_exact_rows()
    else:
        yield Invalid(
            "tile_scores", ValueError, "a tile more", change("tile_scores", lambda x: x.expand(-1, -1, -1, 2))
        )


def wrong_exact_rows() -> Iterator[Invalid]:
    yield Invalid("exact_values", ValueError, "keys without values", put("exact_values", None))
    yield Invalid("exact_values", ValueError, "values without keys", put("exact_keys", None))
    yield Invalid("exact_length", ValueError, "more than there are", put("exact_length", 9))
    yield Invalid("exact_sinks", ValueError, "more than there are", put("exact_sinks", 8))


def attention_bounds(point: AuraPoint, call: Call, exact: Named) -> dict[str, float]:
    return dict.fromkeys(exact, 1e-6) if point.dtype == F32 else {}


def operations_of_attention(call: Call) -> int:
    q, keys = call.get("q", call.get("q_rot")), call["key_norms"].shape[-1] + call.get("exact_length", 0)
    return 4 * int(q.numel()) * int(keys)  # type: ignore[union-attr]


register(
    OpEntry(
        "aura_flash_p1",
        draw=draw_flash_p1,
        small=SMALL,
        points=[SMALL, AuraPoint(bits=(8, 4), D=128, ratio=4, queries=1, keys=203)],
        bound=attention_bounds,
        heads=dict.fromkeys(("o_partials", "m_partials", "l_partials")),
        operations=operations_of_attention,
        invalid=wrong_attention,
    ),
    OpEntry(
        "aura_flash_p2",
        draw=draw_flash_p2,
        small=AuraPoint(F16, masked=True),
        points=[AuraPoint(F16, masked=True), AuraPoint(F32, D=96), AuraPoint(BF16, D=512, ratio=4)],
        quick=[AuraPoint(BF16, D=128)],
        bound=attention_bounds,
        heads={"o": 1},
        result="o",
        launches=None,
        invalid=wrong_codec,
    ),
    OpEntry(
        "aura_attention",
        takes={"q": "2"},
        draw=draw_attention,
        small=SMALL_EXACT,
        points=ATTENTIONS,
        quick=QUICK_ATTENTIONS,
        compiled=compiled_attention,
        bound=attention_bounds,
        heads={"o": 1},
        result="o",
        operations=operations_of_attention,
        launches=5,
        scratch=True,
        invalid=wrong_attention,
    ),
)
