"""Defines the measured shapes: Gated DeltaNet layers and attention layers of published models."""

from __future__ import annotations

from typing import NamedTuple

from torch_gdn_check.registry import models
from torch_gdn_check.registry.models import MODELS


class Layer(NamedTuple):
    """The heads of a Gated DeltaNet or Kimi Delta Attention layer, and the width of its short convolution."""

    model: str
    H: int
    HV: int
    K: int
    V: int

    @property
    def channels(self) -> int:
        return 2 * self.H * self.K + self.HV * self.V

    def __str__(self) -> str:
        return f"{self.model} ({self.H}/{self.HV} heads, {self.K} x {self.V})"


QWEN3_NEXT = Layer("Qwen3-Next", *MODELS[models.QWEN3_NEXT])
KIMI_LINEAR = Layer("Kimi-Linear", 32, 32, 128, 128)
LAYERS = (QWEN3_NEXT, *(Layer(name, *MODELS[name]) for name in ("Qwen3.5-27B", "OLMo-Hybrid-7B")))


class Attention(NamedTuple):
    """A layer of full attention, whose cache AURA holds."""

    model: str
    HQ: int
    HK: int
    D: int

    def __str__(self) -> str:
        return f"{self.model} ({self.HQ}/{self.HK} heads, D {self.D})"


ATTENTIONS = (Attention("32/8", 32, 8, 128), Attention("Qwen3-Next", 16, 2, 256))
