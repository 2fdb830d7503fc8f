"""The formats of keys and values that evidence.lab.studies.kv_quality compares, AURA's and others', with all of their
bytes.

A format keeps keys and values as two parts. A part codes whole tiles of tokens; the first `sinks` tokens, the newest
`tail`, and what does not fill a tile yet, stay in float16. `Part.code` gives what is stored as tensors, whose bytes are
the bits, and the values that they stand for.

The others are written from what their authors published:

    fp8, q8_0 ..., quanto    cache_formats.py here; quanto's cache codes 128 tokens at a time (its residual_length)
    turboquant_*    vLLM 0.33, model_executor/layers/quantization/turboquant/config.py: keys are rotated by a Hadamard
                matrix and coded by Lloyd-Max tables with a float16 norm, or fp8; values are affine, a float16 scale and
                minimum for each vector
    KIVI        arXiv 2402.02750: keys affine for each channel and 32 tokens, values for each token and 32 channels;
                keys are coded 128 tokens at a time, values once 128 newer ones are there
    KVarN       arXiv 2606.03458: tiles of 128 tokens, rotated, scaled by row and by column until both have even
                deviations, then affine, keys by channel and values by token; the first tile stays
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

import torch_gdn
from evidence.lab.studies import cache_formats
from evidence.lab.studies.cache_formats import Stored, pack, reciprocal, unpack
from torch_gdn.aura import codebooks, trellis
from torch_gdn.aura.coded_tensor import CodedTensor, has_tile_means
from torch_gdn.reference.aura import TILE

SEEDS = {"keys": 0, "values": 1}  # for the rotations' signs, as in KVCache
SMALL = 2.0**-24  # in float16, the norm of a vector of zeros


class Part(NamedTuple):
    """How keys, or values, are kept. The label names only the codes: parts with the same label code alike."""

    label: str
    code: Callable[[Tensor], Stored]  # [.., T, D], T whole tiles
    tile: int = 1
    tail: int = 0
    sinks: int = 0
    slow: bool = False  # whether to keep codes that are needed repeatedly

    def first_exact(self, tokens: Tensor) -> Tensor:
        """Returns the first token after the codes, if the cache has so many tokens. Codes begin at `sinks`."""
        behind = (tokens - self.sinks - self.tail).clamp(min=0)
        return self.sinks + behind // self.tile * self.tile

    def bits(self, tokens: int, D: int) -> float:
        """Returns the bits per value in a cache of `tokens` tokens. A tile is half full on average."""
        sample = torch.randn(1, self.tile if self.tile > 1 else TILE, D, generator=torch.Generator().manual_seed(0))
        exact = (self.sinks + self.tail + (self.tile - 1) / 2) / tokens
        return (1 - exact) * self.code(sample).bits + exact * 16


class Format(NamedTuple):
    name: str
    family: str
    keys: Part
    values: Part

    def bits(self, tokens: int, D: int) -> float:
        return (self.keys.bits(tokens, D) + self.values.bits(tokens, D)) / 2


# AURA


def aura(
    x: Tensor, bits: int, seed: int, window: int = 0, means: bool = False, norms: torch.dtype = torch.half
) -> Stored:
    """Codes a norm and rotated coordinates: Lloyd-Max indices, or a trellis with a window. May subtract the tile's
    means."""
    D = x.shape[-1]
    kept: tuple[Tensor, ...] = ()
    if means:
        mean = means_of_tiles(x).half()
        x, kept = (x.unflatten(-2, (-1, TILE)) - mean.float()).flatten(-3, -2), (mean,)
    norm = x.norm(dim=-1, keepdim=True).clamp(min=SMALL)
    signs = codebooks.aura_signs(D, seed)
    rotated = torch_gdn.aura_rotate((x / norm).contiguous(), signs)
    if window:
        labels = trellis.table(window, bits) / math.sqrt(D)
        planes = trellis.encode(rotated * math.sqrt(D), trellis.table(window, bits), bits)
        nearest = trellis.decode(planes, labels, bits)
    else:
        book = codebooks.codebook(bits, D)
        between = codebooks.boundaries(book)
        assert between is not None  # because there is no trellis
        planes = pack(torch.bucketize(rotated, between), bits)
        nearest = book[unpack(planes)]
    scale = (norm / nearest.norm(dim=-1, keepdim=True)).to(norms)
    decoded = torch_gdn.aura_rotate(nearest, signs, inverse=True) * scale.float()
    if means:
        decoded = (decoded.unflatten(-2, (-1, TILE)) + mean.float()).flatten(-3, -2)
    return Stored((planes, scale, *kept), decoded)


def means_of_tiles(x: Tensor, earlier: bool = False) -> Tensor:
    """Returns [.., tiles, 1, D], the mean of each tile of x [.., T, D].

    With `earlier`, a tile has the mean that vLLM's pages give it in decoding, which is the mean of the 128 tokens up to
    the tile's first one. The first tile keeps its own mean, as in a prompt.
    """
    own = x.unflatten(-2, (-1, TILE)).mean(-2, keepdim=True)
    if not earlier:
        return own
    tiles = x.shape[-2] // TILE - 1
    behind = x[..., 1 : 1 + tiles * TILE, :].unflatten(-2, (tiles, TILE)).mean(-2, keepdim=True)
    return torch.cat([own[..., :1, :, :], behind], -3)


def cached(x: Tensor, bits: int, seed: int, table: str, means: bool, earlier: bool = False) -> Stored:
    """Codes x [HK, T, D] as a cache does, or as vLLM's pages in decoding."""
    HK, T, D = x.shape
    signs = codebooks.aura_signs(D, seed)
    coded = CodedTensor(bits, signs, codebooks.codebook(bits, D, table), (1, HK, T), tile_means=means)
    if earlier and coded.tile_means is not None:
        coded.tile_means.copy_(means_of_tiles(x, earlier=True)[..., 0, :])
        tables = coded.signs, coded.boundaries, coded.codebook
        torch.ops.gdn.aura_encode_(x[None], torch.arange(T), *tables, coded.codes, coded.norms, coded.tile_means)
    else:
        coded.append(x[None], torch.arange(T), 0)
    return Stored(tuple(coded.token_tensors().values()), coded.decoded(T, torch.float32)[0])


class Aura(NamedTuple):
    """The parts of a scheme of AURA."""

    scheme: str
    tail: int | None = None  # None is AURA before it had a tail
    means: bool = False
    window: int = 0  # for the trellis; 5-bit codes use 10, 8-bit codes have none
    variant: Literal["", "no means", "earlier means"] = ""  # of a cache's means

    @property
    def name(self) -> str:
        words = [] if self.tail is None else [f"tail {self.tail}"]
        words += ["means"] * self.means + ([f"trellis {self.window}"] if self.window else [])
        words += [self.variant] * bool(self.variant)
        return f"AURA {self.scheme}" + "".join(f", {word}" for word in words)

    def part(self, what: str, bits: int) -> Part:
        window = 0 if bits == 8 else self.window
        means = self.means and what == "keys"
        if self.scheme.endswith("t") or self.variant:
            table, tail = "trellis" if self.scheme.endswith("t") and bits <= 4 else "lloyd-max", self.tail or 0
            variant = self.variant if what == "keys" else ""
            means = what == "keys" and has_tile_means(tail) and variant != "no means"
            earlier = variant == "earlier means"  # then a tile is not coded without the tokens before it
            code = partial(cached, bits=bits, seed=SEEDS[what], table=table, means=means, earlier=earlier)
            label = f"{what} {bits} bits {table} {variant}"
            return Part(label, code, TILE, tail, sinks=4, slow=not earlier)
        label = f"{what} {bits} bits" + f" trellis {window}" * bool(window) + " means" * means
        if self.tail is None:
            code = partial(aura, bits=bits, seed=SEEDS[what], norms=torch.float32)
            return Part(label + " float32 norms", code)
        code = partial(aura, bits=bits, seed=SEEDS[what], window=window, means=means)
        return Part(label, code, TILE, self.tail, sinks=4, slow=window > 0)

    def format(self) -> Format:
        keys, values = (int(bits) for bits in self.scheme.removesuffix("t").split("v"))
        family = "AURA" if self.tail is None else "AURA with a tail"
        family += ", means" * self.means + f", trellis {self.window}" * bool(self.window)
        family = "AURA's trellis codes" if self.scheme.endswith("t") else family
        family = f"AURA, {self.variant}" if self.variant else family
        return Format(self.name, family, self.part("keys", keys), self.part("values", values))


# Others


def affine_to(x: Tensor, bits: int, dim: int, size: int) -> Stored:
    """Codes groups of `size` neighbours along a dimension (-1: channels, -2: tokens)."""
    if dim == -1:
        return cache_formats.affine(x, bits, size)
    stored = cache_formats.affine(x.transpose(-1, -2), bits, size)
    return stored._replace(decoded=stored.decoded.transpose(-1, -2))


def uniform_vectors(x: Tensor, bits: int) -> Stored:
    """Codes turboquant's values, with one group for each vector."""
    return cache_formats.affine(x, bits, x.shape[-1])


def bare_fp8(x: Tensor) -> Stored:
    """Codes turboquant_k8v4's keys, in e4m3 without a scale."""
    codes = x.clamp(-cache_formats.LARGEST_FP8, cache_formats.LARGEST_FP8).to(torch.float8_e4m3fn)
    return Stored((codes,), codes.float())


def rotated(x: Tensor, seed: int, code: Callable[[Tensor], Stored]) -> Stored:
    signs = codebooks.aura_signs(x.shape[-1], seed)
    stored = code(torch_gdn.aura_rotate(x.contiguous(), signs))
    return stored._replace(decoded=torch_gdn.aura_rotate(stored.decoded, signs, inverse=True))


def even_scales(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns KVarN's scales by token [.., T, 1] and by channel [.., 1, D], the most even ones of 16 rounds."""
    tokens, channels = x.new_zeros(x[..., :1].shape), x.new_zeros(x[..., :1, :].shape)  # logarithms
    token_stds, channel_stds = x.std(-1, keepdim=True), x.std(-2, keepdim=True)
    best, least = (tokens, channels), unevenness(token_stds, channel_stds)
    for _ in range(16):
        tokens = (tokens + token_stds.clamp(1e-3, 1e3).log()).clamp(-0.3, 10)
        channel_stds = (x * (-tokens - channels).exp()).std(-2, keepdim=True)
        channels = (channels + channel_stds.clamp(1e-3, 1e3).log()).clamp(-0.3, 10)
        balanced = x * (-tokens - channels).exp()
        token_stds, channel_stds = balanced.std(-1, keepdim=True), balanced.std(-2, keepdim=True)
        now = unevenness(token_stds, channel_stds)
        best = torch.where(now <= least, tokens, best[0]), torch.where(now <= least, channels, best[1])
        least = torch.minimum(now, least)
    return best[0].exp(), best[1].exp()


def unevenness(token_stds: Tensor, channel_stds: Tensor) -> Tensor:
    """Returns [.., 1, 1], the largest deviation over the smallest, of tokens and of channels."""
    ratios = [std.amax((-1, -2)) / std.amin((-1, -2)).clamp(min=1e-8) for std in (token_stds, channel_stds)]
    return (ratios[0] + ratios[1])[..., None, None]


def kvarn(x: Tensor, bits: int, dim: int) -> Stored:
    """Codes tiles of [128, D] with even deviations, and affine along `dim`. Scale and minimum include one of the
    scales.
    """
    tiles, top = x.unflatten(-2, (-1, TILE)), 2**bits - 1
    by_token, by_channel = even_scales(tiles)
    balanced = tiles / by_token / by_channel
    folded, other = (by_token, by_channel) if dim == -1 else (by_channel, by_token)
    low = balanced.amin(dim, keepdim=True)
    step = (balanced.amax(dim, keepdim=True) - low) / top
    codes = ((balanced - low) * reciprocal(step)).round().clamp(0, top)
    step, low, other = (step * folded).half(), (low * folded).half(), other.half()
    planes = pack(codes, bits)
    decoded = (unpack(planes) * step.float() + low.float()) * other.float()
    return Stored((planes, step, low, other), decoded.flatten(-3, -2))


def alike(name: str, family: str, code: Callable[[Tensor], Stored], tile: int = 1) -> Format:
    return Format(name, family, Part(f"{name}: keys", code, tile), Part(f"{name}: values", code, tile))


def with_rotation(name: str, code: Callable[[Tensor], Stored]) -> Format:
    parts = [Part(f"{name} rotated: {what}", partial(rotated, seed=seed, code=code)) for what, seed in SEEDS.items()]
    return Format(f"{name}, rotated", "others, rotated", *parts)


def kivi(bits: int) -> Format:
    keys = Part(f"KIVI-{bits}: keys", partial(affine_to, bits=bits, dim=-2, size=32), tile=TILE)
    values = Part(f"KIVI-{bits}: values", partial(affine_to, bits=bits, dim=-1, size=32), tail=128)
    return Format(f"KIVI-{bits}", "KIVI", keys, values)


def kvarn_format(keys: int, values: int) -> Format:
    parts = [
        (f"KVarN {what} {bits}", partial(rotated, seed=seed, code=partial(kvarn, bits=bits, dim=dim)))
        for (what, seed), bits, dim in zip(SEEDS.items(), (keys, values), (-2, -1), strict=True)
    ]
    key_part, value_part = (Part(label, code, TILE, sinks=TILE, slow=True) for label, code in parts)
    return Format(f"KVarN k{keys}v{values}", "KVarN", key_part, value_part)


def turboquant(preset: str, keys: int, values: int) -> Format:
    code = bare_fp8 if keys == 8 else partial(aura, bits=keys, seed=SEEDS["keys"])
    value_part = Part(f"turboquant values {values}", partial(uniform_vectors, bits=values))
    return Format(f"turboquant_{preset}", "turboquant", Part(f"turboquant keys {keys}", code), value_part)


def all_formats() -> dict[str, Format]:
    """Returns formats by name. Those that decide most come first, so that an interrupted run has them."""
    every = [Aura(s, 64, True, 8).format() for s in ("4v4", "3v3", "2v2")] + [Aura("5v5", 64, True, 10).format()]
    blocks = {name: cache_formats.FORMATS[name] for name in ("q4_0", "q5_0", "q8_0")}
    every += [with_rotation("q4_0", blocks["q4_0"]), Aura("4v4").format(), kivi(4), kvarn_format(4, 4)]
    every += [
        turboquant(*preset) for preset in (("4bit_nc", 4, 4), ("3bit_nc", 3, 3), ("k8v4", 8, 4), ("k3v4_nc", 3, 4))
    ]
    every += [kvarn_format(4, 2), kvarn_format(2, 2), kivi(2), with_rotation("q5_0", blocks["q5_0"])]
    every += [alike("fp8 e4m3", "others", cache_formats.fp8), with_rotation("q8_0", blocks["q8_0"])]
    every += [alike(name, "others", code) for name, code in blocks.items()]
    for bits in (4, 2):
        code = partial(cache_formats.affine, bits=bits, size=cache_formats.GROUP)
        every.append(alike(f"quanto {bits} bits", "others", code, tile=128))
    every += [Aura(s, 64, True, 8).format() for s in ("4v2", "3v2", "8v4")]
    every += [Aura(s, 64, True, 6).format() for s in ("4v4", "3v3", "2v2", "4v2", "3v2", "8v4")]
    every += [Aura("4v4", tail).format() for tail in (64, 32, 128, 256)] + [Aura("4v4", 64, True).format()]
    for scheme in ("3v3", "2v2", "4v2", "3v2", "8v4", "8v8"):
        every += [Aura(scheme).format(), Aura(scheme, 64).format(), Aura(scheme, 64, True).format()]
    every += [Aura(s, tail, True, 8).format() for tail in (32, 128) for s in ("4v4", "3v3", "2v2")]
    every += [Aura(s, 128).format() for s in ("4v4t", "3v3t", "2v2t", "8v4t", "5v5", "8v4", "3v3", "2v2")]
    every += [Aura(s, 128).format() for s in ("5v4t", "5v3t", "4v3t", "4v2t", "3v2t")]
    every += [Aura("5v5", 128, True).format(), with_rotation("fp8 e4m3", cache_formats.fp8)]
    every += [Aura("4v4", 64, False, 8).format(), Aura("4v4", 128, True).format()]
    every += [Aura(s, 128, variant="earlier means").format() for s in ("4v4t", "4v4", "3v3t", "2v2t")]
    every += [Aura(s, 128, variant="no means").format() for s in ("4v4t", "3v3t", "2v2t")]
    return {form.name: form for form in every}
