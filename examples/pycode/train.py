"""Trains the byte-level Qwen3-Next hybrid of this folder on the source of Python's standard library.

Writes config.json, model.safetensors, loss.csv and loss.png. Needs transformers, matplotlib and in practice a GPU.
The Gated DeltaNet layers train through delta_rule.py, which runs on any GPU. The weights come from this command:

    python -m examples.pycode.train --library LIB  # of CPython 3.11.7, on one NVIDIA H200, in 5 minutes
"""

import argparse
import csv
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next

from examples.pycode import corpus
from examples.pycode.delta_rule import differentiable_delta_rule

HERE = Path(__file__).resolve().parent
WARM_UP_STEPS = 200


def new_model() -> Qwen3NextForCausalLM:
    """Makes three Gated DeltaNet layers to one of attention, with 2.3 M weights. Heads are Qwen3-Next's: K = V = 128,
    HV/H = 2.
    """
    config = Qwen3NextConfig(
        vocab_size=256,  # a token is a byte
        hidden_size=176,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=0,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )
    model = Qwen3NextForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            # Heads begin with a memory of 10 to 1,000 tokens; transformers' initial gate forgets within one.
            parameter.data.copy_(
                torch.empty_like(parameter).uniform_(math.log(1e-3), math.log(0.1)).exp().expm1().log()
            )
        if name.endswith("A_log"):
            parameter.data.uniform_(1, 16).log_()
    return model


def windows(data: torch.Tensor, length: int, batch: int, generator: torch.Generator) -> torch.Tensor:
    """Returns [batch, length + 1] pieces from anywhere in the data."""
    starts = torch.randint(len(data) - length, (batch, 1), generator=generator).to(data.device)
    return data[starts + torch.arange(length + 1, device=data.device)]


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Returns a linear warm-up, then half a cosine down to nothing."""
    return peak * min(1, (step + 1) / WARM_UP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / steps))


def new_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Returns AdamW, which does not decay weights that are no matrices (gates, norms)."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def train(model: Qwen3NextForCausalLM, options: argparse.Namespace) -> Iterator[tuple[int, float, float]]:
    """Yields, every options.report_every steps, the step, the bits per byte of training since, and of the held-back
    modules.
    """
    device = next(model.parameters()).device
    files = corpus.training_files(options.library), corpus.held_back_files(options.library)
    text, held_back = (corpus.as_tensor(corpus.joined(some)).to(device) for some in files)
    print(f"{len(text) / 1e6:.1f} MB to learn, {len(held_back) / 1e6:.2f} MB held back")
    half_precision = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    loss_of = torch.compile(corpus.cross_entropy)  # halves the time of a step
    optimizer = new_optimizer(model)
    generator = torch.Generator().manual_seed(options.seed)
    since_report: list[torch.Tensor] = []
    for step in tqdm(range(options.steps), unit="step", file=sys.stderr, mininterval=10):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options.steps, options.learning_rate)
        with half_precision:
            loss = loss_of(model, windows(text, options.length, options.batch, generator))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        since_report.append(loss.detach())
        if (step + 1) % options.report_every == 0 or step + 1 == options.steps:
            learned = float(torch.stack(since_report).mean()) / math.log(2)
            since_report.clear()
            with half_precision:
                known = corpus.bits_per_byte(model, corpus.pieces(held_back, options.length), options.batch)
            yield step + 1, learned, known


def plot(rows: list[tuple[int, float, float]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, learned, held_back = zip(*rows, strict=True)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(steps, learned, label="training")
    axes.plot(steps, held_back, label="modules held back")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0.5, 3), title="Learning Python's standard library")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--library",
        type=Path,
        default=corpus.standard_library(),
        help="Python's Lib folder (that of the running Python)",
    )
    parser.add_argument("--steps", type=int, default=4000, help="training steps (4000)")
    parser.add_argument("--batch", type=int, default=64, help="pieces per step (64)")
    parser.add_argument("--length", type=int, default=1024, help="bytes per piece (1024)")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="highest learning rate (4e-3)")
    parser.add_argument("--report-every", type=int, default=250, help="steps between reports (250)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE, help="the folder to write to (this one)")
    options = parser.parse_args()

    modeling_qwen3_next.torch_chunk_gated_delta_rule = differentiable_delta_rule
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    model = new_model().to(options.device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters / 1e6:.2f} M weights")
    began, rows = time.time(), []
    options.out.mkdir(parents=True, exist_ok=True)
    for row in train(model, options):
        rows.append(row)
        tqdm.write("step {}: {:.3f} bits per byte, {:.3f} on the modules held back".format(*row))
    print(f"{time.time() - began:.0f} s")
    model.to(torch.bfloat16).save_pretrained(options.out)
    with (options.out / "loss.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [("step", "training", "held back"), *((s, f"{a:.4f}", f"{b:.4f}") for s, a, b in rows)]
        )
    plot(rows, options.out / "loss.png")


if __name__ == "__main__":
    main()
