"""Checks a whole Gated DeltaNet layer under torch.compile: Inductor's own Metal code around torch_gdn's ops."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_gdn
from torch_gdn import reference
from torch_gdn_check.registry.bounds import Part, relative_error
from torch_gdn_check.registry.on_the_cpu import on_the_cpu
from torch_gdn_check.steps import Outcome, Skipped, judged, refuse_simulated

BOUND = 1e-5  # for float32 computed in another order


class GatedDeltaNet(nn.Module):
    """A layer as models have it: projections, a short convolution, gates, the rule, a gated norm."""

    rule: Callable[..., tuple[Tensor, Tensor | None]] = staticmethod(torch_gdn.chunk_gated_delta_rule)

    def __init__(self, hidden: int = 64, key_heads: int = 1, value_heads: int = 2, size: int = 64) -> None:
        super().__init__()
        self.key_heads, self.value_heads, self.size = key_heads, value_heads, size
        self.channels = (2 * key_heads + value_heads) * size
        self.project = nn.Linear(hidden, self.channels + value_heads * size, bias=False)
        self.project_gates = nn.Linear(hidden, 2 * value_heads, bias=False)
        self.convolution = nn.Conv1d(self.channels, self.channels, 4, groups=self.channels, bias=False)
        self.A_log = nn.Parameter(torch.zeros(value_heads))
        self.dt_bias = nn.Parameter(torch.ones(value_heads))
        self.norm = nn.RMSNorm(size, eps=1e-6)  # the default depends on the dtype
        self.output = nn.Linear(value_heads * size, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        mixed, z = self.project(x).split([self.channels, self.value_heads * self.size], dim=-1)
        mixed = F.silu(self.convolution(F.pad(mixed.transpose(1, 2), (3, 0)))).transpose(1, 2).contiguous()
        heads = [self.key_heads, self.key_heads, self.value_heads]
        q, k, v = mixed.view(batch, tokens, -1, self.size).split(heads, dim=2)
        a, b = self.project_gates(x).chunk(2, dim=-1)
        g = -self.A_log.exp() * F.softplus(a + self.dt_bias)
        o, _ = self.rule(q, k, v, g, b.sigmoid(), use_qk_l2norm_in_kernel=True)
        gated = self.norm(o) * F.silu(z.view(batch, tokens, self.value_heads, self.size))
        return self.output(gated.flatten(2))


def no_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: object) -> tuple[Tensor, None]:
    """Takes the place of the rule in a layer without torch_gdn's ops."""
    return v * (g.exp() * beta)[..., None], None


def in_float64(layer: GatedDeltaNet, x: Tensor) -> Tensor:
    exact = copy.deepcopy(layer).double().eval()
    if layer.rule is not no_rule:
        exact.rule = reference.chunk_gated_delta_rule
    with on_the_cpu():
        result: Tensor = exact(x.double())
    return result


def compared(layer: GatedDeltaNet, x: Tensor, device: torch.device, backend: str) -> Part:
    exact = in_float64(layer, x)
    on_device = copy.deepcopy(layer).to(device).eval()
    compiled = torch.compile(on_device, backend=backend, fullgraph=True)(x.to(device)).cpu()
    return Part("output", "the whole", relative_error(compiled.double(), exact), BOUND)


def leave_out_what_fails_without_ops(layer: GatedDeltaNet, x: Tensor, device: torch.device, backend: str) -> None:
    layer.rule = no_rule
    try:
        part = compared(layer, x, device, backend)
        problem = "" if part.kept else str(part)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise Skipped(f"Inductor fails without torch_gdn's ops too: {problem}")


@torch.no_grad()
def check_layer(device: torch.device, backend: str = "inductor") -> Outcome:
    """Checks that the layer compiles without a graph break and equals the same layer in float64 on the CPU.

    If it does not, and the layer without torch_gdn's ops does not either, the fault is Inductor's.
    """
    refuse_simulated(device, "Inductor generates Metal code for real mps devices only")
    random = torch.random.get_rng_state()
    torch.manual_seed(0)
    layer, x = GatedDeltaNet(), torch.randn(2, 100, 64)
    torch.random.set_rng_state(random)
    try:
        part = compared(layer, x, device, backend)
    except Exception:
        leave_out_what_fails_without_ops(layer, x, device, backend)
        raise
    if not part.kept:
        leave_out_what_fails_without_ops(layer, x, device, backend)
    return judged([part])
