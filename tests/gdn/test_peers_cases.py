"""The cases that peers hold their own kernels against, at the peers' own bars.

FLA: tests/ops/test_gdn.py of 0.6, its forward cases and its criterion, the RMS of the error over the RMS of the
result. ggml: test_gated_delta_net of tests/test-backend-ops.cpp, where gates are strong (down to -20) and head
grouping is tiled; its criterion is the normalised mean square error, at most 1e-7.
The exact result is the chunked reference in float64, which equals the recurrence to 1e-12 (test_reference.py). On
`mps` each case has one batch row, few heads and 70 tokens, and no head size twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, softplus

import torch_gdn
from tests.helpers.devices import ready
from tests.helpers.prefill import each_device, on_mps
from torch_gdn import reference

f16, f32 = torch.float16, torch.float32
CPU = torch.device("cpu")
SEQUENCES = [[0, 15], [0, 256, 500, 1000], [0, 15, 100, 300, 1200, 2000]]
FEW_TOKENS = 70


class Inputs(NamedTuple):
    """The inputs of both ops: `initial_state` [N, HV, D, D], `boundaries` of packed sequences."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor
    boundaries: list[int] | None = None

    def on(self, device: torch.device) -> dict[str, Tensor]:
        tensors = {name: x for name, x in self._asdict().items() if isinstance(x, Tensor)}
        if self.boundaries is not None:
            tensors["cu_seqlens"] = torch.tensor(self.boundaries)
        return {name: x.to(device) for name, x in tensors.items()}


def assert_ratio(name: str, ours: Tensor | None, exact: Tensor | None, ratio: float) -> None:
    """FLA's assert_close: an error of 1e-6 at most anywhere, or of this share in the root mean square."""
    assert ours is not None and exact is not None
    error = ours.detach().cpu().double() - exact.double()
    if error.abs().max() <= 1e-6:
        return
    share = (error.square().mean().sqrt() / (exact.double().square().mean().sqrt() + 1e-8)).item()
    assert share < ratio, f"{name}: {share:.2e}, at most {ratio}"


def exact_result(inputs: Inputs, **options: Any) -> tuple[Tensor, Tensor | None]:
    in_f64 = {name: x.double() if x.is_floating_point() else x for name, x in inputs.on(CPU).items()}
    return reference.chunk_gated_delta_rule(**in_f64, output_final_state=True, **options)


def check(op: str, inputs: Inputs, ratio: float, device: torch.device, **options: Any) -> None:
    there = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    o, state = getattr(torch_gdn, op)(**inputs.on(device), output_final_state=True, **there)
    exact_o, exact_state = exact_result(inputs, **options)
    assert o.dtype == inputs.q.dtype
    assert_ratio("o", o, exact_o, ratio)
    assert_ratio("final_state", state, exact_state, ratio)


def fla_inputs(
    B: int,
    T: int,
    H: int,
    HV: int,
    D: int,
    dtype: torch.dtype,
    *,
    gate: float = 1,
    mask: float = 0,
    positive: bool = False,
    normal: bool = False,
    boundaries: list[int] | None = None,
    zero_state: bool = False,
) -> Inputs:
    """Draws inputs as FLA does: `positive` q, k and v are uniform (nearly parallel keys), the others are normal."""
    torch.manual_seed(42)
    draw = torch.rand if positive else torch.randn
    q, k, v = draw(B, T, H, D), draw(B, T, H, D), draw(B, T, HV, D)
    if normal:
        q, k = normalize(q, dim=-1), normalize(k, dim=-1)
    g = logsigmoid(torch.rand(B, T, HV)) / gate
    g = g * (torch.rand_like(g) > mask)
    N = B if boundaries is None else len(boundaries) - 1
    state = torch.zeros(N, HV, D, D) if zero_state else torch.randn(N, HV, D, D)
    return Inputs(q.to(dtype), k.to(dtype), v.to(dtype), g, torch.rand(B, T, HV).sigmoid(), state, boundaries)


RECURRENT = [  # B, T, H, HV, D, scale, gate_logit_normalizer, dtype
    (1, 63, 1, 1, 64, 1, 1, f32),
    (2, 500, 4, 4, 60, 1, 1, f32),
    (2, 1000, 2, 8, 128, 1, 0.1, f32),
    (3, 1024, 2, 2, 128, 0.1, 1, f32),
    (4, 1024, 3, 3, 128, 1, 10, f32),
    (4, 2048, 4, 4, 64, 0.1, 1, f32),
    (2, 1024, 4, 4, 128, 1, 0.1, f16),
    (2, 1024, 4, 8, 128, 1, 10, f16),
]
CHUNK = [  # B, T, H, HV, D, scale, gate_logit_normalizer, mask_p, use_qk_l2norm_in_kernel
    (4, 1024, 4, 4, 128, 0.1, 1, 1.0, False),
    (2, 75, 4, 4, 64, 1, 0.01, 0, False),
    (2, 500, 3, 3, 60, 1, 1, 0, False),
    (2, 1000, 3, 3, 64, 0.1, 1, 0.5, False),
    (3, 1024, 4, 4, 100, 1, 0.1, 0, False),
    (4, 1024, 4, 4, 128, 0.1, 1, 0, True),
    (2, 1500, 4, 4, 128, 0.1, 10, 0, False),
    (4, 2048, 8, 8, 64, 0.1, 1, 0, False),
    (2, 256, 2, 4, 64, 1, 1, 0, False),
    (2, 512, 2, 8, 64, 1, 0.1, 0, True),
    (2, 1024, 4, 8, 128, 0.1, 1, 0, False),
]
VARLEN = [  # H, HV, D, mask_p, cu_seqlens
    (4, 4, 60, 0, SEQUENCES[0]),
    (4, 4, 64, 0, SEQUENCES[1]),
    (4, 4, 64, 0.5, SEQUENCES[1]),
    (4, 4, 100, 0, SEQUENCES[2]),
    (2, 4, 64, 0, SEQUENCES[1]),
    (2, 8, 64, 0, SEQUENCES[1]),
    (4, 4, 60, 0, [0, 8192]),
]
V_FIRST = [(1, 63, 1, 64, 1), (2, 500, 3, 60, 1), (3, 1024, 4, 128, 0.1), (4, 2048, 8, 64, 0.1)]  # B, T, H, D, scale
CHUNK_GATE = [  # B, T, H, HV, D, scale, has_dt_bias, use_qk_l2norm_in_kernel
    (2, 75, 4, 4, 64, 1, True, True),
    (2, 500, 3, 3, 60, 1, False, False),
    (2, 1000, 3, 3, 64, 0.1, True, False),
    (3, 1024, 4, 4, 100, 1, True, True),
    (4, 1024, 4, 4, 128, 0.1, False, True),
    (4, 2048, 8, 8, 64, 0.1, True, False),
    (2, 256, 2, 4, 64, 1, True, True),
    (2, 512, 1, 4, 64, 0.1, False, True),
    (2, 512, 2, 8, 64, 1, True, True),
    (2, 1024, 4, 8, 128, 0.1, True, True),
]
RECURRENT_GATE = [  # B, T, H, HV, D, scale, has_dt_bias, dtype
    (1, 64, 1, 1, 64, 1, False, f32),
    (2, 256, 2, 2, 64, 1, True, f32),
    (2, 512, 2, 4, 64, 0.1, True, f16),
    (3, 1000, 2, 8, 128, 1, False, f16),
    (4, 1024, 4, 4, 128, 0.1, True, f16),
]
CHUNK_SIGMOID = [  # B, T, H, HV, D, scale, use_qk_l2norm_in_kernel, allow_neg_eigval
    (2, 500, 4, 4, 64, 1, False, False),
    (3, 1024, 4, 4, 128, 0.1, True, True),
    (2, 1024, 4, 8, 128, 0.1, False, True),
    (4, 2048, 8, 8, 64, 0.1, True, False),
]
RECURRENT_SIGMOID = [  # B, T, H, HV, D, scale, allow_neg_eigval, dtype
    (1, 64, 1, 1, 64, 1, False, f32),
    (2, 512, 2, 4, 64, 0.1, True, f16),
    (3, 1000, 2, 8, 128, 1, True, f16),
    (4, 1024, 4, 4, 128, 0.1, False, f16),
]
GATE_VARLEN = [  # H, HV, D, has_dt_bias, cu_seqlens
    (4, 4, 60, True, SEQUENCES[0]),
    (4, 4, 64, False, SEQUENCES[1]),
    (4, 4, 64, True, SEQUENCES[1]),
    (4, 4, 100, True, SEQUENCES[2]),
]
RECURRENT_GATE_VARLEN = [
    (2, 2, 64, True, [0, 15, 100, 300]),
    (2, 4, 64, False, SEQUENCES[1]),
    (4, 4, 128, True, SEQUENCES[2]),
]


def with_raw_gate(inputs: Inputs, bias: bool, recurrent: bool) -> tuple[Inputs, dict[str, Any]]:
    HV = inputs.g.shape[2]
    A_log = torch.empty(HV).uniform_(1, 16).log() if recurrent else torch.randn(HV)
    dt_bias = torch.randn(HV) if bias else None
    options = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias}
    return inputs._replace(g=torch.randn(inputs.g.shape)), options


class TestFla:
    @pytest.mark.parametrize("case", RECURRENT, ids=str)
    def test_fused_recurrent(self, case: tuple[Any, ...]) -> None:
        B, T, H, HV, D, scale, gate, dtype = case
        options = {"scale": scale, "use_qk_l2norm_in_kernel": True}
        check("fused_recurrent_gated_delta_rule", fla_inputs(B, T, H, HV, D, dtype, gate=gate), 0.002, CPU, **options)

    @pytest.mark.parametrize("name", ["gk", "gv"])
    def test_fused_recurrent_with_the_gate_of_each_channel(self, name: str) -> None:
        """The same decay for each channel equals one for the head; NaN follows it, which no tile may read."""
        inputs = fla_inputs(2, 500, 4, 4, 60, f32, normal=True)
        storage = torch.full((inputs.v.numel() + 64,), torch.nan)
        channels = storage[:-64].view(inputs.v.shape).copy_(inputs.g[..., None].expand_as(inputs.v))
        call = inputs.on(CPU) | {name: channels, "g": None}  # type: ignore[dict-item]
        o, state = torch_gdn.fused_recurrent_gated_delta_rule(**call, output_final_state=True)  # type: ignore[arg-type]
        exact = exact_result(inputs)
        assert_ratio("o", o, exact[0], 0.002)
        assert_ratio("final_state", state, exact[1], 0.002)

    @pytest.mark.parametrize("case", CHUNK, ids=str)
    def test_chunk(self, case: tuple[Any, ...]) -> None:
        B, T, H, HV, D, scale, gate, mask, l2norm = case
        inputs = fla_inputs(
            B, T, H, HV, D, f16, gate=gate, mask=mask, positive=True, normal=not l2norm, zero_state=True
        )
        check("chunk_gated_delta_rule", inputs, 0.005, CPU, scale=scale, use_qk_l2norm_in_kernel=l2norm)

    @each_device("chunked")
    @pytest.mark.parametrize("chunk_size", [16, 32, 64])
    def test_chunk_with_chunk_size(self, device: torch.device, chunk_size: int) -> None:
        inputs = fla_inputs(1, 64, 2, 4, 32, f32, positive=True, normal=True, zero_state=True)
        check("chunk_gated_delta_rule", inputs, 0.005, device, scale=0.1, chunk_size=chunk_size)

    @pytest.mark.parametrize("case", VARLEN, ids=str)
    def test_chunk_varlen(self, case: tuple[Any, ...]) -> None:
        H, HV, D, mask, boundaries = case
        inputs = fla_inputs(1, boundaries[-1], H, HV, D, f16, mask=mask, boundaries=boundaries)
        inputs = inputs._replace(k=normalize(inputs.k.float(), dim=-1).half(), g=inputs.g.half())
        check("chunk_gated_delta_rule", inputs._replace(initial_state=inputs.initial_state.half()), 0.005, CPU)

    @pytest.mark.parametrize("op", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
    @pytest.mark.parametrize("case", V_FIRST, ids=str)
    def test_state_v_first(self, op: str, case: tuple[Any, ...]) -> None:
        B, T, H, D, scale = case
        inputs = fla_inputs(B, T, H, H, D, f16, positive=True, normal=True)
        function = getattr(torch_gdn, op)
        o, state = function(**inputs.on(CPU), scale=scale, output_final_state=True)
        transposed = inputs._replace(initial_state=inputs.initial_state.transpose(-1, -2).contiguous()).on(CPU)
        o_same, state_same = function(**transposed, scale=scale, output_final_state=True, state_v_first=True)
        assert_ratio("o", o_same, o, 1e-4)
        assert_ratio("final_state", state_same.transpose(-1, -2), state, 1e-4)

    @pytest.mark.parametrize("case", CHUNK_GATE, ids=str)
    def test_chunk_gate_in_kernel(self, case: tuple[Any, ...]) -> None:
        B, T, H, HV, D, scale, bias, l2norm = case
        inputs = fla_inputs(B, T, H, HV, D, f16, positive=True, normal=not l2norm, zero_state=True)
        inputs, options = with_raw_gate(inputs, bias, recurrent=False)
        options |= {"scale": scale, "use_qk_l2norm_in_kernel": l2norm}
        check("chunk_gated_delta_rule", inputs, 0.005, CPU, **options)

    @pytest.mark.parametrize("case", RECURRENT_GATE, ids=str)
    def test_fused_recurrent_gate_in_kernel(self, case: tuple[Any, ...]) -> None:
        B, T, H, HV, D, scale, bias, dtype = case
        inputs, options = with_raw_gate(fla_inputs(B, T, H, HV, D, dtype), bias, recurrent=True)
        options |= {"scale": scale, "use_qk_l2norm_in_kernel": True}
        check("fused_recurrent_gated_delta_rule", inputs, 0.002, CPU, **options)

    @pytest.mark.parametrize("op", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
    @pytest.mark.parametrize("case", GATE_VARLEN + RECURRENT_GATE_VARLEN, ids=str)
    def test_gate_in_kernel_varlen(self, op: str, case: tuple[Any, ...]) -> None:
        H, HV, D, bias, boundaries = case
        inputs = fla_inputs(1, boundaries[-1], H, HV, D, f16, boundaries=boundaries)
        inputs, options = with_raw_gate(inputs, bias, recurrent=op.startswith("fused"))
        ratio = 0.002 if op.startswith("fused") else 0.005
        check(op, inputs, ratio, CPU, use_qk_l2norm_in_kernel=True, **options)

    @pytest.mark.parametrize("case", CHUNK_SIGMOID, ids=str)
    def test_chunk_beta_sigmoid_in_kernel(self, case: tuple[Any, ...]) -> None:
        B, T, H, HV, D, scale, l2norm, doubled = case
        inputs = fla_inputs(B, T, H, HV, D, f16, positive=True, normal=not l2norm, zero_state=True)
        options = {"scale": scale, "use_qk_l2norm_in_kernel": l2norm, "allow_neg_eigval": doubled}
        inputs = inputs._replace(beta=torch.randn(B, T, HV))
        check("chunk_gated_delta_rule", inputs, 0.005, CPU, use_beta_sigmoid_in_kernel=True, **options)

    @pytest.mark.parametrize("case", RECURRENT_SIGMOID, ids=str)
    def test_fused_recurrent_beta_sigmoid_in_kernel(self, case: tuple[Any, ...]) -> None:
        B, T, H, HV, D, scale, doubled, dtype = case
        inputs = fla_inputs(B, T, H, HV, D, dtype)._replace(beta=torch.randn(B, T, HV, dtype=dtype))
        options = {"scale": scale, "use_qk_l2norm_in_kernel": True, "allow_neg_eigval": doubled}
        check("fused_recurrent_gated_delta_rule", inputs, 0.005, CPU, use_beta_sigmoid_in_kernel=True, **options)

    @pytest.mark.parametrize("B, HV", [(1, 2), (2, 4), (4, 8), (4, 16)])
    def test_gate(self, device: torch.device, B: int, HV: int) -> None:
        """The gate alone: with k of 0 and g as a log decay, o is exp(g) of a state of ones."""
        T, raw, A_log = 8, torch.randn(B, 8, HV), torch.empty(HV).uniform_(1, 16).log()
        zeros, ones = torch.zeros(B, T, HV, 1, device=device), torch.ones(B, HV, 1, 1, device=device)
        outputs = []
        for t in range(T):
            gate = raw[:, t : t + 1].to(device)
            o, _ = torch_gdn.fused_recurrent_gated_delta_rule(
                zeros[:, :1] + 1,
                zeros[:, :1],
                zeros[:, :1],
                gate,
                initial_state=ones,
                use_gate_in_kernel=True,
                A_log=A_log.to(device),
            )
            outputs.append(o[..., 0])
        exact = (-A_log.double().exp() * softplus(raw.double())).exp()
        assert_ratio("exp(g)", torch.cat(outputs, 1), exact, 1e-4)

    def test_many_documents(self) -> None:
        """A case of FLA's kernel tests: more documents times heads than a grid dimension of CUDA holds."""
        N, HV = 2050, 32
        boundaries = list(range(N + 1))
        q, v = torch.randn(1, N, 1, 4), torch.randn(1, N, HV, 2)
        g = torch.full((1, N, HV), -0.5)
        o, _ = torch_gdn.fused_recurrent_gated_delta_rule(
            *(x.to(CPU) for x in (q, q, v, g)), cu_seqlens=torch.tensor(boundaries)
        )
        exact = 0.5 * q.double().square().sum(-1)[..., None] * v.double()  # each document is one token
        assert_ratio("o", o, exact, 1e-6)


MPS_CHUNK = [(4, 4, 60, f16), (2, 8, 64, f16), (3, 3, 100, f16), (2, 4, 128, f16)]


class TestFlaOnMps:
    """The dtypes, head sizes and groups of the cases above."""

    @on_mps("chunked")
    @pytest.mark.parametrize("case", MPS_CHUNK, ids=str)
    def test_chunk(self, device: torch.device, case: tuple[int, int, int, torch.dtype]) -> None:
        H, HV, D, dtype = case
        inputs = fla_inputs(1, FEW_TOKENS, 1, HV // H, D, dtype, positive=True, mask=0.5)
        inputs, options = with_raw_gate(inputs, True, recurrent=False)
        options |= {"scale": 0.1, "use_qk_l2norm_in_kernel": True}
        check("chunk_gated_delta_rule", inputs, 0.005, device, **options)

    @pytest.mark.parametrize(("ratio", "D", "dtype"), [(1, 60, f32), (4, 128, f32), (2, 128, f16), (1, 64, f32)])
    def test_fused_recurrent(self, ratio: int, D: int, dtype: torch.dtype) -> None:
        inputs = fla_inputs(1, FEW_TOKENS, 1, ratio, D, dtype, gate=0.1)
        options = {"scale": 1.0, "use_qk_l2norm_in_kernel": True}
        check("fused_recurrent_gated_delta_rule", inputs, 0.002, ready("mps"), **options)

    @on_mps("chunked")
    def test_chunk_varlen(self, device: torch.device) -> None:
        inputs = fla_inputs(1, 100, 1, 2, 64, f16, boundaries=[0, 15, 100], normal=True)
        check("chunk_gated_delta_rule", inputs, 0.005, device)


# head_count, head_size, n_seq_tokens, n_seqs, v_repeat, permuted, kda. As ggml has them: 4 to 32 heads,
# sizes 16 to 128, lengths of decode and around the powers of 2, tiled heads, permuted layouts, gates of channels.
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
GGML_ON_MPS = [case for case in GGML if case[0] * case[1] <= 256 and case[2] <= 65]


def ggml_inputs(case: tuple[Any, ...]) -> tuple[Inputs, Tensor | None]:
    heads, size, tokens, sequences, repeat, permuted, per_channel = case
    torch.manual_seed(0)

    def rows(*sizes: int) -> Tensor:
        """[B, T, heads, ...], contiguous or with the strides of [B, heads, T, ...]."""
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

    @pytest.mark.parametrize("case", GGML_ON_MPS, ids=str)
    def test_recurrent_on_mps(self, case: tuple[Any, ...]) -> None:
        check_ggml("fused_recurrent_gated_delta_rule", case, ready("mps"))
