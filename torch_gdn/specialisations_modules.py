"""Which specialisations calls ask for of the kernels beside the delta rule: their template arguments are dtypes, each
by itself, and then numbers. tests/proof/test_specialisations.py holds them against what the host launches.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from torch_gdn.specialisations import DTYPES, METAL_TYPES, Specialisation

Numbers = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Choices:
    """Of one kernel."""

    dtypes: int  # so many arguments
    numbers: Numbers = ((),)  # that go with each choice of dtypes
    usual: Numbers = ((),)  # those among them that models call for


WIDTHS_AND_PACKETS = tuple(itertools.product("234", "14"))  # W; 4 channels at once, or 1
CONVOLUTION = Choices(3, WIDTHS_AND_PACKETS, usual=WIDTHS_AND_PACKETS[-2:])  # dtypes of x, weight and state
CONVOLUTION_OF_CHANNELS = Choices(3, (("2",), ("3",), ("4",)), usual=(("4",),))  # W; a thread has one channel
# D and packet: rows of models' heads; of no packet; and the longest, which take the most registers.
ROWS = (("128", "4"), ("192", "4"), ("512", "4"), ("128", "1"), ("33", "1"), ("1023", "1"), ("1024", "4"))
CHOICES = {
    "causal_conv1d": CONVOLUTION,
    "causal_conv1d_channel_first": CONVOLUTION_OF_CHANNELS,
    "causal_conv1d_update": CONVOLUTION_OF_CHANNELS,
    "causal_conv1d_state": Choices(2),  # dtypes of x and state
    "gdn_gating": Choices(0, (("256",),), usual=(("256",),)),  # threads
    "locate_slots": Choices(0, (("4",),), usual=(("4",),)),  # simdgroups
    "rms_norm_gated": Choices(3, ROWS, usual=ROWS[:3]),  # dtypes of x, gate and weight
}
KERNELS = tuple(CHOICES)


def every() -> list[Specialisation]:
    """All, but for the rows of the gated norm, whose length is free."""
    types = tuple(METAL_TYPES.values())
    return [
        Specialisation(kernel, (*dtypes, *numbers))
        for kernel, choices in CHOICES.items()
        for dtypes in itertools.product(types, repeat=choices.dtypes)
        for numbers in choices.numbers
    ]


def table(quick: bool = False) -> list[Specialisation]:
    """Those that are checked: what models call for, all tensors of one dtype; each once. `quick`: in bfloat16."""
    found = [
        Specialisation(kernel, (METAL_TYPES[dtype],) * choices.dtypes + numbers)
        for kernel, choices in CHOICES.items()
        for dtype in ([torch.bfloat16] if quick else DTYPES)
        for numbers in choices.usual
    ]
    return list(dict.fromkeys(found))
