"""Reads MLX's affine quantisation, and its MXFP4, as mlx-lm writes them."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from torch_gdn.quantized.floats import Mxfp4, from_mxfp4
from torch_gdn.quantized.formats import Format, Sizes, Stored, refusal
from torch_gdn.quantized.packed_weight import PackedWeight, checked_words

# mlx-lm stores these norms of hybrid models plus one, because its norms multiply by the weight itself.
NORMS_PLUS_ONE = tuple(
    f"{name}.weight" for name in ("input_layernorm", "post_attention_layernorm", "model.norm", "q_norm", "k_norm")
)

VISION = ("vision_tower.", "model.visual.")  # begin names of a vision part's tensors in mlx-vlm's files
TENSORS = (Stored("weight", columns="word"), Stored("scales", columns="group"), Stored("biases", columns="group"))


def from_mlx(weight: Tensor, scales: Tensor, biases: Tensor, *, bits: int) -> PackedWeight:
    """Makes the packed weight of a layer: a view, since MLX's layout is torch_gdn's.

    Args:
        weight: uint32 [..., N, K * bits / 32].
        scales, biases: [..., N, K / group].
        bits: 4 or 8.

    Raises:
        ValueError: other bits or groups, or shapes that do not fit together.
    """
    return PackedWeight(checked_words("from_mlx", "weight", weight, bits), scales, biases, bits)


def is_mlx(config: Mapping[str, Any]) -> bool:
    """Returns whether this is the `quantization_config` of a file of mlx-lm's, which names no method."""
    return not config.get("quant_method") and {"bits", "group_size"} <= config.keys()


def read(config: Mapping[str, Any]) -> Format:
    if missing := {"bits", "group_size"} - config.keys():
        raise refusal(f"MLX's configuration without {' and '.join(sorted(missing))}")
    modes = {each.get("mode", "affine") for each in (config, *config.values()) if isinstance(each, Mapping)}
    if others := sorted(modes - {"affine", "mxfp4"}):
        raise refusal(f"MLX's mode {', '.join(others)}")
    return Mxfp4("mlx", TENSORS, convert, optional=("biases",), experts_are_stacked=True)


def convert(weight: Tensor, scales: Tensor, biases: Tensor | None = None, *, bits: int) -> PackedWeight:
    return from_mxfp4(weight, scales) if biases is None else from_mlx(weight, scales, biases, bits=bits)


def shifts_norms(shapes: Mapping[str, Sizes]) -> bool:
    """Returns whether the files hold NORMS_PLUS_ONE. mlx-lm changes the convolutions of such models, too."""
    return any(name.endswith(".conv1d.weight") and shape[-1] == 1 for name, shape in shapes.items())
