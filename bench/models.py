"""Times a whole layer and a whole model of transformers: tokens per second with torch_gdn and without, each eager and
compiled, and where the time goes.

The layer is Qwen3-Next's Gated DeltaNet with random weights, the model the trained one of examples/. transformers'
functions are switched before each round, outside the timed part. Decoding continues after the tokens of PROMPT, one
token per call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench import results
from bench.ceilings import Ceilings
from bench.results import OURS, Row
from bench.shapes import QWEN3_NEXT
from bench.timing import Call, measure
from torch_gdn.integrations.transformers.versions import CACHE_NAMES, with_cache
from torch_gdn_check.registry.bounds import relative_error

PYCODE = Path(__file__).resolve().parents[1] / "examples" / "pycode"
LAYER, MODEL = "Gated DeltaNet layer of Qwen3-Next", "model of examples/"
HIDDEN = 2048  # Qwen3-Next's
PROMPT, PREFILL, QUICK_PREFILL = 64, 512, 80
LARGEST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # against transformers' own functions in float32
PROFILED_SECONDS = 0.3
PARTS = ("torch_gdn's ops", "matrix products", "other ops", "Python and the rest")
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "linear", "mkl_linear", "scaled_dot_product", "flash_attention", "_mkldnn")
UNROLLED = "not run: its loop over the rows of a chunk unrolls, and is minutes at the compiler"


class Contender(NamedTuple):
    enabled: bool
    compiled: bool

    def __str__(self) -> str:
        return (OURS if self.enabled else "transformers") + (", compiled" if self.compiled else "")


CONTENDERS = [Contender(enabled, compiled) for compiled in (False, True) for enabled in (True, False)]
Step = Callable[[], Tensor]  # repeats the same tokens, or advances one token per call


def switch(enabled: bool) -> None:
    from torch_gdn.integrations import transformers

    if enabled:
        transformers.enable()
    else:
        transformers.disable()


def jobs(quick: bool) -> Iterator[tuple[str, str, torch.dtype, bool]]:
    for subject in (MODEL,) if quick else (LAYER, MODEL):
        for what in ("prefill", "decode"):
            for dtype in (torch.float32, torch.bfloat16):
                yield subject, what, dtype, quick


def layer_steps(dtype: torch.dtype, tokens: int) -> tuple[Any, Callable[[Any], tuple[Step, Step]]]:
    """Returns the layer, and functions that make its prefill and decoding steps, eager or compiled."""
    from transformers import DynamicCache, Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    heads = {"linear_num_key_heads": QWEN3_NEXT.H, "linear_num_value_heads": QWEN3_NEXT.HV}
    sizes = {"linear_key_head_dim": QWEN3_NEXT.K, "linear_value_head_dim": QWEN3_NEXT.V}
    config = Qwen3NextConfig(
        hidden_size=HIDDEN, num_hidden_layers=1, layer_types=["linear_attention"], **heads, **sizes
    )
    layer = Qwen3NextGatedDeltaNet(config, 0).eval().to(torch.bfloat16).to(dtype)
    x = torch.randn(1, tokens, HIDDEN).to(dtype)

    def steps(module: Any) -> tuple[Step, Step]:
        cache = DynamicCache(config=config)

        def prefill() -> Tensor:
            return module(x, **{CACHE_NAMES.delta_net: DynamicCache(config=config)})

        def decode() -> Tensor:
            if cache.get_recurrent_state(0, state_idx=0) is None:
                layer(x[:, :PROMPT], **{CACHE_NAMES.delta_net: cache})
            return module(x[:, PROMPT : PROMPT + 1], **{CACHE_NAMES.delta_net: cache})

        return prefill, decode

    return layer, steps


def model_steps(dtype: torch.dtype, tokens: int) -> tuple[Any, Callable[[Any], tuple[Step, Step]]]:
    """Returns the model, and functions that make its prefill and decoding steps, eager or compiled."""
    from transformers import DynamicCache, Qwen3NextForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # there is one for the sizes
    model = Qwen3NextForCausalLM.from_pretrained(PYCODE, dtype=dtype).eval()
    text = (PYCODE / "prompt.txt").read_bytes()
    ids = torch.tensor([list((text * (1 + tokens // len(text)))[:tokens])])

    def steps(module: Any) -> tuple[Step, Step]:
        cache = DynamicCache(config=model.config)

        def prefill() -> Tensor:
            return module(ids, logits_to_keep=1, **with_cache(DynamicCache(config=model.config))).logits

        def decode() -> Tensor:
            if not cache.get_seq_length():
                model(ids[:, :PROMPT], **with_cache(cache))
            return module(ids[:, PROMPT : PROMPT + 1], **with_cache(cache)).logits

        return prefill, decode

    return model, steps


def steps_of(subject: str, what: str, dtype: torch.dtype, tokens: int) -> dict[Contender, Step]:
    torch.manual_seed(0)
    module, make = (layer_steps if subject == LAYER else model_steps)(dtype, tokens)
    forward = torch.compile(module)  # shared, because graphs have a guard for what is enabled
    made = {contender: make(forward if contender.compiled else module) for contender in CONTENDERS}
    return {contender: both[what == "decode"] for contender, both in made.items()}


def run(subject: str, what: str, dtype: torch.dtype, quick: bool, ceilings: Ceilings, seconds: float) -> list[Row]:
    tokens = QUICK_PREFILL if quick else PREFILL
    torch._dynamo.reset()
    try:
        return rows_of(subject, what, dtype, tokens, ceilings, seconds)
    finally:
        switch(False)


def rows_of(subject: str, what: str, dtype: torch.dtype, tokens: int, ceilings: Ceilings, seconds: float) -> list[Row]:
    steps = steps_of(subject, what, dtype, tokens)
    switch(False)
    exact = steps_of(subject, what, torch.float32, tokens)[Contender(False, False)]().double()
    size = tokens if what == "prefill" else 1
    rows, calls, enabled = [], dict[str, Call](), dict[str, bool]()
    for contender, step in steps.items():
        row = Row("model", f"{subject}, {what}", str(dtype)[6:], size, str(contender), torch.get_num_threads())
        rows.append(row)
        if contender == Contender(False, True) and what == "prefill":
            row.note = UNROLLED
            continue
        switch(contender.enabled)
        row.error = relative_error(step().double(), exact)
        if not row.error <= LARGEST_ERROR[dtype]:
            row.note = "wrong: not timed"
            continue
        calls[row.contender], enabled[row.contender] = step, contender.enabled
    times = measure(calls, ceilings.device, seconds, before=lambda name: switch(enabled[name]))
    for row in rows:
        if row.contender in times:
            row.time(times[row.contender])
            row.rate = row.size / times[row.contender].best
            switch(enabled[row.contender])
            row.shares = shares_of(calls[row.contender])
    return rows


def part_of(op: str) -> str:
    """Returns which of PARTS an operator's own time belongs to."""
    name = op.split("::")[-1]
    if op.startswith("gdn::"):
        return PARTS[0]
    return (
        PARTS[1] if op.startswith(("aten::", "mkl", "mkldnn")) and name.lstrip("_").startswith(PRODUCTS) else PARTS[2]
    )


def shares_of(call: Call) -> dict[str, float]:
    """Returns shares of the time of some calls under PyTorch's profiler, which slows each operator a little."""
    call()
    with profile(activities=[ProfilerActivity.CPU]) as result:
        start = time.perf_counter()
        while time.perf_counter() - start < PROFILED_SECONDS:
            call()
        whole = time.perf_counter() - start
    shares = dict.fromkeys(PARTS, 0.0)
    for event in result.key_averages():
        if event.key.startswith("Torch-Compiled Region") or "::" not in event.key:
            continue
        shares[part_of(event.key)] += event.self_cpu_time_total / 1e6 / whole
    shares[PARTS[-1]] = max(0.0, 1 - sum(shares.values()))
    return shares


def tables(rows: Sequence[Row]) -> list[str]:
    """Returns Markdown with a line for each contender."""
    heading = ["", "dtype", "T", "", "ms", "tokens/s", "of ours", *PARTS, "error", ""]
    over_ours = results.ratios(rows)
    lines = []
    for row in rows:
        ratio = over_ours.get((row.key, row.contender))
        shares = [f"{100 * row.shares[part]:.0f} %" if row.shares else "" for part in PARTS]
        rate = (f"{row.rate:,.0f}" if row.rate >= 100 else f"{row.rate:.3g}") if row.rate else ""
        error = "" if row.error is None else f"{row.error:.1e}"
        start = [row.case, row.dtype, str(row.size), row.contender, results.marked(row), rate]
        lines.append([*start, "" if ratio is None else f"{ratio:.2f}", *shares, error, row.note])
    return [results.markdown(heading, lines)]
