"""Finds the fastest prefill algorithm on this machine's mps device, and stores the result.

    python -m torch_gdn tune                                on a Mac: some minutes
    python -m mps_simulator -m torch_gdn tune --tokens 8    on the simulated device, whose times mean nothing

`chunk_gated_delta_rule` has three algorithms for a prompt, whose results differ only by rounding:

    chunked        one kernel per stage, all chunks at once, intermediate results in device memory
    fused_chunk    one kernel, chunk by chunk, the state in registers
    recurrent      one kernel, token by token, the state in registers

A call uses the algorithm that was fastest for the nearest shape measured here. Without measurements a heuristic picks
one from counted bytes and published rates. Nobody has measured it on a Mac.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from torch_gdn import tuning_cache
from torch_gdn._mps import why_no_mps
from torch_gdn.prefill import prefill_algorithm
from torch_gdn.tuning_cache import Row

TOKENS = (8, 16, 32, 64, 128, 512, 2048, 8192)
SHAPES = ((16, 32, 128, 128), (16, 64, 128, 128), (16, 16, 128, 128), (30, 30, 96, 192))  # H, HV, K, V of models
SEQUENCES = (1, 8)
CANDIDATES = {  # a chunk that does not fit threadgroup memory gets the fused chunk algorithm's own size
    "chunked": ("chunked", 0),
    **{f"fused_chunk {size}": ("fused_chunk", size) for size in tuning_cache.FUSED_CHUNK_SIZES},
    "recurrent": ("recurrent", 0),
}
MPS = torch.device("mps")
MOST_TOKENS = 16384  # for all sequences together


def shape(text: str) -> tuple[int, int, int, int]:
    sizes = text.split(",")
    if len(sizes) != 4 or not all(size.isdigit() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"expected H,HV,K,V, such as 16,32,128,128, got {text!r}")
    H, HV, K, V = map(int, sizes)
    return H, HV, K, V


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m torch_gdn tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--shapes", type=shape, nargs="+", default=SHAPES, metavar="H,HV,K,V", help="head sizes to time")
    found.add_argument(
        "--tokens", type=positive, nargs="+", default=TOKENS, metavar="T", help="sequence lengths to time, in tokens"
    )
    found.add_argument(
        "--sequences",
        type=positive,
        nargs="+",
        default=SEQUENCES,
        metavar="N",
        help="numbers of sequences per call to time",
    )
    found.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    found.add_argument(
        "--repeats", type=positive, default=5, metavar="N", help="number of timings per case; the median is used"
    )
    default = f"${tuning_cache.VARIABLE}, else ~/.config/torch_gdn/tuning_cache.json"
    found.add_argument("--file", type=Path, help=f"the file to write; default: {default}")
    return found


def measure(
    sizes: tuple[int, int, int, int],
    tokens: int,
    sequences: int,
    dtype: torch.dtype,
    repeats: int,
    device: torch.device = MPS,
) -> Row:
    """Times each algorithm, from a state to a state. Returns the times and the fastest algorithm."""
    from torch_gdn import chunk_gated_delta_rule  # here, because torch_gdn imports this module
    from torch_gdn.check.timing import median_seconds
    from torch_gdn.testing.cases import make_case

    H, HV, K, V = sizes
    case = make_case(tokens, K, V, B=sequences, H=H, HV=HV, dtype=dtype, normal=False).to(device)
    call = partial(chunk_gated_delta_rule, *case.qkv, **case.options, use_qk_l2norm_in_kernel=True)
    seconds = {}
    for name, (algorithm, chunk_size) in CANDIDATES.items():
        with prefill_algorithm(algorithm, chunk_size):
            seconds[name] = median_seconds(call, device, repeats, calls=1)
    fastest = min(seconds, key=lambda name: seconds[name])
    return Row(tokens, sequences * HV * -(-V // 32), K, *CANDIDATES[fastest], seconds)


def measured(options: argparse.Namespace) -> list[Row]:
    from tqdm.auto import tqdm

    work = [
        (sizes, tokens, sequences)
        for sizes in options.shapes
        for sequences in options.sequences
        for tokens in options.tokens
        if tokens * sequences <= MOST_TOKENS
    ]
    dtype = getattr(torch, options.dtype)
    bar = tqdm(work, desc="torch_gdn: timing", unit="shape")
    return [measure(sizes, tokens, sequences, dtype, options.repeats) for sizes, tokens, sequences in bar]


def lines(rows: Sequence[Row]) -> list[str]:
    table = [["tokens", "groups", "K", *(f"{name} us" for name in CANDIDATES), "fastest"]]
    for row in rows:
        times = [f"{row.seconds[name] * 1e6:.0f}" for name in CANDIDATES]
        fastest = f"{row.algorithm} {row.chunk_size or ''}".strip()
        table.append([str(row.tokens), str(row.threadgroups), str(row.K), *times, fastest])
    return ["  ".join(cell.rjust(max(map(len, table[0]))) for cell in cells) for cells in table]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        file = options.file.expanduser() if options.file else tuning_cache.path()
    except (ValueError, RuntimeError) as error:  # an unknown user's home
        sys.exit(f"--file: {error}")
    if file is None:
        sys.exit(f"--file: expected a file to write, since ${tuning_cache.VARIABLE} is empty, or you have no home")
    reason = why_no_mps("-m torch_gdn.tune")
    if reason:
        sys.exit(f"torch_gdn.tune: {reason}")
    table = tuning_cache.read(file) if file.is_file() else {}
    with torch.no_grad():
        rows = measured(options)
    table[tuning_cache.key()] = rows
    tuning_cache.write(file, table)
    tuning_cache.install(table)
    print("\n".join(lines(rows)))
    if sys.platform != "darwin":
        print("Times on the simulated device mean nothing: they only say how long the simulation took.")
    print(f"Written to {file}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
