"""Fine-tunes the small model of examples/pycode, which knows Python, on torch_gdn's Metal shaders, with LoRA.

After torch_gdn.enable(), transformers' model trains with torch_gdn's functions where they have gradients. Only the
matrices of LoRA learn, two small ones for each linear layer. The program prints the bits per byte on shaders that were
held back, before and after, and draws the loss. The exit status is 1 if the model learned nothing.
"""

import argparse
import math
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import Qwen3NextForCausalLM
from transformers.utils import logging as transformers_logging

import torch_gdn
from torch_gdn import command_line

ROOT = Path(__file__).resolve().parent.parent
HELD_BACK = ("layers/rms_norm.metal", "gdn/chunk_fwd_o.metal", "aura/aura_decode.metal")
PIECE = 128  # bytes to predict at a time


class LoRA(nn.Module):
    """Adds to a frozen layer the product of two small matrices, of which the second is zero at first."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) + x @ self.down.T @ self.up.T
        return y


def add_lora(model: nn.Module, rank: int) -> list[nn.Parameter]:
    """Wraps each linear layer inside the decoder layers, and returns what learns."""
    model.requires_grad_(False)
    for module in [*model.modules()]:
        for name, layer in [*module.named_children()]:
            if isinstance(layer, nn.Linear) and name != "lm_head":
                setattr(module, name, LoRA(layer, rank))
    return [x for x in model.parameters() if x.requires_grad]


def shaders() -> tuple[Tensor, Tensor]:
    """Returns the bytes of the shaders to learn from, and pieces of those that judge."""
    from examples.pycode import corpus

    folder = ROOT / "shaders"
    judging = [folder / name for name in HELD_BACK]
    learned = [path for path in sorted(folder.rglob("*.metal")) if path not in judging]
    text, held_back = (corpus.as_tensor(corpus.joined(files)) for files in (learned, judging))
    return text, corpus.pieces(held_back, PIECE)


def train(model: nn.Module, learned: list[nn.Parameter], text: Tensor, options: argparse.Namespace) -> list[float]:
    """Returns the bits per byte of each step."""
    from examples.pycode import corpus

    optimizer = torch.optim.AdamW(learned, lr=options.learning_rate, weight_decay=0.0)
    random, result = torch.Generator().manual_seed(0), []
    with tqdm(total=options.steps, desc="fine-tuning", unit="step") as progress:
        for _ in range(options.steps):
            first = torch.randint(len(text) - PIECE, (options.batch,), generator=random)
            loss = corpus.cross_entropy(model, torch.stack([text[i : i + PIECE + 1] for i in first]).to(options.device))
            loss.backward()
            nn.utils.clip_grad_norm_(learned, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            result.append(loss.item() / math.log(2))
            progress.set_postfix_str(f"{result[-1]:.2f} bits per byte")
            progress.update()
    return result


def draw(losses: list[float], before: float, after: float, file: Path) -> None:
    """Draws the losses, and the held-back shaders' bits per byte before and after as dashed lines."""
    width, height, margin = 640, 320, 40
    top = max(*losses, before)
    across = [margin + i * (width - 2 * margin) / max(1, len(losses) - 1) for i in range(len(losses))]

    def y(bits: float) -> float:
        return height - margin - bits / top * (height - 2 * margin)

    line = " ".join(f"{x:.1f},{y(bits):.1f}" for x, bits in zip(across, losses, strict=True))
    parts = [f'<polyline points="{line}" fill="none" stroke="#06c" stroke-width="1.5"/>']
    for bits, name in ((before, "before"), (after, "after")):
        parts += [f'<line x1="{margin}" x2="{width - margin}" y1="{y(bits):.1f}" y2="{y(bits):.1f}" stroke="#888"']
        parts += ['stroke-dasharray="4"/>', f'<text x="{width - margin}" y="{y(bits) - 4:.1f}" text-anchor="end">']
        parts += [f"{name}: {bits:.2f}</text>"]
    title = f'<text x="{margin}" y="20">bits per byte of each of {len(losses)} steps; dashed: shaders held back</text>'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif"'
    file.write_text(
        f'{svg} font-size="12"><rect width="100%" height="100%" fill="#fff"/>{title}{" ".join(parts)}</svg>\n'
    )


def run(options: argparse.Namespace) -> bool:
    from examples.pycode import corpus

    if options.device == "simulated-mps":
        import mps_simulator

        mps_simulator.activate()
        options.device = "mps"
    torch_gdn.enable()
    model = Qwen3NextForCausalLM.from_pretrained(ROOT / "examples" / "pycode", dtype=torch.float32)
    learned = add_lora(model, options.rank)
    model.to(options.device)
    text, held_back = shaders()
    held_back = held_back[:: max(1, len(held_back) // options.pieces)][: options.pieces].to(options.device)
    print(f"learning  {sum(x.numel() for x in learned):,} of {sum(x.numel() for x in model.parameters()):,} weights")
    before = corpus.bits_per_byte(model, held_back, options.batch)
    losses = train(model, learned, text, options)
    after = corpus.bits_per_byte(model, held_back, options.batch)
    draw(losses, before, after, options.plot)
    print(f"bits      per byte of {len(held_back)} pieces of held-back shaders: {before:.3f} before, {after:.3f} after")
    print(f"plot      {options.plot}")
    print(torch_gdn.status())
    return after < before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "mps", "simulated-mps"), default="cpu")
    parser.add_argument("--steps", type=command_line.positive, default=40, help="training steps (40)")
    parser.add_argument("--batch", type=command_line.positive, default=2, help=f"pieces of {PIECE} bytes a step (2)")
    parser.add_argument("--rank", type=command_line.positive, default=8, help="rank of LoRA's matrices (8)")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="learning rate (4e-3)")
    parser.add_argument("--pieces", type=command_line.positive, default=24, help="held-back pieces to judge by (24)")
    parser.add_argument("--plot", type=Path, default=Path("finetune.svg"), help="where to draw the loss (finetune.svg)")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))  # examples/pycode is part of the checkout, not of the package
    transformers_logging.set_verbosity_error()
    warnings.filterwarnings("ignore", message="torch_gdn leaves")  # status() says the same at the end
    return 0 if run(options) else 1


if __name__ == "__main__":
    sys.exit(main())
