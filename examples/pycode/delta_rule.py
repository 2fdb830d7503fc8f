"""The chunked gated delta rule in differentiable PyTorch, for training. torch_gdn's own kernels only run forward."""

from typing import Any

import torch
from torch.nn.functional import normalize

CHUNK = 64


def chunks(x: torch.Tensor) -> torch.Tensor:
    """Returns [B, H, T / CHUNK, CHUNK, ...] in f32 from [B, T, H, ...]."""
    return x.float().transpose(1, 2).unflatten(2, (-1, CHUNK))


@torch.autocast("cuda", enabled=False)
def differentiable_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    """Computes the rule for training, with transformers' names: whole sequences from an empty state, T a multiple of
    64, and normalised q and k.

    Chunk by chunk, with c the decay's logarithm since the chunk began and S the state:
    u = (I + A)^-1 beta (v - exp(c) k S), o = exp(c) q S + tril(q k^T exp(c_i - c_j)) u, and then S takes k u^T in.
    """
    q, k, v, g, beta = (chunks(x) for x in (query, key, value, g, beta))
    q, k = normalize(q, dim=-1) * q.shape[-1] ** -0.5, normalize(k, dim=-1)
    c = g.cumsum(-1).unsqueeze(-1)
    past = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (c - c.mT).masked_fill(~past, -torch.inf).exp()  # exp(c_i - c_j) for j <= i
    system = (beta.unsqueeze(-1) * (k @ k.mT) * decay).tril(-1)  # A; the unit diagonal is implied
    wanted = torch.cat([v, k * c.exp()], dim=-1) * beta.unsqueeze(-1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    attention, read = (q @ k.mT) * decay, q * c.exp()
    leaving, written = c[..., -1:, :].exp(), (k * (c[..., -1:, :] - c).exp()).mT

    state = torch.zeros(*u.shape[:2], k.shape[-1], v.shape[-1], device=q.device)
    outputs = []
    for u_i, w_i, attention_i, read_i, leaving_i, written_i in zip(
        *(x.unbind(2) for x in (u, w, attention, read, leaving, written)), strict=True
    ):
        new = u_i - w_i @ state
        outputs.append(read_i @ state + attention_i @ new)
        state = leaving_i * state + written_i @ new
    return torch.cat(outputs, dim=2).transpose(1, 2).to(query.dtype), None
