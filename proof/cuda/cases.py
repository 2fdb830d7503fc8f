"""Small calls of every op, from seeds, with what is exactly computed from them: what is recorded and replayed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_gdn
from proof.cuda.record import CaseRecord, Writer
from proof.cuda.trace import Trace
from tests.helpers.aura import Codec, make_cache, there
from tests.helpers.kda import exact_kda, kda_inputs
from tests.helpers.paged import aura_pages, make_call
from torch_gdn import reference
from torch_gdn.check import golden, seeded, stages
from torch_gdn.check.calls import METAL_TYPES, Call
from torch_gdn.check.cases import END_TO_END_OPS, make_case
from torch_gdn.tune import prefill_algorithm

MPS = torch.device("mps")
Named = dict[str, Tensor]
Recorder = Callable[[Writer], CaseRecord]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """`run` calls an op on mps tensors and returns its outputs there; `exact` returns the same in float64."""

    name: str
    run: Callable[[], Named]
    exact: Callable[[], Named]


def record(case: Case, writer: Writer) -> CaseRecord:
    trace = Trace(case.name, writer)
    outputs = trace.call(case.run)
    trace.add_outputs(outputs, case.exact())
    writer.add(trace.case)
    return trace.case


def named(results: Any, *names: str) -> Named:
    outputs = results if isinstance(results, (tuple, list)) else (results,)
    return {name: x for name, x in zip(names, outputs, strict=False) if x is not None and x.numel()}


def doubled(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def case_of(name: str, op: str, call: dict[str, Any], *outputs: str, exact: dict[str, Any] | None = None) -> Case:
    """An op that has a reference of its name; `exact`: arguments for it instead of the call's."""

    def run() -> Named:
        return named(getattr(torch_gdn, op)(**there(call, MPS)), *outputs)

    def exactly() -> Named:
        arguments = {key: doubled(value) for key, value in (exact or call).items()}
        return named(getattr(reference, op)(**arguments), *outputs)

    return Case(f"{op} {name}".strip(), run, exactly)


# ---- the delta rule --------------------------------------------------------------------------------------------------


def rule_case(op: str, wanted: Call, tokens: int, algorithm: str | None = None, **changes: Any) -> Case:
    def build() -> tuple[Any, dict[str, Any]]:
        case, options = seeded.inputs(op, wanted, tokens)
        return (make_case(tokens, wanted.K, wanted.V, dtype=wanted.dtype, **changes) if changes else case), options

    def run() -> Named:
        case, options = build()
        case = case.to(MPS)
        if not wanted.aligned:
            case = replace(case, q=seeded.unaligned(case.q), k=seeded.unaligned(case.k), v=seeded.unaligned(case.v))
        if op == seeded.CHUNK:
            options |= {"chunk_size": wanted.chunk_size}
        options = {name: x.to(MPS) if isinstance(x, Tensor) else x for name, x in options.items()}
        with prefill_algorithm(algorithm, wanted.fused_chunk_size if algorithm == "fused_chunk" else 0):
            if wanted.pool != F32:
                pool = case.initial_state
                assert pool is not None
                return {"o": seeded.IN_PLACE[op](*case.qkv, case.g, case.beta, pool, **options), "pool": pool}
            boundaries = None if case.cu_seqlens is None else case.cu_seqlens.to(MPS)
            return named(
                END_TO_END_OPS[op](*case.qkv, **(case.options | options | {"cu_seqlens": boundaries})),
                "o",
                "state",
            )

    def exact() -> Named:
        case, options = build()
        return named(case.exact(**options), "o", "pool" if wanted.pool != F32 else "state")

    kind = " packed" if "cu_seqlens" in changes else " repeated keys" if "same_keys" in changes else ""
    return Case(f"{algorithm or 'recurrent'} {wanted.name} T {tokens}{kind}", run, exact)


def rules() -> Iterator[Case]:
    for dtype, (K, V) in itertools.product((BF16, F32, F16), ((128, 128), (33, 65))):
        for v_first in (False, True):
            call = Call(dtype, K, V, state_v_first=v_first, normalise=dtype != F32)
            yield rule_case(seeded.RECURRENT, call, 1 if K == 33 else 19)
            yield rule_case(seeded.RECURRENT, replace(call, channels=True), 6)
        for algorithm in ("chunked", "fused_chunk"):
            yield rule_case(seeded.CHUNK, Call(dtype, K, V, state_v_first=K == 33), 75, algorithm)
    for dtype, (K, V) in ((BF16, (96, 192)), (F32, (256, 40)), (F16, (64, 64)), (BF16, (60, 100))):
        for v_first in (False, True):
            yield rule_case(seeded.RECURRENT, Call(dtype, K, V, state_v_first=v_first), 9)
        yield rule_case(seeded.CHUNK, Call(dtype, K, V, chunk_size=32, state_v_first=True), 75, "chunked")
        yield rule_case(seeded.CHUNK, Call(dtype, K, V), 40, "fused_chunk")
    for size in (8, 16, 32):
        yield rule_case(seeded.CHUNK, Call(BF16, 128, 128, fused_chunk_size=size, normalise=True), 75, "fused_chunk")
    yield rule_case(seeded.CHUNK, Call(BF16, 128, 128, aligned=False, normalise=True), 75, "chunked")
    yield rule_case(seeded.CHUNK, Call(BF16, 128, 128, chunk_size=16, aligned=False), 40, "fused_chunk")
    yield rule_case(seeded.RECURRENT, Call(BF16, 128, 128, aligned=False), 9)
    for pool in (BF16, F16):
        for v_first in (False, True):
            call = Call(BF16, 128, 128, state_v_first=v_first, pool=pool, normalise=True)
            yield rule_case(seeded.RECURRENT, call, 5)
            yield rule_case(seeded.CHUNK, call, 40, "fused_chunk")
    for algorithm in ("chunked", "fused_chunk", "recurrent"):
        changes = {"cu_seqlens": [0, 17, 17, 20, 84], "H": 2, "HV": 4}
        yield rule_case(seeded.CHUNK, Call(BF16, 64, 64), 84, algorithm, **changes)
        yield rule_case(seeded.CHUNK, Call(BF16, 64, 64), 75, algorithm, same_keys=True, beta=1.9)
        many = [0, *range(2, 2 * 40, 2), 90]  # more sequences than lanes
        yield rule_case(seeded.CHUNK, Call(F32, 64, 32, chunk_size=16), 90, algorithm, cu_seqlens=many)


def on_golden_inputs() -> Iterator[Case]:
    """FLA's recorded inputs."""
    for name in golden.index():
        for op in golden.ops_of(name):
            if op == seeded.CHUNK:
                yield from (golden_case(name, op, each) for each in ("chunked", "fused_chunk"))
            elif op == seeded.RECURRENT:
                yield golden_case(name, op)


def golden_case(name: str, op: str, algorithm: str | None = None) -> Case:
    def run() -> Named:
        case = golden.load(name).case.to(MPS)
        boundaries = None if case.cu_seqlens is None else case.cu_seqlens.to(MPS)
        with prefill_algorithm(algorithm):
            return named(END_TO_END_OPS[op](*case.qkv, **(case.options | {"cu_seqlens": boundaries})), "o", "state")

    return Case(f"golden {algorithm or 'recurrent'} {name}", run, lambda: named(golden.load(name).exact, "o", "state"))


def stage_case(op: str, dtype: torch.dtype, K: int, V: int, chunk_size: int, packed: bool) -> Case:
    case = make_case(75, K, V, dtype=dtype, H=1, HV=2, cu_seqlens=[0, 0, 21, 75] if packed else None)
    tensors = {n: x for n, x in (asdict(case) | asdict(stages.stages_of(case, chunk_size))).items() if x is not None}
    sized = {} if op in ("solve_tril", "recompute_w_u") else {"chunk_size": chunk_size}

    def run() -> Named:
        x = {name: tensor.to(MPS) for name, tensor in tensors.items()}
        indices = x.get("chunk_indices") if op != "chunk_local_cumsum" else None
        options = {"cu_seqlens": x.get("cu_seqlens")} | sized
        return stages.on_inputs(
            torch_gdn, op, x, **(options if indices is None else options | {"chunk_indices": indices})
        )

    def exact() -> Named:
        x = {name: doubled(tensor) for name, tensor in tensors.items()}
        rows = {"chunk_indices": x.get("chunk_indices")} if op == "chunk_fwd_h" else {}
        return stages.on_inputs(reference, op, x, cu_seqlens=x.get("cu_seqlens"), **sized, **rows)

    return Case(f"{op} {METAL_TYPES[dtype]} {K} {V} {chunk_size}{' packed' if packed else ''}", run, exact)


def all_stages() -> Iterator[Case]:
    for dtype, K, V, C in ((BF16, 128, 128, 64), (F32, 33, 65, 16), (F16, 96, 192, 32), (F32, 128, 128, 64)):
        for op in stages.INPUTS:
            yield stage_case(op, dtype, K, V, C, packed=C == 16)


# ---- Kimi Delta Attention --------------------------------------------------------------------------------------------


def kda_case(wanted: Call, tokens: int, **options: Any) -> Case:
    """A prefill in fused chunks; of another dtype than float32 the states are a pool."""
    boundaries = options.get("cu_seqlens")
    sequences = 1 if boundaries is None else len(boundaries) - 1
    inputs = kda_inputs(tokens, wanted.K, wanted.V, dtype=wanted.dtype, N=sequences)
    inputs["initial_state"] = inputs["initial_state"].to(wanted.pool)
    if wanted.state_v_first:
        inputs["initial_state"] = inputs["initial_state"].transpose(-1, -2).contiguous()
    options |= {"state_v_first": wanted.state_v_first, "use_qk_l2norm_in_kernel": wanted.normalise}

    def run() -> Named:
        call = there(inputs | options, MPS)
        if not wanted.aligned:
            call |= {name: seeded.unaligned(call[name]) for name in ("q", "k", "v")}
        with prefill_algorithm("fused_chunk", wanted.fused_chunk_size):
            if wanted.pool != F32:
                pool = call["state_pool"] = call.pop("initial_state")
                return {"o": torch_gdn.chunk_kda_(**call), "pool": pool}
            return named(torch_gdn.chunk_kda(**call, output_final_state=True), "o", "state")

    def exact() -> Named:
        return named(exact_kda(inputs, **options), "o", "state" if wanted.pool == F32 else "pool")

    return Case(f"chunk_kda {wanted.name} T {tokens}{' packed' if sequences > 1 else ''}", run, exact)


def kda() -> Iterator[Case]:
    """The kernel of its own; the recurrent op runs the delta rule's, with channels."""
    for dtype, (K, V) in itertools.product((BF16, F32, F16), ((128, 128), (33, 65))):
        yield kda_case(Call(dtype, K, V, state_v_first=K == 33, normalise=dtype == BF16), 75)
    yield kda_case(Call(BF16, 256, 256), 35)
    yield kda_case(Call(F32, 64, 64, normalise=True), 84, cu_seqlens=torch.tensor([0, 17, 17, 20, 84]))
    yield kda_case(Call(BF16, 128, 128, fused_chunk_size=16), 40)
    yield kda_case(Call(BF16, 128, 128, aligned=False), 40)
    for pool, v_first in itertools.product((BF16, F16), (False, True)):
        yield kda_case(Call(BF16, 128, 128, state_v_first=v_first, pool=pool), 40)


# ---- layers ----------------------------------------------------------------------------------------------------------


def layers() -> Iterator[Case]:
    random = torch.Generator().manual_seed(3)

    def draw(*sizes: int, dtype: torch.dtype = F32) -> Tensor:
        return torch.randn(*sizes, generator=random).to(dtype)

    for dtype, D in ((BF16, 128), (F32, 33), (F16, 1024)):
        yield case_of(f"{METAL_TYPES[dtype]} {D}", "l2norm", {"x": draw(5, 3, D, dtype=dtype)}, "y")
        rows = {"x": draw(2, 5, 3, D, dtype=dtype), "g": draw(2, 5, 3, D, dtype=dtype), "weight": draw(D)}
        yield case_of(f"{METAL_TYPES[dtype]} {D}", "rms_norm_gated", rows, "y")
        summed = {"x": rows["x"], "weight": rows["weight"], "residual": rows["g"]}
        yield case_of(f"{METAL_TYPES[dtype]} {D}", "rms_norm", summed | {"prenorm": True}, "y", "sum", exact=summed)
    gates = {"A_log": draw(6), "a": draw(2, 70, 6), "b": draw(2, 70, 6), "dt_bias": draw(6)}
    yield case_of("", "gdn_gating", gates, "g", "beta")
    for dtype, D, W, T in ((BF16, 72, 4, 150), (F32, 33, 3, 40), (F16, 64, 2, 2)):
        call: dict[str, Any] = {
            "x": draw(2, T, D, dtype=dtype),
            "weight": draw(D, W, dtype=dtype),
            "bias": draw(D, dtype=dtype),
        }
        call |= {"initial_state": draw(2, D, W), "output_final_state": True, "activation": "silu"}
        yield case_of(f"{METAL_TYPES[dtype]} {D} {W} T {T}", "causal_conv1d", call, "y", "state")
        by_channel = call | {"x": draw(2, D, T, dtype=dtype).transpose(1, 2)}
        yield case_of(f"{METAL_TYPES[dtype]} {D} {W} T {T} by channel", "causal_conv1d", by_channel, "y", "state")
        yield written_case(
            f"causal_conv1d_update_ {METAL_TYPES[dtype]} {D} {W}",
            "causal_conv1d_update_",
            {
                "x": draw(3, 2, D, dtype=dtype),
                "weight": call["weight"],
                "state_pool": draw(5, D, W, dtype=dtype),
                "state_indices": torch.tensor([4, 1, 2]),
            },
            "state_pool",
        )
    many = {"x": draw(40, 1, 8), "weight": draw(8, 2), "state_pool": draw(50, 8, 2), "state_indices": torch.arange(40)}
    yield written_case("causal_conv1d_update_ of 40 slots", "causal_conv1d_update_", many, "state_pool")
    copied = {"pool": torch.arange(80, dtype=torch.uint8), "source_offsets": torch.tensor([20, 40, 3])}
    copied |= {"destination_offsets": torch.tensor([10, 60, 9]), "sizes": torch.tensor([16, 20, 0])}
    yield written_case("batch_copy_", "batch_copy_", copied, "pool")


def written_case(name: str, op: str, call: dict[str, Any], *written: str, returns: str = "y") -> Case:
    """Arguments that the op writes are outputs too."""

    def run() -> Named:
        moved = there(
            {k: x.clone() if isinstance(x, Tensor) and x.is_contiguous() else x for k, x in call.items()}, MPS
        )
        result = getattr(torch_gdn, op)(**moved)
        return ({} if result is None else {returns: result}) | {each: moved[each] for each in written}

    def exact() -> Named:
        copied = {k: doubled(x).clone() if isinstance(x, Tensor) else x for k, x in call.items()}
        result = getattr(reference, op)(**copied)
        return ({} if result is None else {returns: result}) | {each: copied[each] for each in written}

    return Case(name, run, exact)


# ---- AURA and attention to pages -------------------------------------------------------------------------------------


def aura() -> Iterator[Case]:
    torch.manual_seed(7)
    for bits, D, dtype in (
        ((4, 4), 128, BF16),
        ((8, 4), 64, F32),
        ((3, 2), 80, F16),
        ((3, 3), 96, BF16),
        ((2, 2), 512, F32),
    ):
        name = f"{bits[0]}v{bits[1]} {D} {METAL_TYPES[dtype]}"
        codec, value = Codec(D, bits[0]), Codec(D, bits[1], 4)
        tables = {"signs": codec.signs, "boundaries": codec.boundaries, "codebook": codec.codebook}
        x = torch.randn(1, 2, 13, D).to(dtype)
        yield case_of(name, "aura_encode", {"x": x, **tables, "with_means": True}, "codes", "norms", "means")
        codes, norms, means = reference.aura_encode(x.float(), *codec.tables, with_means=True)
        for rotated in (False, True):
            coded: dict[str, Any] = {"codes": codes, "norms": norms, "codebook": codec.codebook, "signs": codec.signs}
            coded |= {"means": means, "rotated": rotated}
            yield case_of(
                f"{name}{' rotated' if rotated else ''}",
                "aura_decode",
                coded | {"dtype": dtype},
                "x",
                exact=coded | {"dtype": torch.float64},
            )
        yield case_of(name, "aura_rotate", {"x": x, "signs": codec.signs, "inverse": True}, "y")
        for ratio, L in ((1, 1), (2, 1), (4, 1), (7, 1), (4, 9)):
            cache = make_cache(codec, value, 1, 2, 203, ratio == 7)
            call: dict[str, Any] = (
                {"q": torch.randn(1, 2 * ratio, L, D).to(dtype)} | cache.parts(True) | cache.means(ratio == 7)
            )
            call |= {"sinks": torch.randn(2 * ratio), "window": 150, "block_size": 64} if ratio == 7 else {}
            call |= {"starts": torch.tensor([11])} if L == 9 else {}
            yield case_of(f"{name} {ratio}x{L}", "aura_attention", call, "o", exact=call | {"q": call["q"].double()})


def attention() -> Iterator[Case]:
    torch.manual_seed(9)
    for dtype, cache_dtype, D, size in (
        (BF16, BF16, 128, 16),
        (F32, F16, 64, 7),
        (F16, F32, 96, 48),
        (BF16, F16, 256, 16),
    ):
        name = f"{METAL_TYPES[dtype]} {METAL_TYPES[cache_dtype]} {D}"
        for queries, keys in (([1, 1, 1], [1, 40, 129]), ([1, 0, 35, 2], [70, 5, 35, 50]), ([1], [1030])):
            call = make_call(queries, keys, D=D, block_size=size, dtype=dtype, cache_dtype=cache_dtype, padding=0)
            call["out"] = None
            exact = {
                k: x.nan_to_num(0.0) if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in call.items()
            }
            yield case_of(f"{name} {queries} {keys}", "paged_attention", call, "o", exact=exact)
            if cache_dtype == dtype:
                yield coded_case(f"{name} {queries} {keys}", call)
        slots = torch.tensor([3, 40, -1, 17], dtype=torch.int32)
        moved = {"key": torch.randn(4, 2, D).to(dtype), "value": torch.randn(4, 2, D).to(dtype), "slot_mapping": slots}
        moved |= {each: torch.zeros(8, size, 2, D, dtype=cache_dtype) for each in ("key_cache", "value_cache")}
        yield written_case(f"reshape_and_cache {name}", "reshape_and_cache", moved, "key_cache", "value_cache")


def coded_case(name: str, call: dict[str, Any]) -> Case:
    D = call["q"].shape[-1]
    codes: dict[str, Any] = {key: x for key, x in call.items() if not key.endswith("_cache")}
    plain = dict(call)
    for which, bits, seed in (("key", 8, 3), ("value", 4, 4)):
        codec = Codec(D, bits, seed)
        pages, plain[f"{which}_cache"] = aura_pages(codec, call[f"{which}_cache"])
        codes |= {f"{which}_codes": pages[0], f"{which}_norms": pages[1]}
        codes |= {f"{which}_codebook": codec.codebook, f"{which}_signs": codec.signs}

    def run() -> Named:
        return {"o": torch_gdn.aura_paged_attention(**there(codes, MPS))}

    def exact() -> Named:
        return {"o": reference.paged_attention(**{k: doubled(x) for k, x in plain.items()})}

    return Case(f"aura_paged_attention {name}", run, exact)


def all_cases() -> list[Case]:
    return [*rules(), *on_golden_inputs(), *all_stages(), *kda(), *layers(), *aura(), *attention()]


# ---- to be timed: launches alone, of buffers that hold nothing -------------------------------------------------------


def timed() -> Iterator[tuple[str, Recorder]]:
    for batch, v_first in itertools.product((1, 8, 64), (False, True)):
        name = f"decode {'[V, K]' if v_first else '[K, V]'} B {batch}"
        yield name, partial(timed_decode, name, batch, v_first)
    name = "AURA attention 4v4, 32768 keys"
    yield name, partial(timed_attention, name, 32768)


def timed_decode(name: str, batch: int, v_first: bool, writer: Writer) -> CaseRecord:
    """Qwen3-Next's heads."""
    H, HV, K, V = 16, 32, 128, 128
    q, v = torch.empty(batch, 1, H, K, dtype=BF16, device=MPS), torch.empty(batch, 1, HV, V, dtype=BF16, device=MPS)
    g, pool = torch.empty(batch, 1, HV, device=MPS), torch.empty(batch, HV, K, V, device=MPS)
    k, beta = torch.empty_like(q), torch.empty_like(g)
    trace = Trace(name, writer, runs=False, keeps=False)
    trace.call(lambda: torch_gdn.fused_recurrent_gated_delta_rule_(q, k, v, g, beta, pool, state_v_first=v_first))
    trace.case.floor_bytes = 2 * pool.nbytes + 2 * q.nbytes + 2 * v.nbytes + 2 * g.nbytes
    writer.add(trace.case)
    return trace.case


def timed_attention(name: str, keys: int, writer: Writer) -> CaseRecord:
    """32 query heads to 8 KV heads of 128, 4 bits each."""
    HQ, HK, D, bits = 32, 8, 128, 4
    q, signs, codebook = (
        torch.empty(1, HQ, 1, D, dtype=BF16, device=MPS),
        *(torch.empty(n, device=MPS) for n in (D, 16)),
    )
    codes = [torch.empty(1, HK, keys, D * bits // 32, dtype=torch.int32, device=MPS) for _ in range(2)]
    norms = [torch.empty(1, HK, keys, device=MPS) for _ in range(2)]
    trace = Trace(name, writer, runs=False, keeps=False)
    cache: dict[str, Any] = {f"{which}_codes": x for which, x in zip(("key", "value"), codes, strict=True)}
    cache |= {f"{which}_norms": x for which, x in zip(("key", "value"), norms, strict=True)}
    cache |= {f"{which}_codebook": codebook for which in ("key", "value")}
    cache |= {f"{which}_signs": signs for which in ("key", "value")}
    trace.call(lambda: torch_gdn.aura_attention(q, **cache))
    trace.case.floor_bytes = 2 * codes[0].nbytes + 2 * norms[0].nbytes + 2 * q.nbytes
    writer.add(trace.case)
    return trace.case
