"""Entries of the gated delta rule, its stages, and Kimi Delta Attention, which has decays per channel."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torch_gdn import _C, prepare_chunk_indices, reference
from torch_gdn.reference.common import sequences
from torch_gdn.tools.prefill import prefill_algorithm
from torch_gdn_check.registry import bounds, invalid, stages
from torch_gdn_check.registry.cases import Case, bounds_of, channels_of, make_case
from torch_gdn_check.registry.drawing import seed_of_draw
from torch_gdn_check.registry.inputs import Call, boundaries_of, slots, unaligned
from torch_gdn_check.registry.invalid import change, put
from torch_gdn_check.registry.models import BF16, DTYPES, F16, F32, MODEL_SIZES, OTHER_SIZES
from torch_gdn_check.registry.registry import REGISTRY, Hostile, Invalid, Named, OpEntry, Point, accepted_by, register

ALGORITHMS = tuple(_C.prefill_algorithms())
CHUNKED = tuple(name for name in ALGORITHMS if name != "recurrent")


@dataclass(frozen=True)
class RulePoint(Point):
    K: int = 128
    V: int = 128
    chunk_size: int = 64
    aligned: bool = True  # every row of q, k and v starts at a multiple of 4 elements
    state_v_first: bool = False
    normalise: bool = False  # use_qk_l2norm_in_kernel
    channels: bool = False  # pass gk, gv and a beta with V columns; recurrent ops only
    pool: torch.dtype = F32  # dtype of the states; any other than float32 calls the in-place op
    fused_chunk_size: int = 0  # chunk size of fused_chunk: 8, 16 or 32; 0 chooses by K
    tokens: int = 75
    batch: int = 1
    H: int = 1
    HV: int = 2
    boundaries: tuple[int, ...] = ()  # cu_seqlens of packed sequences
    repeated_keys: bool = False  # one key for all tokens, with beta up to 1.9
    from_state: bool = True  # pass an initial state; its strides then give the layout
    gated: bool = False  # use every option that takes a tensor

    @property
    def cu_seqlens(self) -> list[int] | None:
        return boundaries_of(self.tokens, self.packed, self.boundaries)

    def context(self) -> AbstractContextManager[None]:
        return prefill_algorithm(self.algorithm, self.fused_chunk_size if self.algorithm == "fused_chunk" else 0)

    def case(self) -> Case:
        case = make_case(
            self.tokens,
            self.K,
            self.V,
            B=1 if self.cu_seqlens else self.batch,
            H=self.H,
            HV=self.HV,
            dtype=self.dtype,
            cu_seqlens=self.cu_seqlens,
            beta=1.9 if self.repeated_keys else None,
            same_keys=self.repeated_keys,
            normal=not self.normalise,
            seed=seed_of_draw(),
        )
        return case if self.aligned else replace(case, q=unaligned(case.q), k=unaligned(case.k), v=unaligned(case.v))


SMALL = RulePoint(K=64, V=32, chunk_size=16, tokens=20, batch=2, H=2, HV=4)


# ---- end to end ------------------------------------------------------------------------------------------------------


def draw_rule(point: RulePoint, chunked: bool, in_place: bool, per_channel: bool) -> Call:
    case = point.case()
    state = case.initial_state
    assert state is not None
    call: Call = {"q": case.q, "k": case.k, "v": case.v, "g": case.g, "beta": case.beta}
    if per_channel:  # heads remember some tokens
        call["g"] = logsigmoid(torch.randn(*case.g.shape, point.K) + 2)
    if chunked:
        call["chunk_size"] = point.chunk_size
    elif point.channels or point.gated:
        call |= {} if per_channel else channels_of(case)
        call["beta"] = torch.randn(case.v.shape).sigmoid()
    if in_place:
        call |= slots(torch.randn(max(5, len(state) + 2), *state.shape[1:]), len(state))
    else:
        call |= {"initial_state": state, "output_final_state": True}
    if point.state_v_first:
        name = "state_pool" if in_place else "initial_state"
        call |= {name: call[name].transpose(-1, -2).contiguous(), "state_v_first": True}
    if not point.from_state:
        del call["initial_state"]
    if in_place:
        call["state_pool"] = call["state_pool"].to(point.pool)
    if case.cu_seqlens is not None:
        call["cu_seqlens"] = case.cu_seqlens
        if chunked and not per_channel:
            call["chunk_indices"] = prepare_chunk_indices(case.cu_seqlens, point.chunk_size)
    if point.gated:
        call |= {"use_gate_in_kernel": True, "A_log": torch.randn(point.HV)}
        call["dt_bias"] = torch.randn(point.HV * (point.K if per_channel else 1))
        call |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    if point.normalise or point.gated:
        call["use_qk_l2norm_in_kernel"] = True
    return call


def slots_of(call: Call) -> Tensor:
    """Returns the slot of each sequence. By default the first sequence has the first slot, and so on."""
    count = len(call["v"]) if call.get("cu_seqlens") is None else len(call["cu_seqlens"]) - 1
    given: Tensor | None = call.get("state_indices")
    return torch.arange(count) if given is None else given


def with_states(call: Call) -> Call:
    """Turns an in-place call into one with the initial states of its sequences instead of a pool."""
    result = {name: x for name, x in call.items() if name not in ("state_pool", "state_indices", "has_initial_state")}
    states = call["state_pool"][slots_of(call).clamp(min=0)]
    if call.get("has_initial_state") is not None:
        states[~call["has_initial_state"]] = 0
    return result | {"initial_state": states, "output_final_state": True}


def exact_rule(call: Call, rule: Callable[..., Any]) -> Any:
    """Computes the rule token by token, whatever the algorithm."""
    if "state_pool" not in call:
        return rule(**accepted_by(rule, call))
    batch, tokens = call["v"].shape[:2]
    o, states = rule(**accepted_by(rule, with_states(call)))
    for n, b, first, last, _ in sequences(batch, tokens, call.get("cu_seqlens")):
        slot = int(slots_of(call)[n])
        if slot < 0:
            o[b, first:last] = 0
        else:
            call["state_pool"][slot] = states[n]
    return o


def rule_bounds(point: RulePoint, call: Call, exact: Named, op: str) -> dict[str, float]:
    options = call if "state_pool" not in call else with_states(call)
    parts = {name: options.get(name) for name in ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")}
    case = Case(**parts)  # type: ignore[arg-type]
    options = {name: x for name, x in options.items() if name not in parts}
    options = accepted_by(reference.fused_recurrent_gated_delta_rule, options)
    exact_case = case.exact(**options)
    o, state = bounds_of(op, case, exact_case, **options)
    if op == "chunk_gated_delta_rule" and options.get("use_qk_l2norm_in_kernel"):
        costs = cost_of_rounded_norms(case, exact_case, options)  # independent of the other errors
        o, state = math.hypot(o, costs[0]), math.hypot(state, costs[1])
    return {"o": o, "final_state": state, "state_pool": state}


def cost_of_rounded_norms(case: Case, exact: tuple[Tensor, Tensor], options: dict[str, Any]) -> tuple[float, float]:
    """Returns the error of rounding normalised q and k to their dtype, as FLA does before it chunks; 0 in float32."""
    q, k = (reference.l2norm(x.double()).to(x.dtype) for x in (case.q, case.k))
    o, state = replace(case, q=q, k=k).exact(**(options | {"use_qk_l2norm_in_kernel": False}))
    return bounds.relative_error(o, exact[0]), bounds.relative_error(state, exact[1])


def kda_bounds(point: RulePoint, call: Call, exact: Named) -> dict[str, float]:
    """Returns bounds. Stages of the chunked algorithm pass results on in q's dtype; the other kernels keep float32."""
    if point.algorithm == "chunked" and point.dtype != F32:
        o, state = bounds.CHUNK_OUTPUT[point.dtype], bounds.CHUNK_STATE[point.dtype]
    else:
        o, state = max(bounds.KDA_F32, bounds.RECURRENT_OUTPUT.get(point.dtype, 0)), bounds.KDA_F32
    return {"o": o, "final_state": state, "state_pool": state}


GATE: Call = {"use_gate_in_kernel": True, "A_log": torch.zeros(4)}
Row = tuple[str, type[Exception], str, Call]
WRONG_OPTIONS: tuple[Row, ...] = (
    ("A_log", ValueError, "none for the gate", {"use_gate_in_kernel": True}),
    ("A_log", ValueError, "one for four heads", GATE | {"A_log": torch.zeros(1)}),
    ("A_log", TypeError, "integers", GATE | {"A_log": torch.zeros(4, dtype=torch.int64)}),
    ("dt_bias", ValueError, "three for four heads", GATE | {"dt_bias": torch.zeros(3)}),
    ("dt_bias", TypeError, "integers", GATE | {"dt_bias": torch.zeros(4, dtype=torch.int64)}),
    ("allow_neg_eigval", ValueError, "without the sigmoid", {"allow_neg_eigval": True}),
    ("output_dtype", ValueError, "float16 for float32", {"output_dtype": F16}),
)
WRONG_OF_KDA: tuple[Row, ...] = (
    ("dt_bias", ValueError, "one for each head", GATE | {"dt_bias": torch.zeros(4)}),
    ("lower_bound", ValueError, "zero", GATE | {"lower_bound": 0.0}),
    ("lower_bound", ValueError, "nan", GATE | {"lower_bound": torch.nan}),
)
WRONG_CHANNELS: tuple[Row, ...] = (
    ("g", ValueError, "none for the gate", GATE | {"g": None}),
    ("beta", ValueError, "none for the sigmoid", {"use_beta_sigmoid_in_kernel": True, "beta": None}),
    ("beta", ValueError, "columns of K", {"beta": torch.zeros(2, 20, 4, 64)}),
    ("gk", ValueError, "columns of V", {"gk": torch.zeros(2, 20, 4, 32)}),
    ("gk", TypeError, "integers", {"gk": torch.zeros(2, 20, 4, 64, dtype=torch.int64)}),
    ("gv", ValueError, "a token too few", {"gv": torch.zeros(2, 19, 4, 32)}),
    ("gv", TypeError, "integers", {"gv": torch.zeros(2, 20, 4, 32, dtype=torch.int64)}),
)


def wrong_rules(entry: OpEntry[RulePoint], rows: tuple[Row, ...] = ()) -> Iterator[Invalid]:
    yield from invalid.sizes("q", "v")
    if "chunk_size" in entry.arguments:
        yield from invalid.chunk_sizes()
    yield from invalid.packing(has_indices="chunk_indices" in entry.arguments)
    for argument, error, what, options in (*WRONG_OPTIONS, *rows):
        yield Invalid(argument, error, what, invalid.options(options))
    if "initial_state" in entry.arguments:
        yield from invalid.states("initial_state")
        return
    yield from invalid.slots()
    if "checkpoint_offsets" in entry.arguments:
        yield from invalid.checkpoints(64)
    else:
        yield from [*invalid.drafts(), *invalid.accepted(invalid.drafted)]
    yield Invalid("state_pool", ValueError, "V and K swapped", put("state_v_first", True))


LARGE = 2**31 - 2
BOUNDARIES = ([0, 15, 5, 20], [0, 5, 5, LARGE], [-9, 5, 5, 20])  # for 20 tokens
SLOTS = tuple(Hostile("state_indices", indices) for indices in ([4, 5], [LARGE, 1], [3, 3]))  # for 5 slots


def outside(*algorithms: str | None) -> tuple[Hostile, ...]:
    return tuple(Hostile("cu_seqlens", each, packed=True, algorithms=algorithms or (None,)) for each in BOUNDARIES)


def layouts(
    sizes: Iterable[tuple[int, int]], dtypes: Iterable[torch.dtype], point: RulePoint = RulePoint()
) -> list[RulePoint]:
    """Yields, for each K, V and dtype, both layouts of the states, with and without the norm."""
    each = itertools.product(sizes, dtypes, (False, True), (False, True))
    return [
        replace(point, K=K, V=V, dtype=dtype, state_v_first=v_first, normalise=normalise)
        for (K, V), dtype, v_first, normalise in each
    ]


POOLS = [
    RulePoint(BF16, state_v_first=v_first, normalise=True, pool=pool, tokens=9)
    for pool, v_first in itertools.product((BF16, F16), (False, True))
]
SIZES = ((BF16, 96, 192), (F32, 256, 40), (F16, 64, 64), (BF16, 60, 100), (F32, 1, 1), (BF16, 256, 512))


def recurrent_points(in_place: bool) -> list[RulePoint]:
    if in_place:
        points = [*POOLS, *(replace(each, tokens=1) for each in POOLS), RulePoint(F32, K=33, V=65, tokens=9)]
        return [*points, RulePoint(BF16, batch=40, tokens=1, K=64, V=32)]
    points = layouts(((128, 128), (33, 65)), DTYPES, RulePoint(tokens=19))
    points += [replace(each, channels=True, tokens=6) for each in points if each.K == 128 or not each.normalise]
    points += [RulePoint(dtype, K=K, V=V, state_v_first=f, tokens=9) for dtype, K, V in SIZES for f in (False, True)]
    points += [RulePoint(F32, K=33, V=65, tokens=1), RulePoint(F32, K=256, V=40, state_v_first=True, tokens=1)]
    points += [RulePoint(BF16, aligned=False, tokens=9), replace(points[0], tokens=1), RulePoint(BF16, gated=True)]
    return [*points, RulePoint(BF16, K=64, V=64, packed=True, H=2, HV=4)]


def compiled_rules() -> Iterator[RulePoint]:
    """Yields the sizes of models, odd sizes, unaligned rows, gates of channels, and states of other dtypes."""
    yield from layouts([*MODEL_SIZES, *OTHER_SIZES], DTYPES, RulePoint(tokens=2))
    for dtype, (K, V) in itertools.product(DTYPES, MODEL_SIZES):
        yield RulePoint(dtype, K=K, V=V, aligned=False, tokens=2)
    for dtype, v_first in itertools.product(DTYPES, (False, True)):
        yield RulePoint(dtype, state_v_first=v_first, channels=True, tokens=2)


def compiled_recurrent() -> Iterator[RulePoint]:
    for point in compiled_rules():
        yield from (point, replace(point, from_state=False))
    yield from layouts([*MODEL_SIZES, *OTHER_SIZES], DTYPES, RulePoint(tokens=1))


def chunk_points(in_place: bool) -> Iterator[RulePoint]:
    if in_place:
        for algorithm in ALGORITHMS:
            yield from (replace(each, algorithm=algorithm, tokens=40) for each in POOLS)
        return
    for dtype, (K, V), algorithm in itertools.product(DTYPES, ((128, 128), (33, 65)), ALGORITHMS):
        yield RulePoint(dtype, K=K, V=V, state_v_first=K == 33, normalise=dtype == BF16, algorithm=algorithm)
    for dtype, K, V in SIZES:
        yield RulePoint(dtype, K=K, V=V, chunk_size=32, state_v_first=True, algorithm="chunked")
        yield RulePoint(dtype, K=K, V=V, tokens=40, algorithm="fused_chunk")
    for size in (8, 16, 32):
        yield RulePoint(BF16, normalise=True, fused_chunk_size=size, algorithm="fused_chunk")
    yield RulePoint(BF16, aligned=False, normalise=True, algorithm="chunked")
    yield RulePoint(BF16, chunk_size=16, aligned=False, tokens=40, algorithm="fused_chunk")
    for algorithm in ALGORITHMS:
        point = RulePoint(BF16, K=64, V=64, algorithm=algorithm)
        yield replace(point, boundaries=(0, 17, 17, 20, 84), tokens=84, H=2, HV=4)
        yield replace(point, dtype=F32, repeated_keys=True)
        yield replace(point, dtype=F32, gated=True)
        many = (0, *range(2, 2 * 40, 2), 90)  # more sequences than lanes
        yield replace(point, dtype=F32, V=32, chunk_size=16, tokens=90, boundaries=many)


def compiled_chunks() -> Iterator[RulePoint]:
    points = [*compiled_rules()]
    points += [
        RulePoint(dtype, K=K, V=V, chunk_size=C, tokens=2)
        for dtype, (K, V), C in itertools.product(DTYPES, MODEL_SIZES, (16, 32))
    ]
    yield from (replace(each, algorithm=algorithm) for each in points for algorithm in ALGORITHMS)


def compiled_kda() -> Iterator[RulePoint]:
    """Yields models' K of 128 and other sizes, chunks of all sizes, and unaligned rows."""
    for dtype, algorithm in itertools.product(DTYPES, CHUNKED):
        point = RulePoint(dtype, algorithm=algorithm, tokens=2)
        yield from (replace(point, K=K, V=V) for K, V in ((128, 128), (64, 64), (256, 256), (33, 65)))
        yield from (replace(point, chunk_size=C) for C in (16, 32))
        yield from (replace(point, aligned=False), replace(point, fused_chunk_size=16))


def compiled_pools(*algorithms: str | None) -> Iterator[RulePoint]:
    for algorithm, dtype, v_first in itertools.product(algorithms, DTYPES, (False, True)):
        for pool in (BF16, F16):
            yield RulePoint(dtype, state_v_first=v_first, normalise=True, pool=pool, algorithm=algorithm, tokens=2)


def recurrent_kda_points(in_place: bool) -> list[RulePoint]:
    if in_place:
        return [*POOLS, RulePoint(F32, K=33, V=65, tokens=9)]
    points = [
        RulePoint(dtype, K=K, V=V, tokens=9) for dtype, (K, V) in itertools.product(DTYPES, ((128, 128), (33, 65)))
    ]
    points += [RulePoint(BF16, state_v_first=True, aligned=False, tokens=9), RulePoint(F32, tokens=9, gated=True)]
    return [*points, RulePoint(BF16, K=64, V=64, packed=True, H=2, HV=4)]


def kda_points(in_place: bool) -> Iterator[RulePoint]:
    for algorithm in CHUNKED:
        if in_place:
            yield from (replace(each, normalise=False, algorithm=algorithm, tokens=40) for each in POOLS)
            continue
        for dtype, (K, V) in itertools.product(DTYPES, ((128, 128), (33, 65))):
            point = RulePoint(dtype, K=K, V=V, state_v_first=K == 33, algorithm=algorithm)
            yield replace(point, normalise=dtype == BF16 and algorithm == "fused_chunk")
        yield RulePoint(BF16, K=256, V=256, tokens=35, algorithm=algorithm)
        yield RulePoint(F32, K=64, V=64, tokens=84, boundaries=(0, 17, 17, 20, 84), algorithm=algorithm)
        yield RulePoint(BF16, aligned=False, tokens=40, algorithm=algorithm)
    if not in_place:
        yield RulePoint(BF16, fused_chunk_size=16, tokens=40, algorithm="fused_chunk")


def operations_of_rule(call: Call) -> int:
    """Counts the recurrence's operations: a state decays, is read for k, updated, and read for q."""
    B, T, HV, V = call["v"].shape
    return 7 * B * T * HV * V * int(call["k"].shape[-1])


FLOAT64_GATES = {"v": "float", "g": "float64", "beta": "float64"}  # float64 on the CPU, which rounds it


def rule_entry(name: str, in_place: bool, **fields: Any) -> OpEntry[RulePoint]:
    draw = partial(draw_rule, chunked=False, in_place=in_place, per_channel=False)
    exact = partial(exact_rule, rule=reference.fused_recurrent_gated_delta_rule)
    takes = FLOAT64_GATES | ({"state_pool": "float 0"} if in_place else {"initial_state": "float64"})
    shared: dict[str, Any] = {"draw": draw, "exact": exact, "small": SMALL, "result": "o", "takes": takes}
    shared |= {"heads": {"final_state": 1, "state_pool": 1}, "operations": operations_of_rule}
    return OpEntry(name, **(shared | fields))


RECURRENT, CHUNK = "fused_recurrent_gated_delta_rule", "chunk_gated_delta_rule"
exact_kda = partial(exact_rule, rule=reference.fused_recurrent_kda)

for in_place, suffix in ((False, ""), (True, "_")):
    quick = RulePoint(BF16, tokens=21)
    rule_pools: tuple[RulePoint, ...] = (replace(POOLS[1], algorithm="fused_chunk"),)
    register(
        rule_entry(
            RECURRENT + suffix,
            in_place,
            points=recurrent_points(in_place),
            quick=[POOLS[0], replace(POOLS[0], tokens=1)] if in_place else layouts([(128, 128)], [BF16], quick),
            compiled=partial(compiled_pools, None) if in_place else compiled_recurrent,
            bound=partial(rule_bounds, op=RECURRENT),
            invalid=partial(wrong_rules, rows=WRONG_CHANNELS),
            hostile=SLOTS if in_place else outside(),
        ),
        rule_entry(
            CHUNK + suffix,
            in_place,
            draw=partial(draw_rule, chunked=True, in_place=in_place, per_channel=False),
            points=list(chunk_points(in_place)),
            quick=rule_pools if in_place else [RulePoint(BF16, tokens=130, algorithm=each) for each in ALGORITHMS],
            compiled=partial(compiled_pools, *ALGORITHMS) if in_place else compiled_chunks,
            bound=partial(rule_bounds, op=CHUNK),
            invalid=wrong_rules,
            hostile=SLOTS if in_place else outside("fused_chunk", "chunked"),
        ),
        rule_entry(
            "fused_recurrent_kda" + suffix,
            in_place,
            draw=partial(draw_rule, chunked=False, in_place=in_place, per_channel=True),
            exact=exact_kda,
            points=recurrent_kda_points(in_place),
            bound=kda_bounds,
            invalid=partial(wrong_rules, rows=WRONG_OF_KDA),
            hostile=SLOTS if in_place else outside(),
        ),
        rule_entry(
            "chunk_kda" + suffix,
            in_place,
            draw=partial(draw_rule, chunked=True, in_place=in_place, per_channel=True),
            exact=exact_kda,
            points=list(kda_points(in_place)),
            quick=rule_pools if in_place else [RulePoint(BF16, algorithm=each) for each in CHUNKED],
            compiled=partial(compiled_pools, *CHUNKED) if in_place else compiled_kda,
            bound=kda_bounds,
            invalid=partial(wrong_rules, rows=WRONG_OF_KDA),
            hostile=SLOTS if in_place else outside("fused_chunk", "chunked"),
        ),
    )


# ---- stages ----------------------------------------------------------------------------------------------------------


def draw_stage(point: RulePoint, inputs: str, sized: bool = True) -> Call:
    """Draws a stage's call. `inputs` has 'argument' or 'argument:source', separated by spaces.

    A source is a tensor of the case or of its stages. 'd.source' draws a gradient of it.
    """
    case = point.case()
    result = stages.stages_of(case, point.chunk_size)
    known: dict[str, Any] = vars(case) | vars(result)
    call: Call = {}
    for name, source in ((each.split(":")[0], each.split(":")[-1]) for each in inputs.split()):
        call[name] = torch.randn(known[source[2:]].shape) if source.startswith("d.") else known[source]
    if sized:
        call["chunk_size"] = point.chunk_size
    if "initial_state" in call:
        call["output_final_state"] = True
    if case.cu_seqlens is not None:
        call |= {"cu_seqlens": case.cu_seqlens, "chunk_indices": result.chunk_indices}
    return call


def stage_bounds(point: RulePoint, call: Call, exact: Named) -> dict[str, float]:
    """Returns bounds. In float32 they depend on the largest cumulative gate, from the call or the result.

    A sum of 64 numbers of one sign is off by 6 roundings if it is pairwise, and by 63 if not. Forward substitution is
    off by 1e-9, unless keys repeat.
    """
    g: Tensor = exact["g_cumsum"] if "g_cumsum" in exact else call.get("g", torch.zeros(1))
    in_f32 = bounds.chunk_f32(g.abs().max().item())
    rounded = max(in_f32, bounds.STAGE_OUTPUT.get(point.dtype, 0))
    return {name: {"g_cumsum": 1e-6, "A_inv": 2e-7, "A": in_f32}.get(name, rounded) for name in exact}


def wrong_stages(entry: OpEntry[RulePoint], sizes: tuple[str, str] | None) -> Iterator[Invalid]:
    yield from invalid.packing(has_indices=True)
    yield from [] if sizes is None else invalid.sizes(*sizes)
    yield from invalid.chunk_sizes() if "chunk_size" in entry.arguments else ()
    if "A" in entry.arguments:
        yield Invalid("A", ValueError, "chunk size 20", change("A", partial(invalid.zeros, size=20)))
    if "initial_state" in entry.arguments:
        yield from invalid.states("initial_state")


def stage_points() -> Iterator[RulePoint]:
    for dtype, K, V, C in ((BF16, 128, 128, 64), (F32, 33, 65, 16), (F16, 96, 192, 32), (F32, 128, 128, 64)):
        yield RulePoint(dtype, K=K, V=V, chunk_size=C, packed=C == 16)


def compiled_stages() -> Iterator[RulePoint]:
    return plain(point for point in compiled_chunks() if point.algorithm == "chunked")


def plain(points: Iterable[RulePoint]) -> Iterator[RulePoint]:
    """Keeps one point per set of sizes: the stages know neither layouts nor the norm."""
    sized = (
        RulePoint(each.dtype, K=each.K, V=each.V, chunk_size=each.chunk_size, aligned=each.aligned, tokens=2)
        for each in points
    )
    yield from dict.fromkeys(sized)


TAKES: dict[str, dict[str, str]] = {
    "chunk_local_cumsum": {"g": "float64 0 1 2"},
    "chunk_scaled_dot_kkt": {"k": "float 2- 3-", "beta": "float64"},
    "solve_tril": {"A": "0 1 2"},
    "recompute_w_u": {"k": "2- 3-", "v": "3-", "beta": "float64"},
    "chunk_fwd_h": {"k": "2-", "initial_state": "float64"},
}


def stage_entry(
    name: str, inputs: str, result: str, sized: bool = True, sizes: tuple[str, str] | None = None, **fields: Any
) -> OpEntry[RulePoint]:
    """Makes a stage's entry. draw_stage() says what `inputs` are."""
    function = getattr(reference, name)
    shared: dict[str, Any] = {
        "draw": partial(draw_stage, inputs=inputs, sized=sized),
        "exact": lambda call: function(**accepted_by(function, call)),
        "small": SMALL,
        "points": list(stage_points()),
        "compiled": compiled_stages,
        "bound": stage_bounds,
        "heads": {"final_state": 1},
        "result": result,
        "launches": None,
        "takes": TAKES.get(name, {}),
        "invalid": partial(wrong_stages, sizes=sizes),
    }
    return OpEntry(name, **(shared | fields))


register(
    stage_entry("chunk_local_cumsum", "g", "g_cumsum"),
    stage_entry("chunk_scaled_dot_kkt", "k g:g_cumsum beta", "A"),
    stage_entry("solve_tril", "A", "A_inv", sized=False),
    stage_entry("recompute_w_u", "k v beta A:A_inv g:g_cumsum", "", False, sizes=("k", "v")),
    stage_entry("chunk_fwd_h", "k w u g:g_cumsum initial_state", "", sizes=("k", "u")),
    stage_entry("chunk_fwd_o", "q k v:v_new h g:g_cumsum", "o", sizes=("q", "v")),
)


# ---- all ops at a point ----------------------------------------------------------------------------------------------

STAGES = tuple(stages.INPUTS)


def end_to_end(point: RulePoint) -> Iterator[tuple[OpEntry[Any], Point]]:
    """Yields both ops, prefill in each algorithm. A pool not of float32 is updated in place."""
    suffix = "" if point.pool == F32 else "_"
    yield REGISTRY[RECURRENT + suffix], point
    if not suffix:
        yield REGISTRY[RECURRENT], replace(point, from_state=False)
    yield from ((REGISTRY[CHUNK + suffix], replace(point, algorithm=algorithm)) for algorithm in ALGORITHMS)


def stages_at(points: Iterable[RulePoint]) -> Iterator[tuple[OpEntry[Any], Point]]:
    yield from ((REGISTRY[op], point) for point in plain(points) for op in STAGES)


def kda_at(point: RulePoint) -> Iterator[tuple[OpEntry[Any], Point]]:
    """Yields prefill in both chunk algorithms. A pool of another dtype is updated in place."""
    entry = REGISTRY["chunk_kda" if point.pool == F32 else "chunk_kda_"]
    yield from ((entry, replace(point, algorithm=algorithm)) for algorithm in CHUNKED)
