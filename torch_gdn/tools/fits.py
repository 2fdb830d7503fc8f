"""Counts the memory that a model needs, and finds the smallest Mac that it fits on: `python -m torch_gdn fits`."""

import importlib
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from torch_gdn import command_line
from torch_gdn._mps import why_no_mps
from torch_gdn.memory import gigabytes

MEMORIES = (8, 16, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)  # Apple's GB, which are 2^30 bytes


@dataclass(frozen=True)
class Format:
    """A storage format of weights: `bits` codes with a 16-bit scale and bias per group, or with a 32-bit scale for each
    block of `block` x `block`, or bfloat16.
    """

    name: str
    bits: int = 16
    group_size: int = 0
    experts_only: bool = False
    block: int = 0

    def bytes_of(self, values: int, columns: int, is_expert: bool, is_vocabulary: bool = False) -> int:
        if self.block and columns > 1 and not is_vocabulary:
            rows = values // columns
            return values + 4 * -(-rows // self.block) * -(-columns // self.block)
        if self.bits == 16 or (self.experts_only and not is_expert) or self.block or columns % self.group_size:
            return 2 * values
        return values * self.bits // 8 + values // self.group_size * 4


FORMATS = (
    Format("bf16"),
    Format("FP8, blocks of 128 x 128", 8, block=128),
    Format("8 bits, groups of 64", 8, 64),
    Format("4 bits, groups of 64", 4, 64),
    Format("experts in 4 bits, groups of 128", 4, 128, experts_only=True),
)


@dataclass(frozen=True)
class Needs:
    """The memory that a model needs, in bytes. A format that packs experts only is left out if it packs none."""

    parameters: int  # their number; tied parameters count once
    weights: dict[str, int]  # by the format's name
    state: int  # of the recurrent and convolution states, per request
    cache_per_token: int  # of keys and values, per token and request

    def total(self, name: str, tokens: int = command_line.FITTED_TOKENS, requests: int = 1) -> int:
        return self.weights[name] + requests * (self.state + tokens * self.cache_per_token)


def recommended(memory: int) -> int:
    """Returns the bytes that Metal recommends to use at most on a Mac with `memory` of Apple's GB.

    Users of llama.cpp reported two thirds for 16 and 32 GB (ggml-org/llama.cpp#1826, abetlen/llama-cpp-python#687) and
    three quarters for 64 and 96 GB (ggml-org/llama.cpp#1870, #3213). Two thirds are assumed in between. A newer macOS
    may recommend more. On a Mac, `torch.mps.recommended_max_memory()` has the number.
    """
    return (memory << 30) * 3 // 4 if memory >= 64 else (memory << 30) * 2 // 3


def smallest_mac(needed: int) -> int | None:
    """Returns the memory, in Apple's GB, of the smallest Mac for which Metal recommends that much, or None."""
    return next((size for size in MEMORIES if recommended(size) >= needed), None)


# ---- a configuration -------------------------------------------------------------------------------------------------


def configuration_of(model: str) -> Any:
    transformers = importlib.import_module("transformers")
    if model in command_line.KNOWN_MODELS:
        return getattr(transformers, command_line.KNOWN_MODELS[model])()
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)  # without a network, it logs each of its attempts; the error at the end says enough
    try:
        return transformers.AutoConfig.from_pretrained(model)
    finally:
        log.setLevel(level)


def needs_of(configuration: Any) -> Needs:
    """Returns what a causal language model with this configuration takes.

    Raises:
        ValueError: If the model has no Gated DeltaNet or Kimi Delta Attention layers with the configuration's usual
            names, or has layers that are neither these nor full attention.
    """
    text = text_of(configuration)
    return needs_of_model(model_of(text), text)


def needs_of_model(model: nn.Module, text: Any) -> Needs:
    parameters = list(packable(model))
    weights = {each: sum(each.bytes_of(x.numel(), *how) for x, how in parameters) for each in FORMATS}
    unpacked = weights[FORMATS[0]]
    return Needs(
        parameters=sum(x.numel() for x, _ in parameters),
        weights={each.name: size for each, size in weights.items() if not (each.experts_only and size == unpacked)},
        state=state_bytes(text),
        cache_per_token=cache_bytes(text),
    )


def text_of(configuration: Any) -> Any:
    """Returns the configuration of the language model. Raises what `needs_of` raises."""
    text = configuration.get_text_config()
    if not (hasattr(text, "linear_num_value_heads") or hasattr(text, "linear_num_heads")):
        raise ValueError(
            "configuration: expected a model with Gated DeltaNet or Kimi Delta Attention layers, "
            f"got {text.model_type!r}"
        )
    if others := set(text.layer_types) - {"linear_attention", "full_attention"}:
        raise ValueError(
            f"configuration: layer_types: expected linear_attention and full_attention, got {', '.join(sorted(others))}"
        )
    return text


def model_of(text: Any) -> nn.Module:
    """Builds the model without memory."""
    auto = importlib.import_module("transformers").AutoModelForCausalLM
    with torch.device("meta"):
        model: nn.Module = auto.from_config(text)
    return model


def packable(model: nn.Module) -> Iterator[tuple[Tensor, tuple[int, bool, bool]]]:
    """Yields each parameter once, with its columns (1 if it is never packed), and whether it is an expert's, or an
    embedding's or a head's.
    """
    seen: set[Tensor] = set()
    head = getattr(model, "lm_head", None)
    for module in model.modules():
        for x in module.parameters(recurse=False):
            if x in seen:
                continue
            seen.add(x)
            is_expert = x.dim() == 3 and "Experts" in type(module).__name__
            is_matrix = isinstance(module, nn.Linear | nn.Embedding) and x.dim() == 2
            is_vocabulary = module is head or isinstance(module, nn.Embedding)
            yield x, (x.shape[-1] if is_matrix or is_expert else 1, is_expert, is_vocabulary)


def layers(text: Any, kind: str) -> int:
    return list(text.layer_types).count(kind)


def heads_of(text: Any) -> tuple[int, int, int]:
    """Returns the sizes of all keys of a linear layer, of one key, and of all values."""
    if hasattr(text, "linear_num_heads"):  # Kimi Delta Attention
        size = text.linear_num_heads * text.linear_head_dim
        return size, text.linear_head_dim, size
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    return keys, text.linear_key_head_dim, text.linear_num_value_heads * text.linear_value_head_dim


def state_values(text: Any) -> int:
    """Returns how many numbers the state of a linear layer has."""
    _, key_size, values = heads_of(text)
    return int(key_size * values)


def state_bytes(text: Any) -> int:
    """Returns the bytes of one request's states: float32, with the convolution's columns in bfloat16."""
    keys, _, values = heads_of(text)
    convolution = 2 * (2 * keys + values) * text.linear_conv_kernel_dim
    return layers(text, "linear_attention") * (4 * state_values(text) + convolution)


def cache_bytes(text: Any) -> int:
    """Returns the bytes of one token's keys and values in bfloat16."""
    if rank := getattr(text, "kv_lora_rank", 0):
        per_layer = rank + text.qk_rope_head_dim  # latent attention: a vector for all heads, and the rotated part
    else:
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        per_layer = 2 * text.num_key_value_heads * size
    return layers(text, "full_attention") * 2 * per_layer


# ---- several machines ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """How a model is divided among machines."""

    format: Format  # of the weights
    layers: tuple[int, ...]  # how many each machine has
    needed: tuple[int, ...]  # the bytes that each machine needs, for weights, states and cache


def size_of(module: nn.Module, format: Format) -> int:
    return sum(format.bytes_of(x.numel(), *how) for x, how in packable(module))


def decoder_layers(model: nn.Module, text: Any) -> nn.ModuleList:
    result = (x for x in model.modules() if isinstance(x, nn.ModuleList) and len(x) == text.num_hidden_layers)
    return next(result)


def divide(costs: Sequence[int], first: int, last: int, is_attention: Sequence[bool], memories: Sequence[int]) -> Any:
    """Returns the numbers of layers that fill the fullest machine least, or None if there are too few layers.

    Args:
        costs: bytes of each layer.
        first, last: bytes that the first and the last machine hold besides.
        is_attention: whether each layer has keys and values; vLLM wants such a layer on every machine.
        memories: bytes that each machine may use.
    """
    sums = [0, *accumulate(costs)]
    attention = [0, *accumulate(map(int, is_attention))]
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for machine, memory in enumerate(memories):
        besides = (first if machine == 0 else 0) + (last if machine == len(memories) - 1 else 0)
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (fullest, parts) in best.items():
            for end in range(start + 1, len(costs) + 1):
                if attention[end] == attention[start]:
                    continue
                result = max(fullest, (sums[end] - sums[start] + besides) / memory)
                if end not in following or result < following[end][0]:
                    following[end] = (result, (*parts, end - start))
        best = following
    return best[len(costs)][1] if len(costs) in best else None


def parts_of(
    configuration: Any, machines: Sequence[int], tokens: int = command_line.FITTED_TOKENS, requests: int = 1
) -> Parts | None:
    """Returns the parts for the first format with which every machine holds its own, or None.

    `machines` are the memory of each, in Apple's GB. `tokens` are those of one request, and `requests` run at a time.
    """
    text = configuration.get_text_config()
    model: Any = model_of(text)
    decoder = decoder_layers(model, text)
    kinds = [kind == "full_attention" for kind in text.layer_types]
    state = requests * state_bytes(text) // max(1, layers(text, "linear_attention"))
    cache = requests * tokens * cache_bytes(text) // max(1, sum(kinds))
    memories = [recommended(memory) for memory in machines]
    for format in FORMATS:
        costs = [size_of(x, format) + (cache if attends else state) for x, attends in zip(decoder, kinds, strict=True)]
        embedding = size_of(model.get_input_embeddings(), format)
        rest = size_of(model, format) - sum(size_of(x, format) for x in decoder) - embedding
        tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        last = rest + embedding if tied else rest  # the last machine has a copy of what is tied
        counts = divide(costs, embedding, last, kinds, memories)
        if counts is None:
            return None
        ends = list(accumulate(counts))
        needed = [sum(costs[end - number : end]) for number, end in zip(counts, ends, strict=True)]
        needed[0] += embedding
        needed[-1] += last
        if all(size <= memory for size, memory in zip(needed, memories, strict=True)):
            return Parts(format, counts, tuple(needed))
    return None


# ---- what is printed -------------------------------------------------------------------------------------------------


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the rows, the first column aligned to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [f"{first:{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()


def report(model: str, needs: Needs, tokens: int, requests: int) -> Iterator[str]:
    state, cache = requests * needs.state, requests * tokens * needs.cache_per_token
    yield f"{model}: {needs.parameters / 1e9:.1f} billion parameters"
    yield f"{requests} x state: {gigabytes(state)} GB; {requests} x cache of {tokens:,} tokens: {gigabytes(cache)} GB"
    here = 0 if why_no_mps() else torch.mps.recommended_max_memory()
    if here:
        yield f"Metal recommends {gigabytes(here)} GB on this machine."
    yield ""
    rows = [("weights", "GB", "in all", "smallest Mac")]
    for name, weights in needs.weights.items():
        needed = needs.total(name, tokens, requests)
        mac = smallest_mac(needed)
        fits = ("; fits here" if needed <= here else "; does not fit here") if here else ""
        rows.append((name, gigabytes(weights), gigabytes(needed), (f"{mac} GB" if mac else "none") + fits))
    for line, (*_, mac_and_fit) in zip(aligned([row[:3] for row in rows]), rows, strict=True):
        yield f"{line}  {mac_and_fit}"


def report_of_parts(model: str, machines: Sequence[int], parts: Parts) -> Iterator[str]:
    """Yields what each machine holds, and the command that starts it."""
    count, partition = len(machines), ",".join(map(str, parts.layers))
    yield f"{model} on {count} machines, weights: {parts.format.name}"
    yield "ADDRESS: of machine 0 on the private network. OWN: of the machine itself. INTERFACE: the network's, on it."
    for rank, (memory, number, needed) in enumerate(zip(machines, parts.layers, parts.needed, strict=True)):
        headless = " --headless" if rank else ""
        yield ""
        limit = gigabytes(recommended(memory))
        yield f"machine {rank}, {memory} GB: {number} layers, {gigabytes(needed)} of {limit} GB"
        yield (
            f"VLLM_PP_LAYER_PARTITION={partition} GLOO_SOCKET_IFNAME=INTERFACE VLLM_HOST_IP=OWN "
            f"{command_line.PROGRAM} serve {model} --pipeline-parallel-size {count} "
            f"--nnodes {count} --node-rank {rank} --master-addr ADDRESS{headless}"
        )


def table() -> Iterator[str]:
    """Returns the table of docs/models.md."""
    yield "| model | weights | GB | state, MB | cache, GB | in all, GB | smallest Mac |"
    yield "|---|---|---|---|---|---|---|"
    for model in command_line.KNOWN_MODELS:
        needs = needs_of(configuration_of(model))
        for name, weights in needs.weights.items():
            cache, needed = command_line.FITTED_TOKENS * needs.cache_per_token, needs.total(name)
            mac = smallest_mac(needed)
            cells = [model, name, gigabytes(weights), f"{needs.state / 10**6:.0f}", gigabytes(cache)]
            yield f"| {' | '.join([*cells, gigabytes(needed), f'{mac} GB' if mac else 'none'])} |"


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line.fits().parse_args(arguments)
    if options.table:
        for row in table():
            print(row, flush=True)  # each model takes a while to count
        return 0
    name = f"{command_line.PROGRAM} fits: {options.model}"
    try:
        configuration = configuration_of(options.model)
        needs = needs_of(configuration)
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f"{name}: {error}")
    if options.machines:
        parts = parts_of(configuration, options.machines, options.tokens, options.requests)
        if parts is None:
            sys.exit(f"{name}: no format of the weights fits on these machines together")
        print("\n".join(report_of_parts(options.model, options.machines, parts)))
    else:
        print("\n".join(report(options.model, needs, options.tokens, options.requests)))
    return 0
