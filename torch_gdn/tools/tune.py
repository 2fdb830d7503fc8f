"""Finds the fastest prefill algorithm on this machine and stores the result: `python -m torch_gdn tune`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torch_gdn import command_line
from torch_gdn._mps import why_no_mps
from torch_gdn._timing import median_seconds
from torch_gdn.tools import tuning_cache
from torch_gdn.tools.prefill import prefill_algorithm
from torch_gdn.tools.tuning_cache import DELTA_RULE, KDA, Row

Shape = tuple[int, int, int, int]  # H, HV, K, V
CANDIDATES = {  # a chunk that does not fit threadgroup memory gets the fused chunk algorithm's own size
    "chunked": ("chunked", 0),
    **{f"fused_chunk {size}": ("fused_chunk", size) for size in tuning_cache.FUSED_CHUNK_SIZES},
    "recurrent": ("recurrent", 0),
}
MPS = torch.device("mps")
MOST_TOKENS = 16384  # for all sequences together


def measure(
    sizes: Shape,
    tokens: int,
    sequences: int,
    dtype: torch.dtype,
    repeats: int,
    device: torch.device = MPS,
    rule: str = DELTA_RULE,
) -> Row:
    """Times each algorithm, from a state to a state. Returns the times and the fastest algorithm."""
    from torch_gdn import chunk_gated_delta_rule, chunk_kda  # here, because torch_gdn imports this module

    _, HV, K, V = sizes
    on_device: dict[str, Any] = {
        name: x.to(device) if isinstance(x, Tensor) else x
        for name, x in rule_inputs(sizes, tokens, sequences, dtype).items()
    }
    function: Callable[..., Any] = chunk_gated_delta_rule
    if rule == KDA:
        function, on_device["g"] = chunk_kda, on_device["g"][..., None].expand(*on_device["g"].shape, K).contiguous()
    call = partial(function, **on_device)
    seconds = {}
    for name, (algorithm, chunk_size) in CANDIDATES.items():
        with prefill_algorithm(algorithm, chunk_size):
            seconds[name] = median_seconds(call, device, repeats, calls=1)
    fastest = min(seconds, key=lambda name: seconds[name])
    return Row(tokens, sequences * HV * -(-V // 32), K, *CANDIDATES[fastest], rule, seconds)


def rule_inputs(sizes: Shape, tokens: int, sequences: int, dtype: torch.dtype) -> dict[str, Any]:
    """Draws what a layer of a model passes to its delta rule, on the CPU: q, k, v, gates, a state and options."""
    H, HV, K, V = sizes
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(sequences, *shape, generator=random, dtype=torch.float32, device="cpu")

    return {
        "q": draw(tokens, H, K).to(dtype),
        "k": draw(tokens, H, K).to(dtype),
        "v": draw(tokens, HV, V).to(dtype),
        "g": logsigmoid(draw(tokens, HV)),
        "beta": draw(tokens, HV).sigmoid(),
        "initial_state": draw(HV, K, V),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }


def measured(options: argparse.Namespace) -> list[Row]:
    from tqdm.auto import tqdm

    work = [
        (sizes, tokens, sequences, rule)
        for rule in options.rules
        for sizes in options.shapes or command_line.TUNED_SHAPES[rule]
        for sequences in options.sequences
        for tokens in options.tokens
        if tokens * sequences <= MOST_TOKENS
    ]
    dtype = getattr(torch, options.dtype)
    bar = tqdm(work, desc="torch_gdn: timing", unit="shape")
    return [
        measure(sizes, tokens, sequences, dtype, options.repeats, rule=rule) for sizes, tokens, sequences, rule in bar
    ]


def lines(rows: Sequence[Row]) -> list[str]:
    table = [["rule", "tokens", "groups", "K", *(f"{name} us" for name in CANDIDATES), "fastest"]]
    for row in rows:
        times = [f"{row.seconds[name] * 1e6:.0f}" for name in CANDIDATES]
        fastest = f"{row.algorithm} {row.chunk_size or ''}".strip()
        table.append([row.rule, str(row.tokens), str(row.threadgroups), str(row.K), *times, fastest])
    return ["  ".join(cell.rjust(max(map(len, table[0]))) for cell in cells) for cells in table]


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line.tune().parse_args(arguments)
    try:
        file = options.file.expanduser() if options.file else tuning_cache.path()
    except (ValueError, RuntimeError) as error:  # an unknown user's home
        sys.exit(f"--file: {error}")
    if file is None:
        sys.exit(f"--file: expected a file to write, since ${tuning_cache.VARIABLE} is empty, or you have no home")
    reason = why_no_mps("tune")
    if reason:
        sys.exit(f"{command_line.PROGRAM} tune: {reason}")
    table = tuning_cache.read(file) if file.is_file() else {}
    with torch.no_grad():
        rows = measured(options)
    others = [row for row in table.get(tuning_cache.key(), []) if row.rule not in options.rules]
    table[tuning_cache.key()] = others + rows
    tuning_cache.write(file, table)
    tuning_cache.install(table)
    print("\n".join(lines(rows)))
    if sys.platform != "darwin":
        print("Times on the simulated device mean nothing: they only say how long the simulation took.")
    print(f"Written to {file}.")
    return 0
