"""Times vLLM's own Gated DeltaNet for the CPU next to ours, as its engine calls both: raw gates, pools, bfloat16.

Its kernels are in a library that needs nothing of vLLM's Python: that of an installed vLLM, or of a folder. They take
bfloat16 alone, the states of the rule in float32. Both sides get what an engine's layer has after its projections,
contiguous (vLLM's layer copies q, k and v apart before, ours reads views; that is not timed), and pools as vLLM lays
them out on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

import torch_gdn
from bench import counting, gdn
from bench.ceilings import Ceilings
from bench.contenders import Prepare
from bench.counting import Work
from bench.installed import library_folder
from bench.results import OURS, Row
from bench.shapes import QWEN3_NEXT, Layer
from bench.timing import measure
from torch_gdn import reference
from torch_gdn_check.peers import Prepared
from torch_gdn_check.registry.bounds import relative_error
from torch_gdn_check.registry.cases import Case, make_case
from torch_gdn_check.steps import Skipped

FOLDER = "TORCH_GDN_VLLM_LIBRARY"  # environment: the folder of vLLM's _C*.so, if vLLM is not installed here
DTYPE = torch.bfloat16
WIDTH = 4
TOKENS, BATCHES = (256, 512, 1024, 2048), (1, 2, 4, 8, 16, 32, 64)
GATES: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}


@cache
def ops() -> Any:
    """vLLM's operators; which of its libraries is by the same rule as in vllm.platforms.cpu."""
    path = folder() / f"{'_C' if has_bf16_products() else '_C_AVX512' if has_avx512() else '_C_AVX2'}.abi3.so"
    if not path.exists():
        raise Skipped(f"no {path.name} in {path.parent}")
    torch.ops.load_library(path)
    if not hasattr(torch.ops._C, "chunk_gated_delta_rule_cpu"):
        raise Skipped(f"{path} has no Gated DeltaNet for the CPU; that of vLLM 0.32 has")
    return torch.ops._C


def folder() -> Path:
    result = library_folder("vllm", FOLDER)
    if result is None:
        raise Skipped(f"vLLM is not installed, and {FOLDER} does not name the folder of its libraries")
    return result


def has_bf16_products() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported())


def has_avx512() -> bool:
    return bool(torch.cpu._is_avx512_supported())


@dataclass
class ServedCase(Case):
    """A case whose gates are given as the layer's projections a and b [tokens, HV]; A_log and dt_bias are zeros."""

    a: Tensor | None = None
    b: Tensor | None = None

    def exact(self, **options: Any) -> tuple[Tensor, Tensor]:
        return super().exact(use_qk_l2norm_in_kernel=True, **options)

    @property
    def raw_gates(self) -> tuple[Tensor, Tensor]:
        assert self.a is not None and self.b is not None
        return self.a, self.b

    @property
    def parameters(self) -> tuple[Tensor, Tensor]:
        """A_log and dt_bias, in the dtypes that vLLM's layer has them."""
        heads = self.v.size(2)
        return torch.zeros(heads), torch.zeros(heads, dtype=DTYPE)


def case_of(layer: Layer, tokens: int, batch: int) -> ServedCase:
    """`batch` sequences of `tokens` each, in one row as a server packs them."""
    bounds = list(range(0, tokens * batch + 1, tokens))
    total = bounds[-1]
    case = make_case(total, layer.K, layer.V, H=layer.H, HV=layer.HV, dtype=DTYPE, normal=False, cu_seqlens=bounds)
    random = torch.Generator().manual_seed(1)
    a, b = (torch.randn(total, layer.HV, generator=random).to(DTYPE) for _ in range(2))
    case.g, case.beta = -softplus(a.double()).float()[None], b.double().sigmoid().float()[None]
    return ServedCase(**vars(case), a=a, b=b)


class Pool:
    """The case's states in slots 1 .. of a pool [slots, HV, ..]: slot 0 is the null block."""

    def __init__(self, states: Tensor) -> None:
        self.states = states
        self.tensor = torch.zeros(states.size(0) + 1, *states.shape[1:])
        self.slots = torch.arange(1, states.size(0) + 1, dtype=torch.int32)

    def output_of(self, call: Callable[[], Tensor]) -> Callable[[], tuple[Tensor, Tensor]]:
        """Runs the call once, from the case's states."""

        def output() -> tuple[Tensor, Tensor]:
            self.tensor[1:] = self.states
            return call(), self.tensor[1:]

        return output


def boundaries(case: Case) -> Tensor:
    assert case.cu_seqlens is not None
    return case.cu_seqlens.to(torch.int32)


def ours(op: Callable[..., Tensor]) -> Prepare:
    """States as torch_gdn_engines.vllm has them, V first."""

    def prepare(case: Case, device: torch.device) -> Prepared:
        assert isinstance(case, ServedCase) and case.initial_state is not None
        pool = Pool(case.initial_state.transpose(-1, -2))
        (a, b), (A_log, dt_bias), out = case.raw_gates, case.parameters, torch.empty_like(case.v)
        options = {"A_log": A_log, "dt_bias": dt_bias, "state_v_first": True, "null_index": 0, "out": out} | GATES
        bounds = boundaries(case)

        def call() -> Tensor:
            return op(*case.qkv, a[None], b[None], pool.tensor, pool.slots, cu_seqlens=bounds, **options)

        return Prepared(call, pool.output_of(lambda: (call(), out)[1]))

    return prepare


def vllm_prefill(case: Case, device: torch.device) -> Prepared:
    assert isinstance(case, ServedCase) and case.initial_state is not None
    kernels, pool, bounds = ops(), Pool(case.initial_state), boundaries(case)
    (a, b), (A_log, dt_bias) = case.raw_gates, case.parameters

    def call() -> Tensor:
        g, beta = kernels.fused_gdn_gating_cpu(A_log, a, b, dt_bias)
        rest = (pool.tensor, True, bounds, False, True, pool.slots, 1e-5)
        o: Tensor = kernels.chunk_gated_delta_rule_cpu(*case.qkv, g, beta, *rest)[0]
        return o

    return Prepared(call, pool.output_of(call))


def vllm_decode(case: Case, device: torch.device) -> Prepared:
    assert isinstance(case, ServedCase) and case.initial_state is not None
    kernels, pool, bounds = ops(), Pool(case.initial_state), boundaries(case)
    (a, b), (A_log, dt_bias) = case.raw_gates, case.parameters

    def call() -> Tensor:
        rest = (pool.tensor, pool.slots, bounds, True, 1.0, 20.0)
        o: Tensor = kernels.fused_sigmoid_gating_delta_rule_update_cpu(A_log, dt_bias, *case.qkv, a, b, *rest)
        return o.transpose(0, 1)

    return Prepared(call, pool.output_of(call))


PREFILL: dict[str, Prepare] = {OURS: ours(torch_gdn.chunk_gated_delta_rule_), "vLLM": vllm_prefill}
DECODE: dict[str, Prepare] = {OURS: ours(torch_gdn.fused_recurrent_gated_delta_rule_), "vLLM": vllm_decode}


class Convolution:
    """One token of each row: x [rows, D], weights [D, W], and the pool [slots, D, W - 1] in vLLM's layout here."""

    def __init__(self, channels: int, rows: int) -> None:
        torch.manual_seed(0)
        self.x, self.weight = torch.randn(rows, channels).to(DTYPE), torch.randn(channels, WIDTH).to(DTYPE)
        self.states = torch.randn(rows, channels, WIDTH - 1).to(DTYPE)
        self.slots = torch.arange(1, rows + 1, dtype=torch.int32)

    def pool(self) -> Tensor:
        zeros = torch.zeros(len(self.slots) + 1, WIDTH - 1, self.x.size(1), dtype=DTYPE)
        pool = zeros.transpose(1, 2) if has_bf16_products() else zeros.transpose(1, 2).contiguous()
        pool[1:] = self.states
        return pool

    def exact(self) -> Tensor:
        columns = torch.cat([self.states, self.x[:, :, None]], dim=2).double().transpose(1, 2)
        return reference.causal_conv1d(columns, self.weight.double(), activation="silu")[0][:, -1]

    def ours(self) -> Callable[[], Tensor]:
        x, pool = self.x[:, None], self.pool()
        op = torch_gdn.causal_conv1d_update_
        return lambda: op(x, self.weight, pool, self.slots, None, 0, None, "silu", None)[:, 0]

    def vllm(self) -> Callable[[], Tensor]:
        kernels, pool = ops(), self.pool()
        if not has_bf16_products():
            raise Skipped("its C++ convolution needs bfloat16 products")
        packed = kernels.causal_conv1d_weight_pack(self.weight)
        rest = (packed, None, True, None, self.slots, -1, True)
        return lambda: kernels.causal_conv1d_update_cpu(self.x, pool, *rest)


def convolution_rows(layer: Layer, rows: int, ceilings: Ceilings, seconds: float) -> list[Row]:
    case = Convolution(layer.channels, rows)
    exact, result, calls = case.exact(), [], {}
    for contender, make in ((OURS, case.ours), ("vLLM", case.vllm)):
        row = Row(
            "vllm", f"convolution, {layer.channels} channels", "bfloat16", rows, contender, torch.get_num_threads()
        )
        result.append(row)
        try:
            call = make()
        except Skipped as reason:
            row.note = f"not run: {reason}"
            continue
        row.error = relative_error(call().double(), exact)
        if row.error <= gdn.LARGEST_ERROR[DTYPE]:
            calls[contender] = call
        else:
            row.note = "wrong: not timed"
    times = measure(calls, ceilings.device, seconds)
    work = Work(2 * WIDTH * case.x.numel(), 2 * (case.x.nbytes + case.states.nbytes) + case.weight.nbytes)
    for row in result:
        if row.contender in times:
            row.time(times[row.contender])
            row.work(work)
            row.floor = work.floor(ceilings.products(DTYPE), ceilings.bytes_a_second(work.bytes))
    return result


def jobs(quick: bool) -> Iterator[tuple[str, int]]:
    for what, sizes in (("prefill", TOKENS), ("decode", BATCHES), ("convolution", BATCHES)):
        for size in sizes[:1] if quick else sizes:
            yield what, size


def run(what: str, size: int, ceilings: Ceilings, seconds: float, layer: Layer = QWEN3_NEXT) -> list[Row]:
    if what == "convolution":
        return convolution_rows(layer, size, ceilings, seconds)
    if what == "prefill":
        case, prepares, work = case_of(layer, size, 1), PREFILL, counting.prefill(layer, size, DTYPE)
    else:
        case, prepares, work = case_of(layer, 1, size), DECODE, counting.decode(layer, size, DTYPE)

    def row_of(contender: str) -> Row:
        return Row("vllm", f"{what}, {layer}", "bfloat16", size, contender, torch.get_num_threads())

    return gdn.compare(row_of, prepares, case, work, ceilings, seconds)
