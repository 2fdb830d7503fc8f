"""Entries of the ops of a mixture of experts: the router and its logits, gate and up, down."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torch_gdn_check.registry import invalid
from torch_gdn_check.registry.gdn import LARGE
from torch_gdn_check.registry.inputs import Call
from torch_gdn_check.registry.invalid import put
from torch_gdn_check.registry.models import BF16, DTYPES, F16, F32
from torch_gdn_check.registry.quantized import PackedPoint, of_another, wrong_e4m3, wrong_scales
from torch_gdn_check.registry.registry import Hostile, Invalid, Named, OpEntry, register

OF_TOKENS = ("x", "topk_ids", "hidden", "topk_weights", "shared_hidden", "shared_gate", "residual")  # row per token
# The bounds are for products of up to a few hundred terms in f32, and for the sum of a token's experts.
F32_BOUND = 6e-7


@dataclass(frozen=True)
class ExpertPoint(PackedPoint):
    """E experts of size I, of which each of T tokens of size D chooses k. IS is the shared expert's size, or 0 for
    none.
    """

    T: int = 3
    E: int = 6
    k: int = 2
    D: int = 64
    I: int = 48  # noqa: E741
    IS: int = 0
    scoring: str = "softmax"
    groups: tuple[int, int] = (1, 1)  # n_group and topk_group
    biased: bool = False
    bits: int = 0  # bits of the experts' codes; 0 means that their weights are not packed
    shared_bits: int = 0  # bits of the shared expert's codes

    def weights(self, names: tuple[str, str, str], *rows: int, columns: int, bits: int) -> Call:
        """Returns a matrix, or its codes, scales and biases, or its numbers and scales."""
        if bits == 0:
            return {names[0]: self.tensor(*rows, columns)}
        tensors = self.tensors(*rows, columns=columns, bits=bits)
        return {name: x for name, x in zip(names, tensors, strict=True) if x is not None}

    def tensor(self, *sizes: int) -> Tensor:
        return self.placed(torch.randn(sizes).to(self.dtype))

    def ids(self) -> Tensor:
        """Draws distinct experts for each token. If there are several tokens, one has an expert fewer."""
        ids = torch.rand(self.T, self.E).argsort(-1)[:, : self.k].int()
        if self.T > 1:
            ids[self.T // 2, self.k // 2] = -1
        return ids


def draw_router(point: ExpertPoint) -> Call:
    n_group, topk_group = point.groups
    call: Call = {"router_logits": torch.randn(point.T, point.E).to(point.dtype), "top_k": point.k}
    call |= {"scoring": point.scoring, "n_group": n_group, "topk_group": topk_group, "routed_scaling_factor": 2.5}
    return call | ({"correction_bias": torch.randn(point.E)} if point.biased else {})


def draw_logits(point: ExpertPoint) -> Call:
    return {"x": point.tensor(point.T, point.D), "weight": point.tensor(point.E, point.D)}


def draw_gate_up(point: ExpertPoint) -> Call:
    names = ("w_gate_up", "w_scales", "w_biases")
    call: Call = {"x": point.tensor(point.T, point.D), "topk_ids": point.ids()}
    call |= point.weights(names, point.E, 2 * point.I, columns=point.D, bits=point.bits)
    if point.IS:
        for each in ("shared_gate", "shared_up"):
            names = (f"{each}_proj", f"{each}_scales", f"{each}_biases")
            call |= point.weights(names, point.IS, columns=point.D, bits=point.shared_bits)
    return call


def draw_down(point: ExpertPoint) -> Call:
    call: Call = {"hidden": point.tensor(point.T, point.k, point.I)}
    call |= point.weights(("w_down", "w_scales", "w_biases"), point.E, point.D, columns=point.I, bits=point.bits)
    call |= {"topk_weights": torch.rand(point.T, point.k), "topk_ids": point.ids()}
    if point.IS:
        call |= {"shared_hidden": point.tensor(point.T, point.IS), "shared_gate": torch.randn(point.T, 1)}
        names = ("shared_down_proj", "shared_scales", "shared_biases")
        call |= point.weights(names, point.D, columns=point.IS, bits=point.shared_bits)
        call["residual"] = point.tensor(point.T, point.D)
    return call


def expert_bounds(point: ExpertPoint, call: Call, exact: Named) -> dict[str, float]:
    return dict.fromkeys(exact, F32_BOUND) if point.dtype == F32 else {}


def wrong_router(entry: OpEntry[ExpertPoint]) -> Iterator[Invalid]:
    logits = "router_logits"
    yield Invalid(logits, ValueError, "1025 experts", put(logits, torch.zeros(2, 1025)))
    yield Invalid("top_k", ValueError, "none", put("top_k", 0))
    yield Invalid("top_k", ValueError, "more than can be chosen", put("top_k", 5))
    for groups in (0, 4, 33):
        yield Invalid("n_group", ValueError, str(groups), put("n_group", groups))
    for groups in (0, 4):
        yield Invalid("topk_group", ValueError, str(groups), put("topk_group", groups))
    yield Invalid("routed_scaling_factor", ValueError, "infinite", put("routed_scaling_factor", torch.inf))


PACKED_SMALL = ExpertPoint(D=96, I=96, IS=96, bits=4, shared_bits=8)


def wrong_packed(entry: OpEntry[ExpertPoint], weight: str, *shared: tuple[str, str, str]) -> Iterator[Invalid]:
    """Yields changes of calls with packed weights, which replace the small call."""
    numbers = ExpertPoint(D=130, I=130, IS=130, bits=8, shared_bits=8, e4m3=True)
    for names in ((weight, "w_scales", "w_biases"), *shared):
        without = Invalid(names[0], TypeError, "without scales", invalid.options(dict.fromkeys(names[1:])))
        wrong = [*wrong_scales(*names), Invalid(names[2], ValueError, "absent", put(names[2], None)), without]
        yield from of_another(entry, PACKED_SMALL, "packed", wrong)
        yield from of_another(entry, numbers, "e4m3", wrong_e4m3(*names))
    dense = entry.call(replace(PACKED_SMALL, bits=0))
    yield Invalid(shared[0][1], ValueError, "experts that are not packed", lambda call: dense)


def wrong_gate_up(entry: OpEntry[ExpertPoint]) -> Iterator[Invalid]:
    gate = ("shared_gate_proj", "shared_gate_scales", "shared_gate_biases")
    up = ("shared_up_proj", "shared_up_scales", "shared_up_biases")
    yield from wrong_packed(entry, "w_gate_up", gate, up)
    zeros = entry.call(replace(PACKED_SMALL, dtype=BF16, zero_points=True))
    yield Invalid(up[2], TypeError, "no zero points", lambda call: zeros | {up[2]: zeros[up[2]].bfloat16()})
    yield from invalid.apart("w_gate_up", "shared_gate_proj", "shared_up_proj")
    yield Invalid("shared_up_proj", ValueError, "absent", put("shared_up_proj", None))


def wrong_down(entry: OpEntry[ExpertPoint]) -> Iterator[Invalid]:
    yield from wrong_packed(entry, "w_down", ("shared_down_proj", "shared_scales", "shared_biases"))
    yield from invalid.apart("w_down", "shared_down_proj")
    yield Invalid("shared_down_proj", ValueError, "absent", put("shared_down_proj", None))
    alone = {"shared_hidden": None, "shared_down_proj": None}
    yield Invalid("shared_gate", ValueError, "no shared expert", lambda call: call | alone)


# There are few tokens and many, each dtype, sizes that are not multiples of a tile, and unaligned rows.
FEW = [
    ExpertPoint(BF16, T=1, E=8, k=4, D=256, I=96, IS=80),
    ExpertPoint(F32, T=5, E=5, k=3, D=100, I=36, IS=52),
    ExpertPoint(F16, T=8, E=3, k=2, D=33, I=19, aligned=False),
]
MANY = [
    ExpertPoint(BF16, T=70, E=8, k=4, D=256, I=96, IS=80),
    ExpertPoint(F32, T=45, E=5, k=3, D=100, I=36, IS=52),
    ExpertPoint(F16, T=40, E=3, k=2, D=33, I=19, aligned=False),
]
# The shared expert of packed experts has as many bits, other bits, or no codes, with a dtype for each.
PACKED = [
    ExpertPoint(BF16, E=8, k=4, D=256, I=128, IS=64, bits=4, shared_bits=4, group=64),
    ExpertPoint(F16, E=6, k=2, D=128, I=256, IS=128, bits=8, group=128, scale_dtype=F32),
    ExpertPoint(F32, E=5, k=3, D=96, I=160, IS=32, bits=4, shared_bits=8, aligned=False),
    ExpertPoint(BF16, E=4, k=2, D=64, I=96, IS=64, bits=4, group=32, scale_dtype=F16, zero_points=True),
    ExpertPoint(BF16, E=4, k=2, D=256, I=80, IS=144, bits=8, shared_bits=8, e4m3=True, scale_dtype=F32),
    ExpertPoint(F16, E=5, k=3, D=133, I=131, IS=70, bits=8, e4m3=True, aligned=False),
    ExpertPoint(BF16, E=4, k=2, D=128, I=96, IS=64, bits=4, shared_bits=4, mxfp4=True),
]
PACKED = [replace(point, T=T) for point, T in itertools.product(PACKED, (1, 5, 40))]
ROUTERS = [
    ExpertPoint(BF16, T=3, E=256, k=8),
    ExpertPoint(F32, T=9, E=60, k=5, scoring="sigmoid", groups=(6, 3), biased=True),
    ExpertPoint(F16, T=2, E=1000, k=10, groups=(8, 2)),
]
LOGITS = [
    ExpertPoint(BF16, T=1, E=67, D=2048),
    ExpertPoint(F32, T=3, E=60, D=100),
    ExpertPoint(F16, T=20, E=9, D=515, aligned=False),
    ExpertPoint(BF16, T=70, E=130, D=256),
    ExpertPoint(F32, T=65, E=60, D=100),
    ExpertPoint(F16, T=100, E=9, D=33, aligned=False),
]


def compiled_logits() -> Iterator[ExpertPoint]:
    for dtype, aligned, T in itertools.product(DTYPES, (True, False), (1, 2, 4, 8, 70)):
        yield ExpertPoint(dtype, T=T, D=8, aligned=aligned)


def compiled() -> Iterator[ExpertPoint]:
    for dtype, aligned, T in itertools.product(DTYPES, (True, False), (1, 4, 40)):
        yield ExpertPoint(dtype, T=T, D=8, I=8, aligned=aligned)
    for T in (1, 4, 40):
        yield ExpertPoint(BF16, T=T, D=32, I=32, IS=32, bits=4, shared_bits=4)
        yield ExpertPoint(BF16, T=T, D=32, I=32, IS=32, bits=8, shared_bits=8, e4m3=True)
        yield ExpertPoint(BF16, T=T, D=32, I=32, IS=32, bits=4, shared_bits=4, mxfp4=True)


def compiled_routers() -> Iterator[ExpertPoint]:
    sizes = (8, 64, 128, 256, 512, 1024)
    yield from (ExpertPoint(dtype, E=experts) for dtype, experts in itertools.product(DTYPES, sizes))


SMALL = ExpertPoint(IS=40)
OF_PRODUCTS: dict[str, Any] = {
    "small": SMALL,
    "points": [*FEW, *MANY, *PACKED],
    "quick": [FEW[0], MANY[0], *PACKED[:3]],
    "compiled": compiled,
    "bound": expert_bounds,
    "hostile": (Hostile("topk_ids", [[0, 6], [LARGE, 2], [-LARGE, 5]]),),
}

register(
    OpEntry(
        "moe_logits",
        draw=draw_logits,
        small=ExpertPoint(),
        points=LOGITS,
        quick=[LOGITS[0], LOGITS[3]],
        compiled=compiled_logits,
        bound=lambda point, call, exact: dict.fromkeys(exact, F32_BOUND),
        heads={"router_logits": 0},
        result="router_logits",
        operations=lambda call: 2 * call["x"].numel() * len(call["weight"]),
        takes={"x": "0", "weight": "0-"},
        invalid=lambda entry: invalid.apart("weight"),
    ),
    OpEntry(
        "moe_router",
        draw=draw_router,
        small=ExpertPoint(groups=(3, 2), biased=True),
        points=ROUTERS,
        quick=ROUTERS[:1],
        compiled=compiled_routers,
        bound=expert_bounds,
        heads={"topk_weights": 0},
        operations=lambda call: 5 * call["router_logits"].numel(),
        takes={"router_logits": "float 0", "correction_bias": "float"},
        invalid=wrong_router,
    ),
    OpEntry(
        "moe_gate_up",
        draw=draw_gate_up,
        heads={"hidden": 0, "shared_hidden": 0},
        operations=lambda call: 4 * call["topk_ids"].numel() * call["w_gate_up"][0].numel() // 2,
        takes={"topk_ids": "1-", "w_gate_up": "0-"},
        invalid=wrong_gate_up,
        **OF_PRODUCTS,
    ),
    OpEntry(
        "moe_down",
        draw=draw_down,
        heads={"y": 0},
        operations=lambda call: 2 * call["topk_ids"].numel() * call["w_down"][0].numel(),
        launches=None,
        takes={"w_down": "0-", "topk_weights": "float", "shared_gate": "float"},
        invalid=wrong_down,
        **OF_PRODUCTS,
    ),
)
