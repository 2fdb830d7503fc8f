"""Makes inputs of the gated delta rule on the CPU from a seed, with the exact results and their bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

import torch_gdn
from torch_gdn import reference
from torch_gdn.reference.common import log_decay_of
from torch_gdn_check.registry import bounds
from torch_gdn_check.registry.on_the_cpu import on_the_cpu

END_TO_END_OPS: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "chunk_gated_delta_rule": torch_gdn.chunk_gated_delta_rule,
    "fused_recurrent_gated_delta_rule": torch_gdn.fused_recurrent_gated_delta_rule,
}

IN_PLACE: dict[str, Callable[..., Tensor]] = {op: getattr(torch_gdn, f"{op}_") for op in END_TO_END_OPS}


@dataclass
class Case:
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def options(self) -> dict[str, Any]:
        return {
            "g": self.g,
            "beta": self.beta,
            "initial_state": self.initial_state,
            "cu_seqlens": self.cu_seqlens,
            "output_final_state": True,
        }

    def map(self, change: Callable[[Tensor], Tensor]) -> Case:
        """Returns the case with each tensor but cu_seqlens changed."""
        names = ("q", "k", "v", "g", "beta", "initial_state")
        tensors = {name: getattr(self, name) for name in names}
        return replace(self, **{name: change(x) for name, x in tensors.items() if x is not None})

    def to(self, device: torch.device) -> Case:
        return self.map(lambda x: x.to(device))

    def exact(self, **options: Any) -> tuple[Tensor, Tensor]:
        """Runs the float64 recurrence on these inputs."""
        exact = self.map(torch.Tensor.double)
        with on_the_cpu():
            o, state = reference.fused_recurrent_gated_delta_rule(*exact.qkv, **(exact.options | options))
        assert state is not None
        return o, state

    def largest_g_cumsum(self, chunk_size: int = 64, **options: Any) -> float:
        """Returns max |g_cumsum| over all chunks."""
        gates = (options.get("use_gate_in_kernel", False), options.get("A_log"), options.get("dt_bias"))
        g_cumsum = reference.chunk_local_cumsum(log_decay_of(self.g.double(), *gates), chunk_size, self.cu_seqlens)
        return g_cumsum.abs().max().item() if g_cumsum.numel() else 0.0


def make_case(
    T: int,
    K: int = 64,
    V: int = 64,
    *,
    B: int = 1,
    H: int = 1,
    HV: int = 2,
    dtype: torch.dtype = torch.float32,
    state: bool = True,
    cu_seqlens: list[int] | None = None,
    beta: float | None = None,
    same_keys: bool = False,
    normal: bool = True,
    seed: int = 0,
) -> Case:
    """Draws q, k (normalised by default), v, gates like those of models, and an initial state.

    `beta` sets its largest value and replaces the sigmoid. With `same_keys` all tokens of a head have one key.
    """
    random = torch.Generator().manual_seed(seed)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=random, dtype=torch.float64)

    q, k = draw(B, T, H, K), draw(B, T, H, K)
    if same_keys:
        k = k[:, :1].expand(B, T, H, K)
    if normal:
        q, k = normalize(q, dim=-1), normalize(k, dim=-1)
    raw_beta = draw(B, T, HV)
    return Case(
        q=q.to(dtype),
        k=k.to(dtype).contiguous(),
        v=draw(B, T, HV, V).to(dtype),
        g=logsigmoid(draw(B, T, HV)).float(),
        beta=(raw_beta.sigmoid() if beta is None else beta * (1 - 0.1 * raw_beta.sigmoid())).float(),
        initial_state=draw(B if cu_seqlens is None else len(cu_seqlens) - 1, HV, K, V).float() if state else None,
        cu_seqlens=None if cu_seqlens is None else torch.tensor(cu_seqlens),
    )


def bounds_of(op: str, case: Case, exact: tuple[Tensor, Tensor], **options: Any) -> tuple[float, float]:
    """Returns the largest errors allowed for the output and the final state."""
    output_dtype = options.get("output_dtype") or case.dtype
    if op == "fused_recurrent_gated_delta_rule":
        needed = errors_of_a_plain_recurrence(case, exact, **options)
        o, state = (min(max(bounds.RECURRENT_F32, 1.25 * error), 5 * bounds.RECURRENT_F32) for error in needed)
        return max(o, bounds.RECURRENT_OUTPUT.get(output_dtype, 0)), state
    in_f32 = bounds.chunk_f32(case.largest_g_cumsum(**options))
    stages = torch.float32 if case.dtype == torch.float16 else case.dtype  # with half, the stages between are float32
    return (
        max(in_f32, bounds.CHUNK_OUTPUT.get(output_dtype, 0), bounds.CHUNK_OUTPUT.get(stages, 0)),
        max(in_f32, bounds.CHUNK_STATE.get(case.dtype, 0)),
    )


def errors_of_a_plain_recurrence(case: Case, exact: tuple[Tensor, Tensor], **options: Any) -> tuple[float, float]:
    """Returns the error of a recurrence computed in float32, operation by operation.

    A kernel reaches 2e-7 while the state forgets. If it does not (no decay, or repeated keys at beta 1.9), each token
    rounds the whole state once more, and no kernel with a float32 state stays within 2e-7.
    """
    in_f32 = case.map(torch.Tensor.float)
    plain = reference.fused_recurrent_gated_delta_rule(*in_f32.qkv, **(in_f32.options | options))
    assert plain[1] is not None
    return bounds.relative_error(plain[0].double(), exact[0]), bounds.relative_error(plain[1].double(), exact[1])


def channels_of(case: Case) -> dict[str, Tensor]:
    """Draws gk and gv, weak and strong ones. The case's own gates have one number per head."""
    random = torch.Generator().manual_seed(1)
    sizes = {"gk": case.q.shape[-1], "gv": case.v.shape[-1]}
    draws = {name: torch.randn(*case.g.shape, size, generator=random) for name, size in sizes.items()}
    return {name: -draw.exp() * 0.1 for name, draw in draws.items()}
