"""Makes files of small random models with a prediction layer whose drafts are always, sometimes or never right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.integrations.models import random_model

# How much the layers add to an embedding, and what the prediction layer makes of it. It continues the last token's
# embedding, so that it is right wherever the layers do not change the most likely token.
KINDS = {"always": (0.005, 1.0), "sometimes": (0.1, 1.0), "never": (0.005, -1.0)}
ADDING = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "dense.weight")
# Prefixes of the block and of the rest, the matrix before it, three norms, and what makes a norm's weight 1.
QWEN = ("mtp.layers.0.", "mtp.", "fc", ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"), 0.0)
BAILING = ("model.layers.2.", "model.layers.2.", "eh_proj", ("final_layernorm", "enorm", "hnorm"), 1.0)


def files(folder: Path, kind: str, right: str, **options: Any) -> Path:
    """Writes a model whose drafts are `right` "always", "sometimes" or "never"."""
    scale, sign = KINDS[right]
    return written(folder, kind, scale, sign, **options)


def written(
    folder: Path, kind: str, scale: float, sign: float, noise: float = 0.0, block: float = 0.01, **options: Any
) -> Path:
    """Writes a model. `noise` is added to the matrix before the prediction layer. The layer adds `block` times as much
    to it as the model's last layer to a token.
    """
    model = random_model(kind, **options)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith(ADDING):
            tensors[name] *= scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    add_layer(folder, model, tensors, sign, noise, block)
    return folder


def add_layer(
    folder: Path,
    model: Any,
    tensors: dict[str, Tensor] | None = None,
    sign: float = 1.0,
    noise: float = 0.0,
    block: float | None = 0.01,
) -> None:
    """Adds a prediction layer to a model's files. `tensors` are the model's own, unless they have changed since. If
    `block` is None, the layer is a copy of the last one, packed or not.
    """
    file = folder / "model.safetensors"
    own = layer_of(model, model.state_dict() if tensors is None else tensors, sign, noise, block)
    save_file(load_file(file) | own, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def layer_of(
    model: Any, tensors: dict[str, Tensor], sign: float, noise: float, block: float | None
) -> dict[str, Tensor]:
    """Returns the tensors of the prediction layer, with the names in the model's files."""
    own, rest, matrix, norms, one = BAILING if model.config.model_type == "bailing_hybrid" else QWEN
    last, size = f"model.layers.{model.config.num_hidden_layers - 1}.", model.config.hidden_size
    result = {f"{own}{name.removeprefix(last)}": x.clone() for name, x in tensors.items() if last in name}
    for name in result:
        if name.endswith(ADDING) and block is not None:
            result[name] *= block
    both = torch.cat([sign * torch.eye(size), torch.zeros(size, size)], 1)
    both += noise * torch.randn(both.shape, generator=torch.Generator().manual_seed(0))
    return (
        result | {f"{rest}{matrix}.weight": both} | {f"{rest}{name}.weight": torch.full((size,), one) for name in norms}
    )


def loaded(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


class Steps:
    """Counts the calls of a model."""

    def __init__(self, model: Any) -> None:
        self.taken = 0
        model.register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.taken += 1
