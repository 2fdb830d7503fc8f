"""Sizes of published models, and the dtypes of kernels as Metal spells them."""

from __future__ import annotations

import torch

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
METAL_TYPES = {BF16: "bfloat", F16: "half", F32: "float"}
DTYPES = tuple(METAL_TYPES)

# These are (H, HV, K, V) of published models. Heads choose no kernel variant, but timings need them.
QWEN3_NEXT = "Qwen3-Next-80B-A3B, Qwen3.5-35B-A3B, 9B, 4B"
MODELS = {
    QWEN3_NEXT: (16, 32, 128, 128),
    "Qwen3.5-27B": (16, 48, 128, 128),
    "Qwen3.5-122B, 397B": (16, 64, 128, 128),
    "Qwen3.5-2B, 0.8B": (16, 16, 128, 128),
    "OLMo-Hybrid-7B": (30, 30, 96, 192),
    "FLA's GatedDeltaNet": (6, 6, 256, 512),
}
MODEL_SIZES = tuple(dict.fromkeys((K, V) for _, _, K, V in MODELS.values()))
# These are the smallest size, one just above a multiple of 4, no multiples of 8, and common sizes that no model uses.
OTHER_SIZES = ((1, 1), (33, 65), (60, 100), (64, 64), (100, 60), (192, 256))
