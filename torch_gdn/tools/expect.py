"""Counts what a model reads, launches and computes, and its least time on a Mac: `python -m torch_gdn expect`."""

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torch_gdn import _macs, command_line
from torch_gdn._macs import MACS, Mac
from torch_gdn.memory import gigabytes, sizes_when_loaded
from torch_gdn.tools import fits

LAUNCH_SECONDS = (5e-6, 10e-6)  # assumed of a launch behind others; `check` measures it on a Mac
THIS_FILE = "the folder's files"


class Launches(NamedTuple):
    """Kernel launches of a decode step with transformers and torch_gdn, weights in bfloat16."""

    once: int
    linear_layer: int
    full_layer: int


# By the configuration's class. tests/integrations/launches.json has them by operator.
LAUNCHES = {
    "Qwen3_5TextConfig": Launches(once=40, linear_layer=13, full_layer=15),
    "Qwen3_5MoeTextConfig": Launches(once=40, linear_layer=14, full_layer=16),
    "Qwen3NextConfig": Launches(once=35, linear_layer=12, full_layer=16),
    "OlmoHybridConfig": Launches(once=33, linear_layer=16, full_layer=18),
}


@dataclass(frozen=True)
class Work:
    """What a model must do at least. Arithmetic is counted in multiply-adds."""

    needs: fits.Needs  # the memory of weights, states, and keys and values
    weights: dict[str, int]  # bytes of weights that a decoded token reads, by the format's name
    launches: int | None  # of a decoded token, or None if nobody has counted them for this kind of model
    products: int  # of a prompt's token with weights, without the embedding and the head
    head: int  # of the last token with the head
    rule: int  # of a prompt's token with the states
    attention: int  # of a pair of tokens, one attending to the other

    def moved(self, name: str, tokens: int) -> int:
        """Returns the bytes that a token moves after `tokens` others. It reads their keys and writes its own, and reads
        and writes the states.
        """
        return self.weights[name] + 2 * self.needs.state + (tokens + 1) * self.needs.cache_per_token

    def prompt(self, tokens: int) -> dict[str, int]:
        """Returns a prompt's float operations, two per multiply-add. A token attends to itself and those before."""
        return {
            "products": 2 * (tokens * self.products + self.head),
            "the rule": 2 * tokens * self.rule,
            "attention": tokens * (tokens + 1) * self.attention,
        }


def work_of(text: Any) -> Work:
    """Returns the work of a language model with this configuration, of `fits.text_of`."""
    model: Any = fits.model_of(text)
    needs = fits.needs_of_model(model, text)
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    share = active_share(text)
    weights, products = Counter[str](), 0
    for x, how in fits.packable(model):
        _, is_expert, _ = how
        used = int(x.numel() * share) if is_expert else x.shape[1] if x is table and x is not head else x.numel()
        for each in fits.FORMATS:
            weights[each.name] += each.bytes_of(used, *how)
        products += used if x.dim() > 1 and x is not table and x is not head else 0
    counted = LAUNCHES.get(type(text).__name__)
    linear, full = fits.layers(text, "linear_attention"), fits.layers(text, "full_attention")
    return Work(
        needs=needs,
        weights={name: weights[name] for name in needs.weights},
        launches=counted and counted.once + linear * counted.linear_layer + full * counted.full_layer,
        products=products,
        head=head.numel(),
        rule=linear * 3 * fits.state_values(text),  # read by the key, written, and read by the query
        attention=full * attention_of(text),
    )


def active_share(text: Any) -> float:
    """Returns the share of the experts' weights that a token uses."""
    experts = getattr(text, "num_experts", 0) or getattr(text, "n_routed_experts", 0)
    return text.num_experts_per_tok / experts if experts else 1.0


def attention_of(text: Any) -> int:
    """Returns a layer's multiply-adds for a pair of tokens: products of the query with the key, and with the value."""
    if getattr(text, "kv_lora_rank", 0):
        size = text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim
    else:
        size = 2 * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    return int(text.num_attention_heads * size)


OTHER_PARTS = re.compile(r"(^|\.)(mtp|visual|vision_tower|vision_model)\.")  # a text token does not read them
EXPERTS = re.compile(r"\.(experts|switch_mlp)\.")


def bytes_of_files(folder: Path, text: Any) -> tuple[int, int] | None:
    """Returns the bytes of a folder's safetensors files that a decoded token reads, and those of the language model.

    Returns None if the folder has no such file, or has experts under names that are not known.
    """
    files = sorted(folder.glob("*.safetensors"))
    sizes = {n: size for n, size in sizes_when_loaded(files, torch.bfloat16) if not OTHER_PARTS.search(n)}
    share, has_head = active_share(text), any("lm_head" in name for name in sizes)
    if not sizes or (share < 1 and not any(map(EXPERTS.search, sizes))):
        return None
    read = 0.0
    for name, size in sizes.items():
        is_row = "embed_tokens" in name and has_head
        read += size * (share if EXPERTS.search(name) else 1 / text.vocab_size if is_row else 1)
    return int(read), sum(sizes.values())


# ---- what is printed -------------------------------------------------------------------------------------------------


def least_seconds(work: Work, name: str, tokens: int, mac: Mac, launch: float = LAUNCH_SECONDS[0]) -> tuple[float, str]:
    """Returns the least time of a decoded token, and what it is the time of: "memory" or "launches"."""
    by_memory, by_launches = work.moved(name, tokens) / (mac.bandwidth * 1e9), (work.launches or 0) * launch
    return (by_memory, "memory") if by_memory >= by_launches else (by_launches, "launches")


def decoding(work: Work, tokens: int) -> Iterator[str]:
    yield f"A token decoded after {tokens:,} others reads and writes, in GB:"
    cache, states = gigabytes((tokens + 1) * work.needs.cache_per_token), gigabytes(2 * work.needs.state)
    rows = [("weights", "of weights", "of states", "of keys and values", "in all")]
    for name, size in work.weights.items():
        rows.append((name, gigabytes(size), states, cache, gigabytes(work.moved(name, tokens))))
    yield from fits.aligned(rows)
    yield ""
    if work.launches is None:
        yield "Its kernel launches have not been counted for this kind of model."
        return
    low, high = (f"{work.launches * each * 1e3:.1f}" for each in LAUNCH_SECONDS)
    yield f"With transformers, it takes {work.launches} kernel launches: {low} to {high} ms at 5 to 10 us each."


def on_one_mac(work: Work, tokens: int, mac: Mac, memory: int | None) -> Iterator[str]:
    limit = fits.recommended(memory) if memory else None
    size = f"; {memory} GB of memory, of which Metal recommends {gigabytes(limit)}" if limit else ""
    yield f"{mac.name}, {mac.bandwidth} GB/s{size}:"
    rows = [("weights", "least ms a token", "tokens/s at most", "what takes it")]
    for name in work.weights:
        if limit and work.needs.total(name, tokens + 1) > limit:
            rows.append((name, "-", "-", "does not fit"))
            continue
        seconds, what = least_seconds(work, name, tokens, mac)
        slow, _ = least_seconds(work, name, tokens, mac, LAUNCH_SECONDS[1])
        span = f"{seconds * 1e3:.1f}" + (f" to {slow * 1e3:.1f}" if slow > seconds else "")
        rows.append((name, span, f"{1 / seconds:.0f}", what))
    yield from fits.aligned(rows)


def on_all_macs(work: Work, tokens: int) -> Iterator[str]:
    yield "The least ms a token, by the format of weights. Where a * stands, launches take it, else the memory does:"
    rows = [("Mac", "GB/s", *(name.partition(",")[0] for name in work.weights))]
    for mac in MACS:
        result = (least_seconds(work, name, tokens, mac) for name in work.weights)
        cells = (f"{seconds * 1e3:.1f}{'*' if what == 'launches' else ' '}" for seconds, what in result)
        rows.append((mac.name, str(mac.bandwidth), *cells))
    yield from fits.aligned(rows)


def prompt(work: Work, tokens: int, macs: Sequence[Mac]) -> Iterator[str]:
    operations = work.prompt(tokens)
    total = sum(operations.values())
    most = max(operations, key=operations.__getitem__)
    yield f"A prompt of {tokens:,} tokens takes {total / 1e12:,.2f} TFLOP, most of it in {most}:"
    yield "  " + ", ".join(f"{name} {each / 1e12:,.2f} ({each / total:.0%})" for name, each in operations.items())
    times = "; ".join(f"{mac.name} {total / mac.flops:.3g} s" for mac in macs)
    rate = f"{_macs.LANES} multiply-adds a clock and core (M5: {_macs.MATRIX_LANES})"
    yield f"At 1.6 GHz and {rate}, it takes at least: {times}."


def report(model: str, work: Work, tokens: int, mac: Mac | None, memory: int | None) -> Iterator[str]:
    yield f"{model}: bounds, not promises. torch_gdn has not been timed on a Mac."
    yield ""
    yield from decoding(work, tokens)
    yield ""
    yield from on_one_mac(work, tokens, mac, memory) if mac else on_all_macs(work, tokens)
    yield ""
    chips = [mac] if mac else [_macs.find(chip)[0] for chip in ("M1", "M4 Max", "M5 Max")]
    yield from prompt(work, tokens, chips)


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line.expect().parse_args(arguments)
    try:
        text = fits.text_of(fits.configuration_of(options.model))
        work = work_of(text)
        sizes = bytes_of_files(Path(options.model), text)
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f"{command_line.PROGRAM} expect: {options.model}: {error}")
    if sizes:
        work.weights[THIS_FILE], work.needs.weights[THIS_FILE] = sizes
    print("\n".join(report(options.model, work, options.tokens, *(options.mac or (None, None)))))
    return 0
