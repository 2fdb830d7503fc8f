"""The entry of the op that computes a layer's step between its projections."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torch_gdn_check.registry import bounds, invalid
from torch_gdn_check.registry.gdn import SLOTS
from torch_gdn_check.registry.inputs import Call, boundaries_of, slots
from torch_gdn_check.registry.invalid import change, put
from torch_gdn_check.registry.models import BF16, DTYPES, F16, F32
from torch_gdn_check.registry.registry import Invalid, Named, OpEntry, Point, register

# q, k and v are rounded after the convolution; o is rounded at the end, and on the CPU before the norm too.
OUTPUT = {F32: 6e-7, BF16: 5e-3, F16: 6.5e-4}
STATE = {F32: 3e-7, BF16: 3e-3, F16: 4e-4}


@dataclass(frozen=True)
class DecodePoint(Point):
    K: int = 128
    V: int = 128
    H: int = 2
    HV: int = 4
    W: int = 4
    by_key_head: bool = False  # the projections have Qwen3-Next's order
    state_v_first: bool = False
    pool: torch.dtype = F32  # dtype of the rule's states
    parameters: torch.dtype | None = None  # dtype of the convolution's and the norm's weights; None means qkv's
    tokens: int = 1
    batch: int = 3
    boundaries: tuple[int, ...] = ()  # cu_seqlens of packed sequences


def draw_decode(point: DecodePoint) -> Call:
    H, HV, K, V = point.H, point.HV, point.K, point.V
    D, cu_seqlens = 2 * H * K + HV * V, boundaries_of(point.tokens, point.packed, point.boundaries)
    batch, N = (1, len(cu_seqlens) - 1) if cu_seqlens else (point.batch, point.batch)
    rows, parameters = (batch, point.tokens), point.parameters or point.dtype
    call: Call = {"qkv": torch.randn(*rows, D + HV * V if point.by_key_head else D)}
    call["z"] = None if point.by_key_head else torch.randn(*rows, HV * V)
    call["b"] = torch.randn(*rows, 2 * HV if point.by_key_head else HV)
    call["a"] = None if point.by_key_head else torch.randn(*rows, HV)
    call = {name: x if x is None else x.to(point.dtype) for name, x in call.items()}
    count = max(5, N + 2)
    call |= {"conv_weight": torch.randn(D, point.W).to(parameters)}
    call |= {"conv_pool": torch.randn(count, D, point.W).to(point.dtype)}
    call |= {"A_log": torch.randn(HV), "dt_bias": torch.randn(HV)}
    states = torch.randn(count, HV, *((V, K) if point.state_v_first else (K, V))).to(point.pool)
    call |= slots(states, N) | {"state_v_first": point.state_v_first}
    call |= {"norm_weight": torch.rand(V).to(parameters), "conv_bias": torch.randn(D).to(parameters)}
    return call | ({"cu_seqlens": torch.tensor(cu_seqlens)} if cu_seqlens else {})


def decode_bounds(point: DecodePoint, call: Call, exact: Named) -> dict[str, float]:
    state = max(STATE[point.dtype], bounds.ROUNDING.get(point.pool, 0))
    return {"o": OUTPUT[point.dtype], "state_pool": state, "conv_pool": 0}


def stepped(call: Call) -> Call:
    """Turns a call into a step of two tokens per sequence, with a slot for each state. Windows have three of four
    columns.
    """
    step = {name: call[name][:, :2] for name in ("qkv", "z", "b", "a")}
    step |= {"state_indices": torch.arange(4).view(2, 2), "num_accepted_tokens": torch.ones(2, dtype=torch.int64)}
    return call | step | {"conv_pool": call["conv_pool"][..., :3]}


def wrong_decode(entry: OpEntry[DecodePoint]) -> Iterator[Invalid]:
    yield from [*invalid.packing(), *invalid.slots(), *invalid.drafts(), *invalid.accepted(invalid.drafted)]
    yield Invalid("a", ValueError, "a alone", put("z", None))
    yield Invalid("qkv", ValueError, "without z", lambda call: call | {"z": None, "a": None})
    yield Invalid("conv_weight", ValueError, "W of 1", change("conv_weight", lambda w: w[:, :1]))
    yield Invalid("conv_weight", ValueError, "no room for a key head", change("conv_weight", lambda w: w[: 4 * 32]))
    yield Invalid("conv_weight", ValueError, "half a key head", change("conv_weight", lambda w: w[:-32]))
    yield Invalid("conv_weight", ValueError, "3 key heads of 4", change("conv_weight", lambda w: w.new_zeros(320, 4)))
    yield Invalid("conv_pool", ValueError, "two columns", change("conv_pool", lambda pool: pool[..., :2]))
    for what, sizes in {"K of 129": (129, 32), "V of 193": (64, 193), "K of 0": (0, 32)}.items():
        yield Invalid("state_pool", ValueError, what, put("state_pool", torch.zeros(5, 4, *sizes)))
    yield Invalid("conv_pool", ValueError, "a column too few for two tokens", stepped)
    counts = torch.ones(2, dtype=torch.int64)
    yield Invalid("num_accepted_tokens", ValueError, "one slot a sequence", put("num_accepted_tokens", counts))


MODELS = DecodePoint(BF16)
SIZES = ((F32, 33, 65, 3), (F16, 96, 192, 4), (BF16, 64, 64, 2))
POINTS = [replace(MODELS, by_key_head=each, state_v_first=each, tokens=n) for n in (1, 2) for each in (False, True)]
POINTS += [
    DecodePoint(dtype, K=K, V=V, W=W, tokens=n, state_v_first=K == 96) for dtype, K, V, W in SIZES for n in (1, 2)
]
POINTS += [DecodePoint(K=64, V=32, H=1, packed=True, by_key_head=True, tokens=7), replace(MODELS, pool=BF16)]
POINTS += [DecodePoint(K=16, V=8, H=1, HV=1, batch=40)]


def compiled_decode() -> Iterator[DecodePoint]:
    for dtype, v_first, tokens in itertools.product(DTYPES, (False, True), (1, 2)):
        yield DecodePoint(dtype, by_key_head=v_first, state_v_first=v_first, tokens=tokens)


def operations_of_decode(call: Call) -> int:
    B, T = call["qkv"].shape[:2]
    states: Tensor = call["state_pool"]
    return B * T * (7 * states[0].numel() + 2 * call["conv_weight"].numel())


register(
    OpEntry(
        "gdn_decode_",
        draw=draw_decode,
        small=DecodePoint(K=32, V=32, H=2, HV=4, tokens=20, batch=2),
        points=POINTS,
        quick=POINTS[:3],
        compiled=compiled_decode,
        bound=decode_bounds,
        heads={"state_pool": 1, "conv_pool": 1},
        result="o",
        operations=operations_of_decode,
        launches=2,
        scratch=True,
        takes={"conv_weight": "1-", "conv_pool": "float 2-"}
        | dict.fromkeys(("qkv", "z", "state_pool", "norm_weight"), "float")
        | dict.fromkeys(("b", "a", "A_log", "dt_bias"), "float64"),
        invalid=wrong_decode,
        hostile=SLOTS,
    )
)
