"""Makes small calls of every op, from seeds, with their exact results. They are recorded and replayed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import torch_gdn
from evidence.lab.cuda.peers import BATCHES, decode_case, experts_case, layer_case, linear_case
from evidence.lab.cuda.peers_experts import TOKENS, D, I, K
from evidence.lab.cuda.peers_linear import GROUP, ROWS, SIZES
from evidence.lab.cuda.record import CaseRecord, Fill, Writer
from evidence.lab.cuda.trace import Trace
from torch_gdn.aura import Scheme
from torch_gdn.tools.prefill import prefill_algorithm
from torch_gdn_check import golden
from torch_gdn_check.registry.cases import END_TO_END_OPS
from torch_gdn_check.registry.gdn import CHUNK, CHUNKED, RECURRENT
from torch_gdn_check.registry.inputs import to_device
from torch_gdn_check.registry.models import MODELS, QWEN3_NEXT
from torch_gdn_check.registry.registry import MPS, Named, OpEntry, Point, computed

# Each has a scheme, query rows per KV head, and keys.
ATTENTIONS = (
    *(("4v4", 4, keys) for keys in (2048, 8192, 32768, 131072)),
    *((scheme, 4, 32768) for scheme in ("8v4", "4v4t", "3v3t", "2v2t")),
    *(("4v4", rows, 32768) for rows in (1, 8)),
)
Recorder = Callable[[Writer], CaseRecord]
BF16 = torch.bfloat16


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


def case_of(entry: OpEntry[Any], point: Point) -> Case:
    def run() -> Named:
        call = to_device(entry.call(point), MPS)
        return entry.outputs(call, entry.run(call, point))

    return Case(f"{entry.name} {point.name}", run, lambda: entry.exact_outputs(entry.call(point)))


def on_golden_inputs() -> Iterator[Case]:
    """Returns cases with FLA's recorded inputs."""
    for name in golden.index():
        for op in golden.ops_of(name):
            if op == CHUNK:
                yield from (golden_case(name, op, each) for each in CHUNKED)
            elif op == RECURRENT:
                yield golden_case(name, op)


def golden_case(name: str, op: str, algorithm: str | None = None) -> Case:
    def run() -> Named:
        case = golden.load(name).case.to(MPS)
        boundaries = None if case.cu_seqlens is None else case.cu_seqlens.to(MPS)
        with prefill_algorithm(algorithm):
            o, state = END_TO_END_OPS[op](*case.qkv, **(case.options | {"cu_seqlens": boundaries}))
        assert state is not None
        return {"o": o, "state": state}

    def exact() -> Named:
        return dict(zip(("o", "state"), golden.load(name).exact, strict=True))

    return Case(f"golden {algorithm or 'recurrent'} {name}", run, exact)


def replayed() -> Iterator[tuple[OpEntry[Any], Point]]:
    """Returns cases for every op, at the points where `check` computes it."""
    return computed(quick=False)


def all_cases() -> list[Case]:
    """Returns the cases of `replayed`, and those with FLA's recorded inputs."""
    return [*(case_of(*each) for each in replayed()), *on_golden_inputs()]


# ---- to be timed: launches alone, with buffers that hold nothing -----------------------------------------------------


def timed() -> Iterator[tuple[str, Recorder]]:
    for batch, v_first in itertools.product(BATCHES, (False, True)):
        name = decode_case(batch, v_first)
        yield name, partial(timed_decode, name, batch, v_first)
        name = layer_case(batch, v_first)
        yield name, partial(timed_layer, name, batch, v_first)
    for attention in ATTENTIONS:
        yield attention_case(*attention), partial(timed_attention, *attention)
    for size, rows in itertools.product(SIZES, ROWS):
        name = linear_case(size, rows)
        yield name, partial(timed_linear, name, size, rows)
    for tokens in TOKENS:
        yield experts_case("gate and up", tokens), partial(timed_experts, "gate and up", tokens)
        yield experts_case("down", tokens), partial(timed_experts, "down", tokens)


def attention_case(scheme: str, rows: int, keys: int) -> str:
    return f"AURA attention {scheme}, {rows} rows, {keys} keys"


def timed_decode(name: str, batch: int, v_first: bool, writer: Writer) -> CaseRecord:
    """Times decoding with Qwen3-Next's heads."""
    H, HV, K, V = MODELS[QWEN3_NEXT]
    q, v = torch.empty(batch, 1, H, K, dtype=BF16, device=MPS), torch.empty(batch, 1, HV, V, dtype=BF16, device=MPS)
    g, pool = torch.empty(batch, 1, HV, device=MPS), torch.empty(batch, HV, K, V, device=MPS)
    k, beta = torch.empty_like(q), torch.empty_like(g)
    trace = Trace(name, writer, runs=False, keeps=False)
    trace.call(lambda: torch_gdn.fused_recurrent_gated_delta_rule_(q, k, v, g, beta, pool, state_v_first=v_first))
    trace.case.floor_bytes = 2 * pool.nbytes + 2 * q.nbytes + 2 * v.nbytes + 2 * g.nbytes
    writer.add(trace.case)
    return trace.case


def timed_layer(name: str, batch: int, v_first: bool, writer: Writer) -> CaseRecord:
    """Computes all between the projections of a Qwen3-Next layer: convolution, gates, rule and gated norm."""
    H, HV, K, V = MODELS[QWEN3_NEXT]
    D, W = 2 * H * K + HV * V, 4
    qkv, z = (torch.empty(batch, 1, n, dtype=BF16, device=MPS) for n in (D, HV * V))
    b, a = (torch.empty(batch, 1, HV, dtype=BF16, device=MPS) for _ in range(2))
    conv_weight, conv_pool = (torch.empty(*sizes, D, W, dtype=BF16, device=MPS) for sizes in ((), (batch,)))
    A_log, dt_bias = (torch.empty(HV, device=MPS) for _ in range(2))
    pool = torch.empty(batch, HV, K, V, device=MPS)
    options: dict[str, Any] = {"norm_weight": torch.empty(V, dtype=BF16, device=MPS), "state_v_first": v_first}
    trace = Trace(name, writer, runs=False, keeps=False)
    trace.call(lambda: torch_gdn.gdn_decode_(qkv, z, b, a, conv_weight, conv_pool, A_log, dt_bias, pool, **options))
    moved = (pool, pool, conv_pool, conv_pool, conv_weight, qkv, z, z, b, a)  # the output has the size of z
    trace.case.floor_bytes = sum(each.nbytes for each in moved)
    writer.add(trace.case)
    return trace.case


def timed_attention(scheme: str, rows: int, keys: int, writer: Writer) -> CaseRecord:
    """`rows` query heads attend to each of 8 KV heads of 128. The keys are split into 64 blocks, which gives each of
    this GPU's cores four threadgroups. The host would choose fewer blocks for the simulated device, which has fewer
    cores."""
    HK, D, cached = 8, 128, Scheme(scheme)
    q = torch.empty(1, HK * rows, 1, D, dtype=BF16, device=MPS)
    cache: dict[str, Any] = {}
    moved = [q, q]
    for which, bits, codebook in zip(
        ("key", "value"), (cached.key_bits, cached.value_bits), cached.codebooks(D), strict=True
    ):
        codes = torch.empty(1, HK, keys, D * bits // 32, dtype=torch.int32, device=MPS)
        norms = torch.empty(1, HK, keys, dtype=torch.float16, device=MPS)
        cache |= {f"{which}_codes": codes, f"{which}_norms": norms, f"{which}_codebook": codebook.to(MPS)}
        cache[f"{which}_signs"] = torch.empty(D, device=MPS)
        moved += [codes, norms]
    trace = Trace(attention_case(scheme, rows, keys), writer, runs=False, keeps=False)
    trace.call(lambda: torch_gdn.aura_attention(q, **cache, block_size=keys // 64))
    trace.case.floor_bytes = sum(each.nbytes for each in moved)
    writer.add(trace.case)
    return trace.case


def timed_linear(name: str, size: int, rows: int, writer: Writer) -> CaseRecord:
    x = torch.empty(rows, size, dtype=BF16, device=MPS)
    weight, scales, biases = packed(size, size)
    trace = Trace(name, writer, runs=False, keeps=False)
    trace.call(lambda: torch_gdn.quantized_linear(x, weight, scales, biases))
    trace.case.floor_bytes = weight.nbytes + 2 * scales.nbytes + 2 * x.nbytes
    writer.add(trace.case)
    return trace.case


def packed(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns codes of 4 bits, with a scale and a bias in bfloat16 for each group."""
    *rows, columns = shape
    scales, biases = (torch.empty(*rows, columns // GROUP, dtype=BF16, device=MPS) for _ in range(2))
    return torch.empty(*rows, columns * 4 // 32, dtype=torch.int32, device=MPS), scales, biases


def timed_experts(part: str, tokens: int, writer: Writer) -> CaseRecord:
    """One token chooses each of the experts."""
    ids = torch.arange(tokens * K, dtype=torch.int32).view(tokens, K)
    on_device = ids.to(MPS)
    trace = Trace(experts_case(part, tokens), writer, runs=False, keeps=False)
    if part == "down":
        x, weights = torch.empty(tokens, K, I, dtype=BF16, device=MPS), packed(tokens * K, D, I)
        chosen = torch.empty(tokens, K, device=MPS)
        trace.call(
            lambda: torch.ops.gdn.moe_down(x, weights[0], chosen, on_device, w_scales=weights[1], w_biases=weights[2])
        )
        outputs = tokens * D
    else:
        x, weights = torch.empty(tokens, D, dtype=BF16, device=MPS), packed(tokens * K, 2 * I, D)
        trace.call(
            lambda: torch.ops.gdn.moe_gate_up(x, weights[0], on_device, w_scales=weights[1], w_biases=weights[2])
        )
        outputs = tokens * K * I
    content = ids.numpy().tobytes()
    trace.case.fills.append(Fill(0, trace.number_of(on_device), [[0, len(content)]], writer.keep(content)))
    trace.case.floor_bytes = x.nbytes + sum(each.nbytes for each in weights) + 2 * outputs
    writer.add(trace.case)
    return trace.case
