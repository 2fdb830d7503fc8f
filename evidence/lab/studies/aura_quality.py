"""Tabulates and plots what AURA's schemes cost in accuracy and save in memory.

    python -m evidence.lab.studies.aura_quality [--plot docs/aura_quality.png]

For accuracy, random queries attend to random keys and values (D = 128, T = 4,096, normal). The queries are scaled so
that the scores have a standard deviation, the spread, of 1 to 8, which goes from a mean over many keys to a choice of
few. The error is ||o - exact|| / ||exact||, where exact is float64 attention to the uncompressed keys and values. Each
scheme runs with our codebooks, and with those of the systems that AURA comes from (FFAI, mlx-swift-lm).

The model of examples/pycode then reads Python modules that it never saw, with its attention on codes. The table has the
relative error of its logits, and its bits per byte.

For memory, the table has the bytes per token of a real cache, compared with float16, and those of a layer of Qwen3-Next
(2 KV heads, D = 256) with 32,768 tokens.

evidence.lab.studies.format_quality compares other formats, and writes the plot aura_formats.png into the same folder.
evidence.lab.studies.kv_quality is another command. It compares formats at equal bytes on trained models.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from evidence.lab.studies import format_quality
from evidence.lab.studies.figures import panels_at
from examples.pycode import corpus
from torch_gdn.aura import KVCache, Scheme
from torch_gdn.integrations.transformers.versions import with_cache

NAMES = {"lloyd-max": "ours", "origin": "origin's"}
SCHEMES = ("8v8", "8v4", "4v4", "4v2", "3v3", "2v2")
TABLES = ("lloyd-max", "origin")
SPREADS = (1, 2, 3, 4, 6, 8)
ROOT = Path(__file__).resolve().parents[3]
PLOT = ROOT / "docs/aura_quality.png"


class Sizes(NamedTuple):
    heads: int = 4
    queries: int = 16
    tokens: int = 4096
    D: int = 128


def errors(sizes: Sizes, spreads: tuple[int, ...] = SPREADS) -> dict[tuple[str, str], list[float]]:
    """Returns the relative error of the output, by scheme and table, for each spread."""
    torch.manual_seed(0)
    heads, queries, tokens, D = sizes
    q, k, v = (torch.randn(1, heads, count, D) for count in (queries, tokens, tokens))
    exact = [attention(spread * q, k, v) for spread in spreads]
    result = {}
    for scheme in tqdm(SCHEMES, desc="schemes", unit="scheme"):
        for table in TABLES:
            cache = KVCache(Scheme(scheme, table), 1, heads, D, tokens, dtype=torch.float32, tail=0, sinks=0)
            cache.append(k, v)
            outputs = [cache.attend(spread * q, causal=False) for spread in spreads]
            pairs = zip(outputs, exact, strict=True)
            result[scheme, table] = [((o - right).norm() / right.norm()).item() for o, right in pairs]
    return result


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())


def error_table(found: dict[tuple[str, str], list[float]]) -> str:
    rows = ["| scheme | codebooks | " + " | ".join(f"spread {spread}" for spread in SPREADS) + " |"]
    rows += ["|---|---|" + "---|" * len(SPREADS)]
    for (scheme, table), row in found.items():
        rows.append(f"| {scheme} | {NAMES[table]} | " + " | ".join(f"{error:.3f}" for error in row) + " |")
    return "\n".join(rows)


def held_back_pieces(count: int, length: int) -> Tensor:
    """Returns [count, length + 1] tokens, the middle of each of `count` modules that examples/pycode's model never
    saw."""
    files = corpus.held_back_files(corpus.standard_library())[:count]
    pieces = [corpus.pieces(corpus.as_tensor(corpus.joined([file])), length) for file in files]
    return torch.stack([pieces_of_file[len(pieces_of_file) // 2] for pieces_of_file in pieces]).long()


@torch.no_grad()
def model_table(pieces: Tensor, schemes: tuple[str, ...] = SCHEMES) -> str:
    """Tabulates the trained model on these tokens, by scheme and table: error of the logits, bits per byte."""
    from transformers import Qwen3NextForCausalLM

    from torch_gdn.integrations.transformers.aura import AuraCache

    model = Qwen3NextForCausalLM.from_pretrained(Path(corpus.__file__).parent, dtype=torch.float32).eval()
    exact = model(input_ids=pieces[:, :-1]).logits
    rows = ["| scheme | codebooks | error of the logits | bits per byte |", "|---|---|---|---|"]
    rows.append(f"| float32 | | | {bits(exact, pieces):.3f} |")
    model.set_attn_implementation("aura")
    for scheme in tqdm(schemes, desc="a trained model", unit="scheme"):
        for table in TABLES:
            cache = AuraCache(model.config, Scheme(scheme, table), tail=0, sinks=0)
            logits = model(input_ids=pieces[:, :-1], **with_cache(cache)).logits
            error = ((logits - exact).norm() / exact.norm()).item()
            rows.append(f"| {scheme} | {NAMES[table]} | {error:.4f} | {bits(logits, pieces):.3f} |")
    return "\n".join(rows)


def bits(logits: Tensor, pieces: Tensor) -> float:
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())
    return loss.item() / math.log(2)


def bytes_per_token(scheme: str, D: int) -> int:
    """Measures the bytes of a key and a value in one head."""
    return KVCache(scheme, 1, 1, D, capacity=64, tail=0, sinks=0).bytes_reserved // 64


def memory_table(tokens: int = 32_768) -> str:
    """Tabulates the ratios at D = 64 and 128, and memory and error at a spread of 4 of a Qwen3-Next attention layer."""
    rows = [
        f"| scheme | bytes a token and head, D = 64 | of float16 | D = 128 | of float16 | {tokens:,} tokens, 2 heads, "
        "D = 256 | of float16 | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    torch.manual_seed(0)
    k, v, q = torch.randn(1, 2, tokens, 256), torch.randn(1, 2, tokens, 256), 4 * torch.randn(1, 16, 1, 256)
    exact = attention(q, k.repeat_interleave(8, 1), v.repeat_interleave(8, 1))
    for scheme in tqdm(SCHEMES, desc=f"{tokens:,} tokens", unit="scheme"):
        row = [scheme]
        for D in (64, 128):
            measured = bytes_per_token(scheme, D)
            row += [str(measured), f"1/{4 * D / measured:.2f}"]
        cache = KVCache(scheme, 1, 2, 256, tokens, dtype=torch.float32, tail=0, sinks=0)
        for first in range(0, tokens, 4096):
            cache.append(k[:, :, first : first + 4096], v[:, :, first : first + 4096])
        assert len(cache) == tokens and cache.bytes_used == cache.bytes_reserved
        ratio = 2 * 2 * k.numel() / cache.bytes_used
        error = ((cache.attend(q) - exact).norm() / exact.norm()).item()
        row += [f"{cache.bytes_used / 2**20:.1f} MiB", f"1/{ratio:.2f}", f"{error:.3f}"]
        rows.append("| " + " | ".join(row) + " |")
    return "\n".join(rows)


def plot(found: dict[tuple[str, str], list[float]], path: Path) -> None:
    """Plots the error over the spread on the left, and the error at a spread of 4 over bytes on the right."""
    with panels_at(path, 2, figsize=(10, 4), width_ratios=(3, 2)) as (left, right):
        for i, scheme in enumerate(SCHEMES):
            ours, origin = found[scheme, "lloyd-max"], found[scheme, "origin"]
            left.plot(SPREADS, ours, f"C{i}-", marker="o", markersize=3, label=scheme)
            left.plot(SPREADS, origin, f"C{i}--", marker="o", markersize=3)
            size, at = bytes_per_token(scheme, 128), SPREADS.index(4)
            right.plot([size, size], [ours[at], origin[at]], f"C{i}:")
            right.plot(size, ours[at], f"C{i}o")
            right.plot(size, origin[at], f"C{i}o", markerfacecolor="none")
            right.annotate(scheme, (size, ours[at]), xytext=(5, -10), textcoords="offset points", fontsize=8)
        left.set(xlabel="spread of the scores", ylabel="relative error of the output", yscale="log", xticks=SPREADS)
        left.set_title("D = 128, 4,096 tokens; dashed: the origin systems' codebooks", fontsize=9)
        left.legend(fontsize=8, ncols=2)
        right.set(xlabel="bytes per token and head (float16: 512)", yscale="log")
        right.set_title("spread 4; hollow: the origin systems' codebooks", fontsize=9)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measures the accuracy and memory of AURA's schemes and of other formats, as tables and plots"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        default=PLOT,
        help=f"where the plot goes (default: {PLOT.relative_to(ROOT)} of the checkout)",
    )
    arguments = parser.parse_args()
    result = errors(Sizes())
    pieces = held_back_pieces(8, 1024)
    print(error_table(result), memory_table(), model_table(pieces), sep="\n\n")
    compared = format_quality.compare_all(format_quality.sources(pieces[:, :-1]))
    print("", format_quality.table(compared), sep="\n\n")
    formats_plot = arguments.plot.with_name("aura_formats.png")
    plot(result, arguments.plot)
    format_quality.plot(compared, formats_plot)
    print(f"\nThe plots: {arguments.plot}, {formats_plot}")


if __name__ == "__main__":
    main()
