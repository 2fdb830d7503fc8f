"""Entries of the ops around the rule: norms, gates, the short convolution, copies of states."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_gdn import reference
from torch_gdn_check.registry import bounds, invalid
from torch_gdn_check.registry.gdn import BOUNDARIES, LARGE, RECURRENT, SLOTS, RulePoint
from torch_gdn_check.registry.inputs import Call, boundaries_of, slots, unaligned
from torch_gdn_check.registry.invalid import change, put
from torch_gdn_check.registry.models import BF16, DTYPES, F16, F32, MODEL_SIZES, OTHER_SIZES
from torch_gdn_check.registry.registry import REGISTRY, Change, Hostile, Invalid, OpEntry, Point, accepted_by, register

# ---- norms and gates -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowPoint(Point):
    """Rows of D numbers, as [batch, tokens, heads, D]."""

    D: int = 128
    other: torch.dtype | None = None  # dtype of the gate; None means x's
    weight: torch.dtype | None = None
    aligned: bool = True  # rows start at a multiple of 4 elements
    tokens: int = 5
    heads: int = 3
    batch: int = 2

    def rows(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.placed(torch.randn(self.batch, self.tokens, self.heads, self.D).to(dtype or self.dtype))

    def row(self) -> Tensor:
        return self.placed(torch.randn(self.D).to(self.weight or self.dtype))

    def placed(self, x: Tensor) -> Tensor:
        return x if self.aligned else unaligned(x)


ROWS = tuple(RowPoint(dtype, D=D) for dtype, D in ((BF16, 128), (F32, 33), (F16, 1024)))
SMALL_ROWS = RowPoint(D=32, tokens=20, heads=4)
# The gated norm has these D, and aligned rows or not: head sizes of models, odd sizes, and the longest.
NORM_ROWS = ((128, True), (192, True), (512, True), (128, False), (33, False), (1023, False), (1024, True))
# A decoder layer's norm has these: head and hidden sizes of models, an odd size, and the longest.
HIDDEN_ROWS = ((256, True), (2048, True), (4096, True), (1023, False), (16384, True))


# These are row lengths of q and k, an odd one, the longest that one block holds, and a longer one.
KEY_SIZES = tuple(dict.fromkeys((*(K for K, _ in (*MODEL_SIZES, *OTHER_SIZES)), 255, 1024, 2500)))


def one_dtype(rows: tuple[tuple[int, bool], ...]) -> Iterator[RowPoint]:
    for dtype, (D, aligned) in itertools.product(DTYPES, rows):
        yield RowPoint(dtype, D=D, aligned=aligned, tokens=1, heads=1)


def wrong_l2norm(entry: OpEntry[RowPoint]) -> Iterator[Invalid]:
    yield Invalid("x", ValueError, "no dimension", put("x", torch.tensor(1.0)))


def wrong_norm(entry: OpEntry[RowPoint], second: str) -> Iterator[Invalid]:
    rows = dict.fromkeys(("x", second), torch.zeros(2, 16385))
    yield Invalid("x", ValueError, "D of 16385", invalid.options(rows))
    yield Invalid("x", ValueError, "no dimension", put("x", torch.tensor(1.0)))
    if second == "residual":
        yield Invalid("zero_centered", ValueError, "no weight", put("weight", None))


def wrong_channel_gates(entry: OpEntry[RowPoint]) -> Iterator[Invalid]:
    yield Invalid("g", ValueError, "one dimension", change("g", torch.Tensor.flatten))
    for bound in (0.0, torch.nan):
        yield Invalid("lower_bound", ValueError, str(bound), put("lower_bound", bound))
    yield Invalid("output_dtype", TypeError, "an integer", put("output_dtype", torch.int32))


def draw_gates(point: RowPoint) -> Call:
    heads = torch.randn(2, point.heads)
    a, b = torch.randn(2, point.batch, point.tokens, point.heads).to(point.dtype)
    return {"A_log": heads[0].clone(), "a": a, "b": b, "dt_bias": heads[1].clone()}


@dataclass(frozen=True)
class HeadPoint(RowPoint):
    """Heads of q and k, of which the first 2 P elements are rotated; `other` is the dtype of the angles."""

    P: int = 16
    keys: int = 1  # heads of k
    normed: bool = True
    heads_first: bool = False


def draw_heads(point: HeadPoint) -> Call:
    angles = torch.randn(point.batch, point.tokens, point.P)
    call: Call = {"q": point.rows(), "k": replace(point, heads=point.keys).rows(), "heads_first": point.heads_first}
    call |= {name: point.placed(x.to(point.other or point.dtype)) for name, x in turns(angles).items()}
    return call | ({"q_weight": point.row(), "k_weight": point.row(), "zero_centered": True} if point.normed else {})


def turns(angles: Tensor) -> Call:
    return {"cos": angles.cos(), "sin": angles.sin()}


def wrong_product(entry: OpEntry[RowPoint]) -> Iterator[Invalid]:
    yield Invalid("gate", ValueError, "no dimension", put("gate", torch.tensor(1.0)))


def wrong_heads(entry: OpEntry[Any]) -> Iterator[Invalid]:
    yield Invalid("cos", ValueError, "17 pairs for D 32", change("cos", lambda x: x.new_zeros(*x.shape[:2], 17)))
    yield Invalid("k_weight", ValueError, "one weight", put("k_weight", None))
    without = {"q_weight": None, "k_weight": None}
    yield Invalid("zero_centered", ValueError, "no weights", invalid.options(without))


# These are D and P of Qwen3.5 and Qwen3-Next, of Llama, and odd ones.
HEADS = ((BF16, 256, 32), (F16, 128, 64), (F32, 33, 7))


def wrong_norm_bwd(entry: OpEntry[RowPoint]) -> Iterator[Invalid]:
    rows = dict.fromkeys(("dy", "x", "g", "dh"), torch.zeros(2, 16385))
    yield Invalid("x", ValueError, "D of 16385", invalid.options(rows))
    yield Invalid("zero_centered", ValueError, "no weight", invalid.options({"weight": None, "zero_centered": True}))


def wrong_channel_gates_bwd(entry: OpEntry[RowPoint]) -> Iterator[Invalid]:
    yield Invalid("dy", ValueError, "one dimension", put("dy", torch.zeros(3)))
    yield Invalid("lower_bound", ValueError, "zero", put("lower_bound", 0.0))


def draw_norm_bwd(point: RowPoint) -> Call:
    call: Call = {"dy": point.rows(), "x": point.rows(), "weight": point.row(), "g": point.rows(point.other)}
    return call | {"dh": point.rows()}


def draw_channel_gates_bwd(point: RowPoint) -> Call:
    call: Call = {"dy": point.rows(F32), "g": point.rows(), "A_log": torch.randn(point.heads)}
    return call | {"dt_bias": torch.randn(point.heads * point.D)}


def sum_bounds(call: Call, **sums: str) -> dict[str, float]:
    """Returns the bounds of gradients that are sums over tokens, which have the dtypes of these arguments."""
    dtypes = {name: call[argument].dtype for name, argument in sums.items() if argument in call}
    return {name: max(1e-6, bounds.ROUNDING[dtype]) for name, dtype in dtypes.items()}


def draw_channel_gates(point: RowPoint) -> Call:
    call: Call = {"g": point.rows(), "A_log": torch.randn(point.heads), "dt_bias": torch.randn(point.heads * point.D)}
    return call | {"output_dtype": point.dtype}


FLOAT64_PARAMETERS = dict.fromkeys(("A_log", "dt_bias"), "float64 more")

register(
    OpEntry(
        "l2norm",
        draw=lambda point: {"x": point.rows(), "return_rstd": True},
        exact=lambda call: reference.l2norm_fwd(**accepted_by(reference.l2norm_fwd, call)),
        small=RowPoint(D=64, tokens=20, heads=2),
        points=[*ROWS, RowPoint(D=2500)],
        compiled=lambda: one_dtype(tuple((D, True) for D in KEY_SIZES)),
        operations=lambda call: 3 * call["x"].numel(),
        takes={"x": "float rank 0 1 2 3"},
        invalid=wrong_l2norm,
    ),
    OpEntry(
        "rms_norm",
        draw=lambda point: {"x": point.rows(), "weight": point.row(), "residual": point.rows(), "zero_centered": True},
        small=SMALL_ROWS,
        points=ROWS,
        compiled=partial(one_dtype, HIDDEN_ROWS),
        operations=lambda call: 5 * call["x"].numel(),
        takes={"weight": "float"},
        invalid=partial(wrong_norm, second="residual"),
    ),
    OpEntry(
        "act_and_mul",
        draw=lambda point: {"gate": point.rows(), "up": point.rows()},
        small=SMALL_ROWS,
        points=[*ROWS, RowPoint(F16, D=2500, aligned=False)],
        compiled=lambda: [RowPoint(dtype, aligned=aligned) for dtype in DTYPES for aligned in (True, False)],
        operations=lambda call: 3 * call["up"].numel(),
        invalid=wrong_product,
    ),
    OpEntry(
        "qk_norm_rope",
        draw=draw_heads,
        small=HeadPoint(D=32, tokens=20, heads=4, keys=4),
        points=[HeadPoint(dtype, D=D, P=P, heads=4) for dtype, D, P in HEADS]
        + [HeadPoint(BF16, D=128, other=F32, normed=False, heads_first=True)],
        compiled=lambda: [HeadPoint(dtype, normed=normed) for dtype in DTYPES for normed in (True, False)],
        operations=lambda call: 6 * (call["q"].numel() + call["k"].numel()),
        takes={"q": "2", "k": "2"},
        invalid=wrong_heads,
    ),
    OpEntry(
        "rms_norm_gated",
        draw=lambda point: {"x": point.rows(), "g": point.rows(point.other), "weight": point.row()},
        small=SMALL_ROWS,
        points=ROWS,
        compiled=partial(one_dtype, NORM_ROWS[:3]),
        operations=lambda call: 5 * call["x"].numel(),
        exponentials=1,
        takes=dict.fromkeys(("x", "g", "weight"), "float"),
        invalid=partial(wrong_norm, second="g"),
    ),
    OpEntry(
        "norm_bwd",
        draw=draw_norm_bwd,
        small=SMALL_ROWS,
        points=[*ROWS, RowPoint(D=2500), RowPoint(BF16, tokens=70)],
        compiled=partial(one_dtype, ((128, True), (2048, True), (4096, True), (1023, False), (12288, True))),
        operations=lambda call: 12 * call["x"].numel(),
        exponentials=2,
        bound=lambda point, call, exact: sum_bounds(call, dweight="weight"),
        scratch=True,
        launches=2,
        takes={"weight": "float", "g": "float"},
        invalid=wrong_norm_bwd,
    ),
    OpEntry(
        "gdn_gating",
        draw=draw_gates,
        small=SMALL_ROWS,
        points=[RowPoint(heads=6, tokens=70), RowPoint(BF16, heads=32)],
        operations=lambda call: 5 * call["a"].numel(),
        takes=dict.fromkeys(("A_log", "a", "b", "dt_bias"), "float"),
        exponentials=3,
    ),
    OpEntry(
        "fused_kda_gate",
        draw=draw_channel_gates,
        exact=lambda call: reference.fused_kda_gate(**accepted_by(reference.fused_kda_gate, call)),
        small=SMALL_ROWS,
        points=[RowPoint(heads=6, tokens=70, D=33), RowPoint(BF16, heads=32), RowPoint(F16)],
        operations=lambda call: 5 * call["g"].numel(),
        takes={"g": "float64 rank 0 1"} | FLOAT64_PARAMETERS,
        invalid=wrong_channel_gates,
    ),
    OpEntry(
        "fused_kda_gate_bwd",
        draw=draw_channel_gates_bwd,
        small=SMALL_ROWS,
        points=[RowPoint(heads=6, tokens=70, D=33), RowPoint(BF16, heads=32), RowPoint(F16)],
        operations=lambda call: 8 * call["g"].numel(),
        exponentials=2,
        bound=lambda point, call, exact: dict.fromkeys(("dA_log", "ddt_bias"), 1e-6),
        scratch=True,
        launches=3,
        takes=FLOAT64_PARAMETERS | {"dy": "float", "g": "float"},
        invalid=wrong_channel_gates_bwd,
    ),
)


# ---- the short convolution -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConvolutionPoint(Point):
    weight: torch.dtype | None = None  # None means x's
    state: torch.dtype | None = None
    D: int = 32
    W: int = 4
    tokens: int = 20
    batch: int = 2
    boundaries: tuple[int, ...] = ()  # cu_seqlens of packed sequences
    by_channel: bool = False  # the tokens of a channel are adjacent in memory
    biased: bool = True  # pass a bias, an activation and a residual
    from_state: bool = True


def draw_convolution(point: ConvolutionPoint, in_place: bool) -> Call:
    cu_seqlens = boundaries_of(point.tokens, point.packed, point.boundaries)
    batch, N = (1, len(cu_seqlens) - 1) if cu_seqlens else (point.batch, point.batch)
    x = torch.randn(batch, point.D, point.tokens).to(point.dtype).transpose(1, 2)
    call: Call = {"x": x if point.by_channel else x.contiguous()}
    call["weight"] = torch.randn(point.D, point.W).to(point.weight or point.dtype)
    if point.biased:
        call |= {"bias": torch.randn(point.D).to(point.weight or point.dtype), "activation": "silu"}
        call["residual"] = torch.randn(batch, point.tokens, point.D).to(point.dtype)
    states = torch.randn(max(5, N + 2) if in_place else N, point.D, point.W).to(point.state or point.dtype)
    if in_place:
        call |= slots(states, N)
    elif point.from_state:
        call |= {"initial_state": states, "output_final_state": True}
    return call | ({"cu_seqlens": torch.tensor(cu_seqlens)} if cu_seqlens else {})


def draw_convolution_bwd(point: ConvolutionPoint) -> Call:
    call = draw_convolution(point, in_place=False)
    dy = call.pop("residual", None)
    call = {"dy": torch.randn_like(call["x"]) if dy is None else dy} | call
    if call.pop("output_final_state", False):
        call["dfinal_state"] = torch.randn_like(call["initial_state"])
    return call


def wrong_convolution_bwd(entry: OpEntry[ConvolutionPoint]) -> Iterator[Invalid]:
    state, runs = "initial_state", torch.zeros(2, 20, dtype=torch.int64)
    yield from invalid.packing()
    yield Invalid("weight", ValueError, "W of 5", change("weight", lambda w: w.new_zeros(len(w), 5)))
    for name in (state, "dfinal_state"):
        yield Invalid(name, ValueError, "two columns", change(name, lambda s: s[..., :2]))
    yield Invalid("seq_idx", ValueError, "with a state", put("seq_idx", runs))


def drafted_columns(changes: Call, columns: int = 4 - 2 + 20) -> Change:
    """Gives states columns for 20 drafts, counts of accepted ones, and makes the changes."""

    def change_call(call: Call) -> Call:
        pool = torch.cat([call["state_pool"]] * 6, -1)[..., :columns]
        return call | {"state_pool": pool, "num_accepted_tokens": torch.ones(2, dtype=torch.int)} | changes

    return change_call


def wrong_convolution(entry: OpEntry[ConvolutionPoint], state: str) -> Iterator[Invalid]:
    yield from invalid.packing()
    yield Invalid("weight", ValueError, "W of 1", change("weight", lambda w: w[:, :1]))
    yield Invalid("weight", ValueError, "W of 5", change("weight", lambda w: w.new_zeros(len(w), 5)))
    yield Invalid(state, ValueError, "two columns", change(state, lambda s: s[..., :2]))
    if state == "state_pool":
        yield from [*invalid.slots(), *invalid.checkpoints(1), *invalid.accepted(drafted_columns)]
        yield Invalid(state, ValueError, "a column too few", drafted_columns({}, columns=4 - 2 + 19))
        both = {"checkpoint_offsets": torch.tensor([1, 1]), "checkpoint_indices": torch.tensor([0, 4])}
        yield Invalid("checkpoint_offsets", ValueError, "with accepted tokens", drafted_columns(both))
        return
    runs, without = torch.zeros(2, 20, dtype=torch.int64), {"initial_state": None, "output_final_state": False}
    yield Invalid(state, ValueError, "one for three", change(state, lambda s: s[:1]), packed=True)
    yield Invalid("state_width", ValueError, "not that of the state", put("state_width", 3))
    yield Invalid("state_width", ValueError, "two columns", lambda call: call | without | {"state_width": 2})
    yield Invalid("seq_idx", TypeError, "floats", lambda call: call | without | {"seq_idx": runs.float()})
    yield Invalid("seq_idx", ValueError, "too short", lambda call: call | without | {"seq_idx": runs[:, 1:]})


CONVOLUTIONS = ((BF16, 72, 4, 150), (F32, 33, 3, 40), (F16, 64, 2, 2))


def mixed_convolutions(dtypes: tuple[torch.dtype, torch.dtype, torch.dtype], W: int) -> Iterator[ConvolutionPoint]:
    """Yields few tokens and more, 8 channels and 6 (no multiple of 4), and tokens in columns."""
    x, weight, state = dtypes
    point = ConvolutionPoint(x, weight=weight, state=state, W=W, batch=1, biased=False)
    for D, tokens in itertools.product((8, 6), (2, 17)):
        yield replace(point, D=D, tokens=tokens)
    yield replace(point, D=8, tokens=17, by_channel=True)


def compiled_convolutions() -> Iterator[ConvolutionPoint]:
    for dtype in DTYPES:
        yield from mixed_convolutions((dtype, dtype, dtype), 4)


def draw_copy(point: Point) -> Call:
    """Draws a range that overlaps its copy, a separate one, and an empty one."""
    offsets = {"source_offsets": torch.tensor([20, 40, 3]), "destination_offsets": torch.tensor([10, 60, 9])}
    return {"pool": torch.arange(80, dtype=torch.uint8)} | offsets | {"sizes": torch.tensor([16, 20, 0])}


def draw_array(point: Point) -> Call:
    return {"dst": torch.zeros(5, 3, dtype=torch.int32), "src": torch.arange(15, dtype=torch.int32).view(5, 3)}


def wrong_array(entry: OpEntry[Point]) -> Iterator[Invalid]:
    yield Invalid("dst", ValueError, "strides", change("dst", lambda x: x.view(3, 5).mT))


register(
    OpEntry(
        "causal_conv1d",
        draw=partial(draw_convolution, in_place=False),
        small=ConvolutionPoint(),
        points=[
            ConvolutionPoint(dtype, D=D, W=W, tokens=T, by_channel=by_channel, state=F32)
            for (dtype, D, W, T), by_channel in itertools.product(CONVOLUTIONS, (False, True))
        ]
        + [ConvolutionPoint(packed=True)],
        quick=[ConvolutionPoint(BF16, D=72, tokens=150, by_channel=each) for each in (False, True)],
        compiled=compiled_convolutions,
        heads={"final_state": 1},
        operations=lambda call: 2 * call["x"].numel() * call["weight"].shape[1],
        exponentials=1,
        launches=2,
        takes={"weight": "1-", "initial_state": "float 2-"},
        invalid=partial(wrong_convolution, state="initial_state"),
        hostile=[Hostile("cu_seqlens", each, packed=True) for each in BOUNDARIES],
    ),
    OpEntry(
        "causal_conv1d_bwd",
        draw=draw_convolution_bwd,
        small=ConvolutionPoint(),
        points=[ConvolutionPoint(dtype, D=D, W=W, tokens=T, state=F32) for dtype, D, W, T in CONVOLUTIONS]
        + [ConvolutionPoint(packed=True), ConvolutionPoint(D=8, tokens=300, by_channel=True, from_state=False)],
        compiled=compiled_convolutions,
        heads={"dweight": None, "dinitial_state": None},
        operations=lambda call: 6 * call["x"].numel() * call["weight"].shape[1],
        exponentials=2,
        bound=lambda point, call, exact: sum_bounds(
            call, dweight="weight", dbias="bias", dinitial_state="initial_state"
        ),
        scratch=True,
        launches=4,
        takes={"weight": "1-"},
        invalid=wrong_convolution_bwd,
        hostile=[Hostile("cu_seqlens", each, packed=True) for each in BOUNDARIES],
    ),
    OpEntry(
        "causal_conv1d_update_",
        draw=partial(draw_convolution, in_place=True),
        exact=lambda call: reference.causal_conv1d_update_(**accepted_by(reference.causal_conv1d_update_, call)),
        small=ConvolutionPoint(),
        points=[ConvolutionPoint(dtype, D=D, W=W, tokens=2, batch=3) for dtype, D, W, _ in CONVOLUTIONS]
        + [ConvolutionPoint(D=8, W=2, tokens=1, batch=40)],
        quick=[ConvolutionPoint(BF16, D=72, tokens=2, batch=40)],  # a kernel locates more slots than there are lanes
        compiled=lambda: [ConvolutionPoint(D=8, W=2, tokens=1, batch=40)],
        heads={"state_pool": 1},
        operations=lambda call: 2 * call["x"].numel() * call["weight"].shape[1],
        launches=2,
        takes={"weight": "1-", "state_pool": "float 0 2-"},
        invalid=partial(wrong_convolution, state="state_pool"),
        hostile=SLOTS,
    ),
    OpEntry(
        "copy_from_host_",
        draw=draw_array,
        small=Point(),
        points=[Point()],
        launches=None,
        invalid=wrong_array,
    ),
    OpEntry(
        "batch_copy_",
        draw=draw_copy,
        small=Point(),
        points=[Point()],
        takes={"pool": "0"},
        hostile=[
            Hostile("source_offsets", [70, LARGE, 0]),  # the pool has 80 bytes
            Hostile("destination_offsets", [-1, 60, 9]),
            Hostile("sizes", [-5, LARGE, 0]),
        ],
    ),
)


def mixed_dtypes() -> Iterator[tuple[OpEntry[Any], Point]]:
    """Yields every three dtypes, the third for the state or the gate, with the rows of the lists."""
    for x, weight, other in itertools.product(DTYPES, repeat=3):
        for W in (2, 3, 4):
            yield from ((REGISTRY["causal_conv1d"], point) for point in mixed_convolutions((x, weight, other), W))
        for aligned in (True, False):
            yield REGISTRY["qk_norm_rope"], HeadPoint(x, aligned=aligned, tokens=1, other=other, weight=weight)
        for norm, rows in (("rms_norm_gated", NORM_ROWS), ("rms_norm", HIDDEN_ROWS)):
            for D, aligned in rows:
                row = RowPoint(x, D=D, aligned=aligned, tokens=1, heads=1)
                yield REGISTRY[norm], replace(row, other=other, weight=weight)


# ---- ops of a layer --------------------------------------------------------------------------------------------------


def layer_points(sizes: tuple[int, int, int, int], dtype: torch.dtype, tokens: int, batch: int = 1) -> dict[str, Point]:
    """Yields the points at which a layer of these (H, HV, K, V) calls these ops, for a prompt and for a step."""
    H, HV, K, V = sizes
    rows = RowPoint(dtype, D=V, tokens=tokens, heads=HV, batch=batch)
    columns = ConvolutionPoint(dtype, D=2 * H * K + HV * V, tokens=tokens, batch=batch)
    result: dict[str, Point] = dict.fromkeys(("gdn_gating", "rms_norm_gated"), rows)
    return result | {"causal_conv1d": columns, "causal_conv1d_update_": replace(columns, tokens=1)}


def decoding_points(sizes: tuple[int, int, int, int], dtype: torch.dtype, batch: int = 1) -> dict[str, Point]:
    """Yields the points at which a model of such layers calls ops for one token per sequence."""
    H, HV, K, V = sizes
    result = layer_points(sizes, dtype, 1, batch)
    del result["causal_conv1d"]
    result |= dict.fromkeys(("l2norm", "rms_norm"), RowPoint(dtype, D=K, tokens=1, heads=H, batch=batch))
    rule = RulePoint(dtype, K=K, V=V, tokens=1, batch=batch, H=H, HV=HV)
    return result | dict.fromkeys((RECURRENT, RECURRENT + "_"), rule)
