"""Compares AURA with the formats of other systems' keys and values (evidence.lab.studies.cache_formats), by bits a
value.

Each format codes the same keys and values. Float64 attention to the decoded ones is compared with attention to the
originals, ||o - exact|| / ||exact||, and so are the keys and the values themselves. There are three sources with D =
128:

    normal      random keys and values, scores with a standard deviation of 1
    outliers    the same, but four channels of the keys are ten times as large and have a mean, as models' keys do
    model       what the attention layer of examples/pycode computes on modules that it never saw
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

import torch_gdn
from evidence.lab.studies.cache_formats import FORMATS, Stored
from evidence.lab.studies.figures import panels_at
from examples.pycode import corpus
from torch_gdn.aura import KVCache, codebooks

SCHEMES = ("8v8", "8v4", "4v4", "4v3", "4v2", "3v3", "3v2", "2v2")
SIGNS = {"keys": 0, "values": 1}  # seeds, as in KVCache
OUTLIERS = {3: 10.0, 40: -10.0, 77: 10.0, 100: -10.0}  # channel -> factor, and its mean
FAMILIES = ("AURA", "as they are", "after AURA's rotation")


class Source(NamedTuple):
    """Queries [B, HQ, L, D] of the last L positions, keys and values [B, HK, T, D], float32."""

    q: Tensor
    k: Tensor
    v: Tensor

    def attention(self, k: Tensor, v: Tensor) -> Tensor:
        queries, keys = self.q.shape[2], k.shape[2]
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        q, k, v = self.q.double(), k.double(), v.double()
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


class Result(NamedTuple):
    name: str
    family: str
    bits: float  # per value, the mean of keys and values
    errors: tuple[float, float, float]  # keys, values and attention's output


def random_source(outliers: bool, tokens: int = 4096, heads: int = 4, queries: int = 16, D: int = 128) -> Source:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, count, D) for count in (queries, tokens, tokens))
    if outliers:
        for channel, factor in OUTLIERS.items():
            k[..., channel] = factor * (1 + k[..., channel])
            q[..., channel] /= abs(factor)
    return Source(q, k, v)


@torch.no_grad()
def model_source(pieces: Tensor) -> Source:
    """Returns what the model's attention layer gets for these tokens [count, length]."""
    from transformers import AttentionInterface, Qwen3NextForCausalLM

    result: list[Source] = []
    attend = AttentionInterface()["sdpa"]

    def watched(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
        result.append(Source(q, k, v))
        return attend(module, q, k, v, *args, **options)

    AttentionInterface.register("watched", watched)
    model = Qwen3NextForCausalLM.from_pretrained(Path(corpus.__file__).parent, dtype=torch.float32).eval()
    model.set_attn_implementation("watched")
    model(input_ids=pieces)
    (source,) = result
    return source


def store_as_aura(source: Source, scheme: str) -> tuple[Tensor, Tensor, float]:
    """Returns keys and values as a cache without a tail decodes them, and bits per value."""
    B, heads, tokens, D = source.k.shape
    cache = KVCache(scheme, B, heads, D, tokens, dtype=torch.float32, tail=0, sinks=0)
    cache.append(source.k, source.v)
    k, v = cache.decoded()
    return k, v, 8 * cache.bytes_used / (k.numel() + v.numel())


def store_as_format(source: Source, name: str, rotated: bool) -> tuple[Tensor, Tensor, float]:
    stored = [
        store_rotated(FORMATS[name], x, SIGNS[what] if rotated else None)
        for what, x in zip(SIGNS, source[1:], strict=True)
    ]
    k, v = stored
    return k.decoded, v.decoded, (k.bits + v.bits) / 2


def store_rotated(form: Callable[[Tensor], Stored], x: Tensor, seed: int | None) -> Stored:
    """Codes and decodes x. With a seed, x is rotated by those signs before, and back afterwards."""
    if seed is None:
        return form(x)
    signs = codebooks.aura_signs(x.shape[-1], seed)
    stored = form(torch_gdn.aura_rotate(x, signs))
    return stored._replace(decoded=torch_gdn.aura_rotate(stored.decoded, signs, inverse=True))


def relative_error(x: Tensor, exact: Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm()).item()


def compare(source: Source) -> list[Result]:
    """Compares every scheme and every format on one source."""
    exact = source.attention(source.k, source.v)

    def result(name: str, family: str, k: Tensor, v: Tensor, bits: float) -> Result:
        pairs = ((k, source.k.double()), (v, source.v.double()), (source.attention(k, v), exact))
        k_error, v_error, o_error = (relative_error(x, right) for x, right in pairs)
        return Result(name, family, bits, (k_error, v_error, o_error))

    found = []
    for scheme in SCHEMES:
        found.append(result(f"AURA {scheme}", FAMILIES[0], *store_as_aura(source, scheme)))
    for name in FORMATS:
        for family, rotated in zip(FAMILIES[1:], (False, True), strict=True):
            found.append(result(name, family, *store_as_format(source, name, rotated)))
    return found


def sources(pieces: Tensor) -> dict[str, Source]:
    return {
        "normal": random_source(outliers=False),
        "outliers": random_source(outliers=True),
        "model": model_source(pieces),
    }


def compare_all(by_name: dict[str, Source]) -> dict[str, list[Result]]:
    return {name: compare(source) for name, source in tqdm(by_name.items(), desc="other formats", unit="source")}


def table(found: dict[str, list[Result]]) -> str:
    """Returns a row for each way to store, by bits."""
    columns = [f"{name}: {what}" for name in found for what in ("keys", "values", "attention")]
    rows = ["| | bits a value | " + " | ".join(columns) + " |", "|---|---|" + "---|" * len(columns)]
    for results in sorted(zip(*found.values(), strict=True), key=lambda of: -of[0].bits):
        first = results[0]
        name = first.name + (", rotated" if first.family == FAMILIES[2] else "")
        errors = " | ".join(f"{error:.3g}" for result in results for error in result.errors)
        rows.append(f"| {name} | {first.bits:.3f} | {errors} |")
    return "\n".join(rows)


def plot(found: dict[str, list[Result]], path: Path) -> None:
    """Plots attention's error over bits a value, with a panel for each source and a marker for each family."""
    with panels_at(path, len(found), figsize=(5 * len(found), 4.2), sharey=True) as panels:
        markers = dict(zip(FAMILIES, (("o-", "C0"), ("s", "C1"), ("^", "C2")), strict=True))
        for axes, (name, results) in zip(panels, found.items(), strict=True):
            for family, (marker, colour) in markers.items():
                points = sorted((r.bits, r.errors[2], r.name) for r in results if r.family == family)
                bits, errors, _ = zip(*points, strict=True)
                axes.plot(bits, errors, marker, color=colour, label=family, markersize=5, linewidth=0.8)
                for at, error, label in points if family != FAMILIES[2] else ():
                    text = label.removeprefix("AURA ")
                    offset = (-4, -11) if family == FAMILIES[0] else (4, 12 if "4 bits" in text else 3)
                    axes.annotate(
                        text, (at, error), xytext=offset, textcoords="offset points", fontsize=7, color=colour
                    )
            axes.set(title=name, xlabel="bits a value, with scales", yscale="log")
        panels[0].set_ylabel("relative error of attention's output")
        panels[0].legend(fontsize=8)
