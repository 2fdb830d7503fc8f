"""Which specialisations of the Metal kernels calls ask for: one table for `warmup`, `torch_gdn.check` and proofs.

A kernel is a C++ template in shaders/gdn/<kernel>.metal; the host (csrc/gdn/<op>.cpp) chooses its arguments by dtype,
sizes and layout of the tensors. This is the same choice in Python, so that a specialisation can be named and compiled
without a call. tests/tools/test_specialisations.py holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from torch_gdn import _C

METAL_TYPES = {torch.bfloat16: "bfloat", torch.float16: "half", torch.float32: "float"}
DTYPES = tuple(METAL_TYPES)

# (H, HV, K, V) of published models. Heads do not specialise a kernel; timings need them.
MODELS = {
    "Qwen3-Next-80B-A3B, Qwen3.5-35B-A3B, 9B, 4B": (16, 32, 128, 128),
    "Qwen3.5-27B": (16, 48, 128, 128),
    "Qwen3.5-122B, 397B": (16, 64, 128, 128),
    "Qwen3.5-2B, 0.8B": (16, 16, 128, 128),
    "OLMo-Hybrid-7B": (30, 30, 96, 192),
    "FLA's GatedDeltaNet": (6, 6, 256, 512),
}
MODEL_SIZES = tuple(dict.fromkeys((K, V) for _, _, K, V in MODELS.values()))
# The smallest; one packet of 4 and one element too many; not a multiple of 8; usual ones that are no model's default.
OTHER_SIZES = ((1, 1), (33, 65), (60, 100), (64, 64), (100, 60), (192, 256))


@dataclass(frozen=True)
class Variant:
    """What a call is specialised by: dtype, head sizes, and how its tensors lie in memory."""

    dtype: torch.dtype
    K: int
    V: int
    chunk_size: int = 64
    aligned: bool = True  # every row of q, k and v starts at a multiple of 4 elements
    value_inner: bool = True  # states are [K, V]; of the recurrent kernel
    normalise: bool = False  # use_qk_l2norm_in_kernel; of the recurrent kernel
    channels: bool = False  # gk, gv or a beta with V columns; of the recurrent kernel
    pool: torch.dtype = torch.float32  # of the states: another where the op is called in place
    wanted_chunk_size: int = 0  # of the fused chunk algorithm, where it has room: 8, 16 or 32; 0: its own choice
    by_stage: bool = (
        False  # the stage ops are called one by one; else the end-to-end op, whose half has stages in float
    )

    @property
    def name(self) -> str:
        marks = ["" if self.aligned else "_unaligned", "" if self.value_inner else "_v_first"]
        marks += ["_l2norm" if self.normalise else "", "_channels" if self.channels else ""]
        marks += ["" if self.pool == torch.float32 else f"_pool_{METAL_TYPES[self.pool]}"]
        marks += [f"_fused_{self.wanted_chunk_size}" if self.wanted_chunk_size else ""]
        marks += ["_by_stage" if self.by_stage else ""]
        return f"{METAL_TYPES[self.dtype]}_{self.K}_{self.V}_{self.chunk_size}{''.join(marks)}"

    def packet(self, *sizes: int) -> str:
        """How many elements are loaded at once, from rows of these sizes."""
        return "4" if self.aligned and all(size % 4 == 0 for size in sizes) else "1"

    @property
    def fused_chunk_size(self) -> int:
        return _C.fused_chunk_size(self.K, self.dtype.itemsize, self.wanted_chunk_size)

    def arguments(self, kernel: str) -> tuple[str, ...]:
        """The template arguments as Metal spells them."""
        T, K, V, C = METAL_TYPES[self.dtype], str(self.K), str(self.V), str(self.chunk_size)
        S = "float" if T == "half" and not self.by_stage else T
        keys, keys_and_values = self.packet(self.K), self.packet(self.K, self.V)
        return {
            "chunk_local_cumsum": (C,),
            "chunk_scaled_dot_kkt": (T, K, C, keys),
            "solve_tril": (C,),
            "recompute_w_u": (T, K, V, C, keys_and_values),
            "chunk_fwd_intra": (T, "float" if T == "half" else T, K, V, C, keys_and_values),
            "chunk_fwd_h": (T, S, K, V, C, keys, METAL_TYPES[self.pool]),
            "chunk_fwd_o": (T, S, K, V, C, keys),
            "l2norm": (T, K),
            "fused_chunk_gated_delta_rule": (T, K, str(self.fused_chunk_size), keys, METAL_TYPES[self.pool]),
            "fused_recurrent_gated_delta_rule": (
                T,
                K,
                spelled(self.value_inner),
                spelled(self.normalise),
                spelled(self.channels),
                METAL_TYPES[self.pool],
            ),
        }[kernel]


def spelled(value: bool) -> str:
    return "true" if value else "false"


STAGES = ("chunk_fwd_h", "chunk_fwd_o")  # of the stage ops and of the end-to-end op
STAGE_KERNELS = ("chunk_local_cumsum", "chunk_scaled_dot_kkt", "solve_tril", "recompute_w_u", *STAGES)
CHUNK_KERNELS = ("chunk_fwd_intra", *STAGES)  # of the end-to-end op
KERNELS = (
    *STAGE_KERNELS,
    "chunk_fwd_intra",
    "l2norm",
    "fused_chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
)


FAMILIES = {
    "aura": ("aura_",),
    "layers": ("causal_conv1d", "gdn_gating", "l2norm", "rms_norm_gated"),
    "core": ("locate_slots",),
}


@dataclass(frozen=True)
class Specialisation:
    kernel: str
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        """As `_C.pipelines()` and the simulated device's profile have it."""
        return "_".join((self.kernel, *self.arguments))

    @property
    def file(self) -> str:
        """Below the shader directory."""
        for family, prefixes in FAMILIES.items():
            if self.kernel.startswith(prefixes):
                return f"{family}/{self.kernel}.metal"
        return f"gdn/{self.kernel}.metal"


def of_variants(variants: Iterable[Variant], kernels: Iterable[str] = KERNELS) -> list[Specialisation]:
    """What these kernels are specialised to for these variants, each once, kernel by kernel."""
    variants = list(variants)
    found = (Specialisation(kernel, variant.arguments(kernel)) for kernel in kernels for variant in variants)
    return list(dict.fromkeys(found))


def model_variants(sizes: Iterable[tuple[int, int]], dtypes: Iterable[torch.dtype]) -> list[Variant]:
    """The variants that models with these (K, V) call for: chunks of 64, either state layout, normalised or not."""
    dtypes = list(dtypes)
    return [
        Variant(dtype, K, V, value_inner=value_inner, normalise=normalise)
        for K, V in sizes
        for dtype in dtypes
        for value_inner in (True, False)
        for normalise in (False, True)
    ]


def table(quick: bool = False) -> list[Variant]:
    """The variants that are checked: what models call for, odd sizes, small chunks, unaligned rows, separate stages.

    `quick`: those of Qwen3-Next in bfloat16.
    """
    if quick:
        return model_variants([(128, 128)], [torch.bfloat16])
    variants = model_variants([*MODEL_SIZES, *OTHER_SIZES], DTYPES)
    for dtype in DTYPES:
        for K, V in MODEL_SIZES:
            variants += [Variant(dtype, K, V, chunk_size=32), Variant(dtype, K, V, chunk_size=16)]
            variants += [Variant(dtype, K, V, aligned=False)]
    for value_inner in (True, False):  # decays for each channel: of no model listed, of KDA's and GLA's recurrences
        variants += [Variant(dtype, 128, 128, value_inner=value_inner, channels=True) for dtype in DTYPES]
        pools = [dtype for dtype in DTYPES if dtype != torch.float32]
        variants += [Variant(dtype, 128, 128, value_inner=value_inner, normalise=True, pool=dtype) for dtype in pools]
    return variants + [Variant(torch.float16, K, V, by_stage=True) for K, V in MODEL_SIZES]
