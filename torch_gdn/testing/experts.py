"""The ops of a mixture of experts: the router, gate and up, down."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_gdn import reference
from torch_gdn.testing import invalid
from torch_gdn.testing.gdn import LARGE
from torch_gdn.testing.inputs import Call, columns_apart, unaligned
from torch_gdn.testing.invalid import change, put
from torch_gdn.testing.models import DTYPES
from torch_gdn.testing.registry import Hostile, Invalid, Named, OpEntry, Point, register

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Products of up to a few hundred terms in f32, and the sum of a token's experts.
F32_BOUND = 6e-7


@dataclass(frozen=True)
class ExpertPoint(Point):
    """E experts of I, of which each of T tokens of D chooses k; IS is the shared expert's size, 0 for none."""

    T: int = 3
    E: int = 6
    k: int = 2
    D: int = 64
    I: int = 48  # noqa: E741
    IS: int = 0
    aligned: bool = True  # rows start at a multiple of 4 elements
    scoring: str = "softmax"
    groups: tuple[int, int] = (1, 1)  # n_group and topk_group
    biased: bool = False

    def tensor(self, *sizes: int) -> Tensor:
        x = torch.randn(sizes).to(self.dtype)
        return x if self.aligned else unaligned(x)

    def ids(self) -> Tensor:
        """Distinct experts for each token. Of several tokens, one has an expert fewer."""
        ids = torch.rand(self.T, self.E).argsort(-1)[:, : self.k].int()
        if self.T > 1:
            ids[self.T // 2, self.k // 2] = -1
        return ids


def draw_router(point: ExpertPoint) -> Call:
    n_group, topk_group = point.groups
    call: Call = {"router_logits": torch.randn(point.T, point.E).to(point.dtype), "top_k": point.k}
    call |= {"scoring": point.scoring, "n_group": n_group, "topk_group": topk_group, "routed_scaling_factor": 2.5}
    return call | ({"correction_bias": torch.randn(point.E)} if point.biased else {})


def draw_gate_up(point: ExpertPoint) -> Call:
    call = {"x": point.tensor(point.T, point.D), "w_gate_up": point.tensor(point.E, 2 * point.I, point.D)}
    call["topk_ids"] = point.ids()
    if point.IS:
        call |= {name: point.tensor(point.IS, point.D) for name in ("shared_gate_proj", "shared_up_proj")}
    return call


def draw_down(point: ExpertPoint) -> Call:
    call = {"hidden": point.tensor(point.T, point.k, point.I), "w_down": point.tensor(point.E, point.D, point.I)}
    call |= {"topk_weights": torch.rand(point.T, point.k), "topk_ids": point.ids()}
    if point.IS:
        call |= {"shared_hidden": point.tensor(point.T, point.IS)}
        call |= {"shared_down_proj": point.tensor(point.D, point.IS), "shared_gate": torch.randn(point.T, 1)}
    return call


def expert_bounds(point: ExpertPoint, call: Call, exact: Named) -> dict[str, float]:
    return dict.fromkeys(exact, F32_BOUND) if point.dtype == F32 else {}


def wrong_router(entry: OpEntry[ExpertPoint]) -> Iterator[Invalid]:
    logits = "router_logits"
    yield from [*invalid.integers(logits, "correction_bias"), *invalid.float64(logits)]
    yield Invalid(logits, ValueError, "one dimension", change(logits, lambda x: x[0]))
    for experts in (0, 1025):
        yield Invalid(logits, ValueError, f"{experts} experts", put(logits, torch.zeros(2, experts)))
    yield Invalid("top_k", ValueError, "none", put("top_k", 0))
    yield Invalid("top_k", ValueError, "more than can be chosen", put("top_k", 5))
    yield Invalid("scoring", ValueError, "another", put("scoring", "relu"))
    yield Invalid("correction_bias", ValueError, "too short", change("correction_bias", lambda x: x[1:]))
    for groups in (0, 4, 33):
        yield Invalid("n_group", ValueError, str(groups), put("n_group", groups))
    for groups in (0, 4):
        yield Invalid("topk_group", ValueError, str(groups), put("topk_group", groups))
    yield Invalid("routed_scaling_factor", ValueError, "infinite", put("routed_scaling_factor", torch.inf))


def wrong_ids() -> Iterator[Invalid]:
    ids = "topk_ids"
    yield Invalid(ids, TypeError, "floats", change(ids, torch.Tensor.float))
    yield Invalid(ids, ValueError, "a token fewer", change(ids, lambda x: x[1:]))
    yield Invalid(ids, ValueError, "one dimension", change(ids, torch.Tensor.flatten))


def wrong_weights(*names: str) -> Iterator[Invalid]:
    yield from invalid.half(*names)
    for name in names:
        yield Invalid(name, ValueError, "a column too few", change(name, lambda x: x[..., 1:]))
        yield Invalid(name, ValueError, "columns apart", change(name, columns_apart))


def wrong_gate_up(entry: OpEntry[ExpertPoint]) -> Iterator[Invalid]:
    yield from [*invalid.integers("x"), *invalid.float64("x"), *wrong_ids()]
    yield from wrong_weights("w_gate_up", "shared_gate_proj", "shared_up_proj")
    yield Invalid("x", ValueError, "one dimension", change("x", lambda x: x[0]))
    yield Invalid("x", ValueError, "no columns", change("x", lambda x: x[:, :0]))
    yield Invalid("w_gate_up", ValueError, "two dimensions", change("w_gate_up", lambda w: w[0]))
    yield Invalid("w_gate_up", ValueError, "an odd number of rows", change("w_gate_up", lambda w: w[:, 1:]))
    yield Invalid("w_gate_up", ValueError, "no rows", change("w_gate_up", lambda w: w[:, :0]))
    yield Invalid("w_gate_up", ValueError, "no experts", change("w_gate_up", lambda w: w[:0]))
    yield Invalid("shared_gate_proj", ValueError, "no rows", change("shared_gate_proj", lambda w: w[:0]))
    yield Invalid("shared_up_proj", ValueError, "a row fewer", change("shared_up_proj", lambda w: w[1:]))
    yield Invalid("shared_up_proj", ValueError, "absent", put("shared_up_proj", None))


def wrong_down(entry: OpEntry[ExpertPoint]) -> Iterator[Invalid]:
    yield from [*invalid.integers("hidden", "topk_weights", "shared_gate"), *invalid.float64("hidden"), *wrong_ids()]
    yield from [*wrong_weights("w_down", "shared_down_proj"), *invalid.half("shared_hidden")]
    yield Invalid("hidden", ValueError, "two dimensions", change("hidden", lambda x: x[0]))
    yield Invalid("hidden", ValueError, "no columns", change("hidden", lambda x: x[..., :0]))
    yield Invalid("w_down", ValueError, "two dimensions", change("w_down", lambda w: w[0]))
    yield Invalid("w_down", ValueError, "no experts", change("w_down", lambda w: w[:0]))
    yield Invalid("w_down", ValueError, "no rows", change("w_down", lambda w: w[:, :0]))
    yield Invalid("topk_weights", ValueError, "a token fewer", change("topk_weights", lambda w: w[1:]))
    yield Invalid("shared_hidden", ValueError, "a token fewer", change("shared_hidden", lambda x: x[1:]))
    yield Invalid("shared_hidden", ValueError, "no columns", change("shared_hidden", lambda x: x[:, :0]))
    yield Invalid("shared_down_proj", ValueError, "absent", put("shared_down_proj", None))
    yield Invalid("shared_gate", ValueError, "one dimension", change("shared_gate", torch.Tensor.flatten))
    alone = {"shared_hidden": None, "shared_down_proj": None}
    yield Invalid("shared_gate", ValueError, "no shared expert", lambda call: call | alone)


# Few tokens and more, each dtype; sizes that are no multiples of a tile, rows that are not aligned.
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
ROUTERS = [
    ExpertPoint(BF16, T=3, E=256, k=8),
    ExpertPoint(F32, T=9, E=60, k=5, scoring="sigmoid", groups=(6, 3), biased=True),
    ExpertPoint(F16, T=2, E=1000, k=10, groups=(8, 2)),
]


def compiled() -> Iterator[ExpertPoint]:
    for dtype, aligned, T in itertools.product(DTYPES, (True, False), (1, 4, 40)):
        yield ExpertPoint(dtype, T=T, D=8, I=8, aligned=aligned)


def compiled_routers() -> Iterator[ExpertPoint]:
    sizes = (8, 64, 128, 256, 512, 1024)
    yield from (ExpertPoint(dtype, E=experts) for dtype, experts in itertools.product(DTYPES, sizes))


SMALL = ExpertPoint(IS=40)
OUTSIDE = (Hostile("topk_ids", [[0, 6], [LARGE, 2], [-LARGE, 5]]),)

register(
    OpEntry(
        "moe_router",
        draw=draw_router,
        exact=lambda call: reference.moe_router(**call),
        small=ExpertPoint(groups=(3, 2), biased=True),
        points=ROUTERS,
        quick=ROUTERS[:1],
        compiled=compiled_routers,
        bound=expert_bounds,
        heads={"topk_weights": 0},
        operations=lambda call: 5 * call["router_logits"].numel(),
        invalid=wrong_router,
    ),
    OpEntry(
        "moe_gate_up",
        draw=draw_gate_up,
        exact=lambda call: reference.moe_gate_up(**call),
        small=SMALL,
        points=[*FEW, *MANY],
        quick=[FEW[0], MANY[0]],
        compiled=compiled,
        bound=expert_bounds,
        heads={"hidden": 0, "shared_hidden": 0},
        operations=lambda call: 4 * call["topk_ids"].numel() * call["w_gate_up"][0].numel() // 2,
        invalid=wrong_gate_up,
        hostile=OUTSIDE,
    ),
    OpEntry(
        "moe_down",
        draw=draw_down,
        exact=lambda call: reference.moe_down(**call),
        small=SMALL,
        points=[*FEW, *MANY],
        quick=[FEW[0], MANY[0]],
        compiled=compiled,
        bound=expert_bounds,
        heads={"y": 0},
        operations=lambda call: 2 * call["topk_ids"].numel() * call["w_down"][0].numel(),
        invalid=wrong_down,
        hostile=OUTSIDE,
    ),
)
