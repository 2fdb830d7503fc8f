"""Reads MLX's affine quantisation, as mlx-lm writes it."""

from __future__ import annotations

from torch import Tensor

from torch_gdn.quantized.packed_weight import PackedWeight, checked_words

# mlx-lm stores these norms of hybrid models plus one, because its norms multiply by the weight itself.
NORMS_PLUS_ONE = tuple(
    f"{name}.weight" for name in ("input_layernorm", "post_attention_layernorm", "model.norm", "q_norm", "k_norm")
)

VISION = ("vision_tower.", "model.visual.")  # begin names of a vision part's tensors in mlx-vlm's files


def from_mlx(weight: Tensor, scales: Tensor, biases: Tensor, *, bits: int) -> PackedWeight:
    """Makes the packed weight of a layer: a view, since MLX's layout is torch_gdn's.

    Args:
        weight: uint32 [..., N, K * bits / 32].
        scales: [..., N, K / group].
        biases: like scales.
        bits: 4 or 8.

    Raises:
        ValueError: other bits or groups, or shapes that do not fit together.
    """
    return PackedWeight(checked_words("from_mlx", "weight", weight, bits), scales, biases, bits)
