from __future__ import annotations

from torch import Tensor

from torch_gdn.reference.common import beta_of, compute_dtype, log_decay_of


def gdn_gating(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor | None = None, allow_neg_eigval: bool = False
) -> tuple[Tensor, Tensor]:
    """g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b), or twice that."""
    dtype = compute_dtype(a)
    return log_decay_of(a.to(dtype), True, A_log, dt_bias), beta_of(b.to(dtype), True, allow_neg_eigval)
