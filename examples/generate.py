"""Continues Python code with a small Qwen3-Next whose Gated DeltaNet layers run on torch_gdn, and checks the numbers.

The model is transformers' own Qwen3NextForCausalLM with the weights in examples/pycode. It was trained on the source of
Python's standard library, byte by byte. After torch_gdn.integrations.transformers.enable(), prefill runs
torch_gdn.chunk_gated_delta_rule, and decoding runs torch_gdn.fused_recurrent_gated_delta_rule or, on mps, gdn_decode_.
The logits and the bits per byte, on modules that the model never saw, must equal those of transformers' own PyTorch
code on the CPU. The exit status is 1 if they do not.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm
from transformers import Qwen3NextForCausalLM
from transformers.utils import logging as transformers_logging

import torch_gdn
from torch_gdn.integrations import transformers as integration
from torch_gdn.integrations.transformers.versions import cache_in, with_cache

ROOT = Path(__file__).resolve().parent.parent
LARGEST_DISTANCE = 1e-4  # of the logits, relative, in f32
PROMPT = ROOT / "examples" / "pycode" / "prompt.txt"
PROMPT_SHOWN = 60  # bytes
PIECE = 512  # bytes of a held-back module to predict
BITS_DECIMALS = 3  # bits per byte must agree to this digit
PREFILL_OPS = ("gdn.chunk_gated_delta_rule",)  # or with a _ if in place
DECODE_OPS = ("gdn.fused_recurrent_gated_delta_rule", "gdn.gdn_decode")  # on mps, gdn_decode


@dataclass
class Generation:
    tokens: list[int]
    prefill_logits: torch.Tensor  # [prompt tokens, vocabulary], on the CPU
    decode_logits: torch.Tensor  # [new tokens, vocabulary], on the CPU
    prefill_seconds: float
    decode_seconds: float


class OpCounter(TorchDispatchMode):
    """Counts the calls of torch.ops.gdn.* that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "gdn":
            self.calls[f"gdn.{func.overloadpacket.__name__}"] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def on_torch_gdn() -> Iterator[None]:
    """Makes transformers' models call torch_gdn inside the block. An application would enable it once."""
    integration.enable()
    try:
        yield
    finally:
        integration.disable()


def trained_model() -> Qwen3NextForCausalLM:
    """Returns three Gated DeltaNet layers and one of attention. Heads are Qwen3-Next's: K = V = 128, HV/H = 2."""
    return Qwen3NextForCausalLM.from_pretrained(ROOT / "examples" / "pycode", dtype=torch.float32).eval()


def held_back(count: int) -> torch.Tensor:
    """Returns [count, PIECE + 1] bytes: a piece from the middle of each of `count` modules that the model never saw."""
    from examples.pycode import corpus

    files = corpus.held_back_files(corpus.standard_library())[:count]
    pieces = [corpus.pieces(corpus.as_tensor(corpus.joined([file])), PIECE) for file in files]
    return torch.stack([pieces_of_file[len(pieces_of_file) // 2] for pieces_of_file in pieces])


def bits_per_byte(model: Qwen3NextForCausalLM, pieces: torch.Tensor, label: str) -> float:
    """Measures one piece at a time, with a progress bar."""
    from examples.pycode import corpus

    each = [
        corpus.bits_per_byte(model, piece[None], 1)
        for piece in tqdm(pieces, desc=f"{label}, modules held back", unit="module", file=sys.stderr)
    ]
    return sum(each) / len(each)


def generate(
    model: Qwen3NextForCausalLM, prompt: torch.Tensor, new_tokens: int, label: str, forced: list[int] | None = None
) -> Generation:
    """Decodes greedily. With `forced`, these tokens are fed whatever the logits say, so that two runs compare."""
    tokens: list[int] = []
    decode_logits: list[torch.Tensor] = []
    with torch.no_grad(), tqdm(total=new_tokens, desc=label, unit="token", file=sys.stderr) as progress:
        start = time.perf_counter()
        output = model(input_ids=prompt, use_cache=True)
        prefill_logits = output.logits[0].float().cpu()  # reading them waits for the device
        prefilled = time.perf_counter()
        logits = prefill_logits[-1]
        for step in range(new_tokens):
            tokens.append(int(logits.argmax()) if forced is None else forced[step])
            following = torch.tensor([tokens[-1:]], device=prompt.device)
            output = model(input_ids=following, use_cache=True, **with_cache(cache_in(output)))
            logits = output.logits[0, -1].float().cpu()
            decode_logits.append(logits)
            progress.update()
        finished = time.perf_counter()
    return Generation(tokens, prefill_logits, torch.stack(decode_logits), prefilled - start, finished - prefilled)


def relative_distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits.double() - expected.double()).norm() / expected.double().norm())


def choose_device(name: str) -> torch.device:
    if name == "simulated-mps":
        import mps_simulator

        mps_simulator.activate()
        os.environ.setdefault("TORCH_GDN_SELF_TEST", "off")  # it is for GPUs, and slow on a simulated one
        return torch.device("mps")
    if name == "auto":
        name = "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "mps" and not torch.backends.mps.is_available():
        sys.exit("--device mps: there is no mps device here; --device simulated-mps simulates one on Linux")
    return torch.device(name)


@dataclass
class Counts:
    ops: Counter[str]
    kernels: list[str]


@contextmanager
def counted(simulated: bool) -> Iterator[Counts]:
    """Fills in, at its end, the ops that were called and the Metal kernels that ran within it."""
    counts = Counts(Counter(), [])
    with ExitStack() as stack:
        profile = None
        if simulated:
            import mps_simulator

            profile = stack.enter_context(mps_simulator.profile())
        counter = stack.enter_context(OpCounter())
        yield counts
    counts.ops = counter.calls
    if profile is not None:
        counts.kernels = [f"{profile.launched(name):4} x {name}" for name in sorted(profile.kernels)]
    elif torch_gdn._C.has_launcher():
        counts.kernels = [facts["name"] for facts in torch_gdn._C.pipelines()]  # a Mac does not count them


def print_counts(counts: Counts) -> None:
    lines = [("ops", f"{count:4} x {name}") for name, count in sorted(counts.ops.items())]
    lines += [("kernels", line) for line in counts.kernels]
    for (title, line), (previous, _) in zip(lines, [("", ""), *lines], strict=False):
        print(f"{title if title != previous else '':<10}{line}")


def compare(ours: Generation, fallback: Generation) -> bool:
    distances = {
        "prefill": relative_distance(ours.prefill_logits, fallback.prefill_logits),
        "decode": relative_distance(ours.decode_logits, fallback.decode_logits),
    }
    passed = all(distance < LARGEST_DISTANCE for distance in distances.values())  # false for nan
    measured = ", ".join(f"{name} {distance:.1e}" for name, distance in distances.items())
    verdict = "pass" if passed else "FAIL"
    print(f"logits    distance from transformers' fallback: {measured}; below {LARGEST_DISTANCE:.0e} wanted: {verdict}")
    return passed


def run(options: argparse.Namespace) -> bool:
    device = choose_device(options.device)
    simulated = options.device == "simulated-mps"
    model = trained_model().to(device)
    text = options.prompt_file.read_bytes()[: options.prompt_tokens]
    prompt = torch.tensor([list(text)], device=device)
    pieces = held_back(options.modules).to(device)
    with on_torch_gdn():
        with counted(simulated) as counts:
            ours = generate(model, prompt, options.new_tokens, "torch_gdn")
        print("text      the prompt's end, then after the bar what the model wrote:")
        print((text[-PROMPT_SHOWN:] + b"|" + bytes(ours.tokens)).decode(errors="replace"), flush=True)
        # A second run is timed, because the first one pays for counting and, on a Mac, for compiling the kernels.
        timed = ours if simulated else generate(model, prompt, options.new_tokens, "torch_gdn, timed")
        our_bits = bits_per_byte(model, pieces, "torch_gdn")
    # The device under test takes no part in the reference.
    model, prompt, pieces = model.cpu(), prompt.cpu(), pieces.cpu()
    fallback = generate(model, prompt, options.new_tokens, "transformers' fallback", forced=ours.tokens)
    fallback_bits = bits_per_byte(model, pieces, "transformers' fallback")

    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"device    {options.device if simulated else device}")
    print(f"model     Qwen3Next, {parameters / 1e6:.1f} M f32 weights of examples/pycode; K = V = 128, HV/H = 2")
    print(f"prompt    {len(text)} bytes of {options.prompt_file.name}")
    print_counts(counts)
    note = " (of the simulated device: says nothing of a Mac)" if simulated else ""
    print(f"prefill   {len(text) / timed.prefill_seconds:.0f} tokens/s{note}")
    print(f"decode    {options.new_tokens / timed.decode_seconds:.1f} tokens/s{note}")
    missing = [
        " or ".join(names)
        for names in (PREFILL_OPS, DECODE_OPS)
        if not any(counts.ops[name] + counts.ops[f"{name}_"] for name in names)
    ]
    if missing:
        print(f"FAIL      the model never called {' nor '.join(missing)}")
    same_logits = compare(ours, fallback)
    return compare_bits(our_bits, fallback_bits, pieces) and same_logits and not missing


def compare_bits(ours: float, fallback: float, pieces: torch.Tensor) -> bool:
    passed = round(ours, BITS_DECIMALS) == round(fallback, BITS_DECIMALS)  # false for nan
    measured = f"torch_gdn {ours:.{BITS_DECIMALS}f}, transformers' fallback {fallback:.{BITS_DECIMALS}f}"
    verdict = "pass" if passed else "FAIL"
    print(f"bits      per byte of {PIECE} bytes each of {len(pieces)} held-back modules: {measured}: {verdict}")
    return passed


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "mps", "simulated-mps"),
        default="auto",
        help="auto: mps on a Mac, else cpu; simulated-mps: the Metal kernels on the simulated device (Linux)",
    )
    parser.add_argument(
        "--prompt-file", type=Path, default=PROMPT, help="file with the prompt (examples/pycode/prompt.txt)"
    )
    parser.add_argument("--prompt-tokens", type=positive, default=1024, help="the most bytes of the prompt (1024)")
    parser.add_argument(
        "--new-tokens", type=positive, default=96, help="how many tokens to generate; a token is a byte (96)"
    )
    parser.add_argument(
        "--modules", type=positive, default=4, help=f"how many held-back modules to predict {PIECE} bytes of (4)"
    )
    options = parser.parse_args()
    if not options.prompt_file.is_file() or not options.prompt_file.stat().st_size:
        parser.error(f"--prompt-file: expected a file with text in it, got {options.prompt_file}")
    sys.path.insert(
        0, str(ROOT)
    )  # the simulated device and examples/pycode are part of the checkout, not of the package
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    return 0 if run(options) else 1


if __name__ == "__main__":
    sys.exit(main())
