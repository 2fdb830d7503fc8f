"""Runs the cases with which peers test their own kernels, at the peers' own bars.

FLA: the forward cases of tests/ops/test_gdn.py of 0.6. Its criterion is the RMS of the error over the RMS of the
result. ggml: test_gated_delta_net of tests/test-backend-ops.cpp, with strong gates (down to -20) and tiled head
grouping. Its criterion is the normalised mean square error, at most 1e-7. The exact result is that of the chunked
reference in float64, which equals the recurrence to 1e-12 (test_reference.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

import torch_gdn
from tests.helpers.devices import ready
from torch_gdn import reference

pytestmark = pytest.mark.sweep(3)

f16, f32 = torch.float16, torch.float32
CPU = torch.device("cpu")
SEQUENCES = [[0, 15], [0, 256, 500, 1000], [0, 15, 100, 300, 1200, 2000]]


class Inputs(NamedTuple):
    """The inputs of both ops. `initial_state` is [N, HV, D, D]; `boundaries` are those of packed sequences."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor
    boundaries: list[int] | None = None

    def on(self, device: torch.device) -> dict[str, Any]:
        tensors = {name: x for name, x in self._asdict().items() if isinstance(x, Tensor)}
        if self.boundaries is not None:
            tensors["cu_seqlens"] = torch.tensor(self.boundaries)
        return {name: x.to(device) for name, x in tensors.items()}


def assert_ratio(name: str, ours: Tensor | None, exact: Tensor | None, ratio: float) -> None:
    """Asserts as FLA's assert_close: every error is at most 1e-6, or the root mean square is within `ratio`."""
    assert ours is not None and exact is not None
    error = ours.detach().cpu().double() - exact.double()
    if error.abs().max() <= 1e-6:
        return
    share = (error.square().mean().sqrt() / (exact.double().square().mean().sqrt() + 1e-8)).item()
    assert share < ratio, f"{name}: {share:.2e}, at most {ratio}"


def check(op: str, inputs: Inputs, ratio: float, **options: Any) -> None:
    o, state = getattr(torch_gdn, op)(**inputs.on(CPU), output_final_state=True, **options)
    in_f64 = {name: x.double() if x.is_floating_point() else x for name, x in inputs.on(CPU).items()}
    exact_o, exact_state = reference.chunk_gated_delta_rule(**in_f64, output_final_state=True, **options)
    assert o.dtype == inputs.q.dtype
    assert_ratio("o", o, exact_o, ratio)
    assert_ratio("final_state", state, exact_state, ratio)


class FlaCase(NamedTuple):
    """A case. `gate` is FLA's gate_logit_normalizer; `bias` and `doubled` describe a raw gate and a raw beta."""

    B: int
    T: int
    H: int
    HV: int
    D: int
    scale: float | None = None
    dtype: torch.dtype = f16
    gate: float = 1
    mask: float = 0
    l2norm: bool = True
    bias: bool | None = None
    doubled: bool | None = None
    boundaries: list[int] | None = None


RECURRENT = [
    FlaCase(1, 63, 1, 1, 64, 1, f32),
    FlaCase(2, 500, 4, 4, 60, 1, f32),
    FlaCase(2, 1000, 2, 8, 128, 1, f32, gate=0.1),
    FlaCase(3, 1024, 2, 2, 128, 0.1, f32),
    FlaCase(4, 1024, 3, 3, 128, 1, f32, gate=10),
    FlaCase(4, 2048, 4, 4, 64, 0.1, f32),
    FlaCase(2, 1024, 4, 4, 128, 1, gate=0.1),
    FlaCase(2, 1024, 4, 8, 128, 1, gate=10),
    FlaCase(1, 64, 1, 1, 64, 1, f32, bias=False),
    FlaCase(2, 256, 2, 2, 64, 1, f32, bias=True),
    FlaCase(2, 512, 2, 4, 64, 0.1, bias=True),
    FlaCase(3, 1000, 2, 8, 128, 1, bias=False),
    FlaCase(4, 1024, 4, 4, 128, 0.1, bias=True),
    FlaCase(1, 64, 1, 1, 64, 1, f32, doubled=False),
    FlaCase(2, 512, 2, 4, 64, 0.1, doubled=True),
    FlaCase(3, 1000, 2, 8, 128, 1, doubled=True),
    FlaCase(4, 1024, 4, 4, 128, 0.1, doubled=False),
]
CHUNK = [
    FlaCase(4, 1024, 4, 4, 128, 0.1, mask=1.0, l2norm=False),
    FlaCase(2, 75, 4, 4, 64, 1, gate=0.01, l2norm=False),
    FlaCase(2, 500, 3, 3, 60, 1, l2norm=False),
    FlaCase(2, 1000, 3, 3, 64, 0.1, mask=0.5, l2norm=False),
    FlaCase(3, 1024, 4, 4, 100, 1, gate=0.1, l2norm=False),
    FlaCase(4, 1024, 4, 4, 128, 0.1),
    FlaCase(2, 1500, 4, 4, 128, 0.1, gate=10, l2norm=False),
    FlaCase(4, 2048, 8, 8, 64, 0.1, l2norm=False),
    FlaCase(2, 256, 2, 4, 64, 1, l2norm=False),
    FlaCase(2, 512, 2, 8, 64, 1, gate=0.1),
    FlaCase(2, 1024, 4, 8, 128, 0.1, l2norm=False),
    FlaCase(2, 75, 4, 4, 64, 1, bias=True),
    FlaCase(2, 500, 3, 3, 60, 1, bias=False, l2norm=False),
    FlaCase(2, 1000, 3, 3, 64, 0.1, bias=True, l2norm=False),
    FlaCase(3, 1024, 4, 4, 100, 1, bias=True),
    FlaCase(4, 1024, 4, 4, 128, 0.1, bias=False),
    FlaCase(4, 2048, 8, 8, 64, 0.1, bias=True, l2norm=False),
    FlaCase(2, 256, 2, 4, 64, 1, bias=True),
    FlaCase(2, 512, 1, 4, 64, 0.1, bias=False),
    FlaCase(2, 512, 2, 8, 64, 1, bias=True),
    FlaCase(2, 1024, 4, 8, 128, 0.1, bias=True),
    FlaCase(2, 500, 4, 4, 64, 1, doubled=False, l2norm=False),
    FlaCase(3, 1024, 4, 4, 128, 0.1, doubled=True),
    FlaCase(2, 1024, 4, 8, 128, 0.1, doubled=True, l2norm=False),
    FlaCase(4, 2048, 8, 8, 64, 0.1, doubled=False),
]


def packed(boundaries: list[int], H: int, HV: int, D: int, **options: Any) -> FlaCase:
    return FlaCase(1, boundaries[-1], H, HV, D, boundaries=boundaries, **options)


CHUNK += [
    packed(SEQUENCES[0], 4, 4, 60, l2norm=False),
    packed(SEQUENCES[1], 4, 4, 64, l2norm=False),
    packed(SEQUENCES[1], 4, 4, 64, l2norm=False, mask=0.5),
    packed(SEQUENCES[2], 4, 4, 100, l2norm=False),
    packed(SEQUENCES[1], 2, 4, 64, l2norm=False),
    packed(SEQUENCES[1], 2, 8, 64, l2norm=False),
    packed([0, 8192], 4, 4, 60, l2norm=False),
]
PACKED_GATES = [
    packed(SEQUENCES[0], 4, 4, 60, bias=True),
    packed(SEQUENCES[1], 4, 4, 64, bias=False),
    packed(SEQUENCES[1], 4, 4, 64, bias=True),
    packed(SEQUENCES[2], 4, 4, 100, bias=True),
    packed([0, 15, 100, 300], 2, 2, 64, bias=True),
    packed(SEQUENCES[1], 2, 4, 64, bias=False),
    packed(SEQUENCES[2], 4, 4, 128, bias=True),
]


def draw_fla(case: FlaCase, recurrent: bool) -> tuple[Inputs, dict[str, Any]]:
    """Draws inputs as FLA does. Those of a prefill are uniform (nearly parallel keys), without an initial state."""
    torch.manual_seed(42)
    B, T, H, HV, D = case[:5]
    prefill = not recurrent and case.boundaries is None
    draw = torch.rand if prefill else torch.randn
    q, k, v = draw(B, T, H, D), draw(B, T, H, D), draw(B, T, HV, D)
    if not case.l2norm:
        q, k = normalize(q, dim=-1), normalize(k, dim=-1)
    g, beta = logsigmoid(torch.rand(B, T, HV)) / case.gate, torch.rand(B, T, HV).sigmoid()
    g = g * (torch.rand_like(g) > case.mask)
    N = B if case.boundaries is None else len(case.boundaries) - 1
    state = torch.zeros(N, HV, D, D) if prefill else torch.randn(N, HV, D, D)
    options: dict[str, Any] = {"scale": case.scale, "use_qk_l2norm_in_kernel": case.l2norm}
    if case.bias is not None:
        g, A_log = torch.randn(B, T, HV), torch.empty(HV).uniform_(1, 16).log() if recurrent else torch.randn(HV)
        options |= {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": torch.randn(HV) if case.bias else None}
    if case.doubled is not None:
        beta = torch.randn(B, T, HV)
        options |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": case.doubled}
    return Inputs(q.to(case.dtype), k.to(case.dtype), v.to(case.dtype), g, beta, state, case.boundaries), options


class TestFla:
    @pytest.mark.sweep(3)
    @pytest.mark.parametrize("case", RECURRENT + PACKED_GATES, ids=str)
    def test_fused_recurrent(self, case: FlaCase) -> None:
        inputs, options = draw_fla(case, recurrent=True)
        check("fused_recurrent_gated_delta_rule", inputs, 0.002, **options)

    @pytest.mark.sweep(3)
    @pytest.mark.parametrize("case", CHUNK + PACKED_GATES, ids=str)
    def test_chunk(self, case: FlaCase) -> None:
        inputs, options = draw_fla(case, recurrent=False)
        check("chunk_gated_delta_rule", inputs, 0.005, **options)

    def test_many_documents(self) -> None:
        """FLA's kernel tests have this case: documents times heads exceed a grid dimension of CUDA."""
        N, HV = 2050, 32
        q, v = torch.randn(1, N, 1, 4), torch.randn(1, N, HV, 2)
        g = torch.full((1, N, HV), -0.5)
        o, _ = torch_gdn.fused_recurrent_gated_delta_rule(q, q, v, g, cu_seqlens=torch.arange(N + 1))
        exact = 0.5 * q.double().square().sum(-1)[..., None] * v.double()  # each document is one token
        assert_ratio("o", o, exact, 1e-6)


# head_count, head_size, n_seq_tokens, n_seqs, v_repeat, permuted, kda. ggml's cases have 4 to 32 heads, sizes 16 to
# 128, lengths of decode and around the powers of 2, tiled heads, permuted layouts, and gates of channels.
GGML = [
    (32, 128, 1, 1, 1, False, False),
    (16, 64, 1, 2, 1, False, False),
    (4, 64, 4, 1, 1, False, False),
    (4, 64, 4, 2, 1, False, False),
    (8, 32, 4, 2, 2, False, False),
    (4, 64, 4, 2, 1, True, False),
    (4, 64, 4, 1, 1, True, False),
    (4, 128, 2, 1, 2, False, False),
    (4, 64, 8, 2, 1, False, False),
    (4, 64, 16, 2, 1, False, False),
    (4, 64, 33, 1, 1, False, False),
    (4, 64, 64, 1, 1, False, False),
    (4, 64, 65, 1, 1, True, False),
    (4, 64, 100, 2, 1, False, False),
    (4, 64, 127, 1, 2, False, False),
    (4, 64, 128, 1, 1, False, False),
    (4, 64, 200, 1, 1, False, False),
    (4, 64, 256, 1, 1, False, False),
    (4, 16, 1, 1, 1, False, True),
    (4, 16, 4, 2, 1, False, True),
    (4, 16, 4, 2, 2, True, True),
    (4, 64, 1, 1, 1, False, True),
    (4, 64, 4, 1, 1, False, True),
    (4, 64, 4, 2, 2, False, True),
    (8, 32, 4, 2, 2, True, True),
    (4, 128, 2, 1, 1, False, True),
    (32, 128, 1, 1, 1, False, True),
]
ON_MPS = [case for case in GGML if case[0] * case[1] <= 256 and case[2] <= 65]


def ggml_inputs(case: tuple[Any, ...]) -> tuple[Inputs, Tensor | None]:
    heads, size, tokens, sequences, repeat, permuted, per_channel = case
    torch.manual_seed(0)

    def rows(*sizes: int) -> Tensor:
        """Returns [B, T, heads, ...], contiguous or with the strides of [B, heads, T, ...]."""
        x = torch.rand(sizes)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if permuted else x

    q, k = rows(sequences, tokens, heads, size) - 0.5, rows(sequences, tokens, heads, size) - 0.5
    v = rows(sequences, tokens, heads * repeat, size) * 5.3 - 0.3
    gates = -20 + (20 - 1e-4) * rows(sequences, tokens, heads * repeat, size if per_channel else 1)
    state = torch.rand(sequences, heads * repeat, size, size) * 2 - 1
    g = torch.zeros(gates.shape[:3]) if per_channel else gates[..., 0]
    beta = rows(sequences, tokens, heads * repeat)
    return Inputs(normalize(q, dim=-1), normalize(k, dim=-1), v, g, beta, state), gates if per_channel else None


def normalised_mean_square_error(ours: Tensor, exact: Tensor) -> float:
    error = ours.cpu().double() - exact
    return (error.square().sum() / exact.square().sum()).item()


def check_ggml(op: str, case: tuple[Any, ...], device: torch.device) -> None:
    inputs, gk = ggml_inputs(case)
    options: dict[str, Any] = {"head_grouping": "tiled"} | ({} if gk is None else {"gk": gk})
    moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    call = inputs.on(device)
    o, state = getattr(torch_gdn, op)(**call, **moved, output_final_state=True)
    in_f64 = {name: x.double() for name, x in inputs.on(CPU).items()}
    exact = reference.fused_recurrent_gated_delta_rule(**in_f64, **options, output_final_state=True)
    assert exact[1] is not None
    assert normalised_mean_square_error(o, exact[0]) < 1e-7
    assert normalised_mean_square_error(state, exact[1]) < 1e-7


class TestGgml:
    @pytest.mark.parametrize("case", GGML, ids=str)
    def test_recurrent(self, case: tuple[Any, ...]) -> None:
        check_ggml("fused_recurrent_gated_delta_rule", case, CPU)

    @pytest.mark.parametrize("case", [case for case in GGML if not case[-1]], ids=str)
    def test_chunked(self, case: tuple[Any, ...]) -> None:
        check_ggml("chunk_gated_delta_rule", case, CPU)

    @pytest.mark.parametrize("case", ON_MPS, ids=str)
    def test_recurrent_on_mps(self, case: tuple[Any, ...]) -> None:
        check_ggml("fused_recurrent_gated_delta_rule", case, ready("mps"))
