from __future__ import annotations

import torch
from torch import Tensor


def moe_gate_up(
    x: Tensor,
    w_gate_up: Tensor,
    topk_ids: Tensor,
    shared_gate_proj: Tensor | None = None,
    shared_up_proj: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Multiplies each token with the gate and up matrices of its experts: silu(x W_gate) * (x W_up).

    Sums are float32, and a result is rounded once. On `mps` up to 8 tokens take one launch, which reads each active
    expert's weights once; more tokens take two, which read them once per 32 tokens of the expert.

    Args:
        x: [T, D], bfloat16, float16 or float32. Copied if the last stride is not 1.
        w_gate_up: [E, 2 * I, D], x's dtype. The rows of gate, then those of up, as transformers and vLLM keep them. The
            last stride must be 1.
        topk_ids: [T, K], int32 or int64. Any strides. Ids below E; a negative one leaves out its pair.
        shared_gate_proj: [IS, D], x's dtype. The shared expert's weights, whose last stride must be 1. Default: no
            shared expert.
        shared_up_proj: [IS, D], x's dtype. Given with shared_gate_proj. Default: None.

    Returns:
        hidden: [T, K, I], x's dtype. The rows of pairs that are left out are zeros.
        shared_hidden: [T, IS], x's dtype; [0] unless shared_gate_proj.

    Raises:
        ValueError: If a shape, a stride or an id is not as above. On `mps`, wrong ids are reported at the next
            synchronisation, and count as negative ones.
        TypeError: If a dtype is not as above.
        RuntimeError: If an input requires grad under grad mode.

    Example:
        >>> import torch, torch_gdn
        >>> x, weights = torch.ones(1, 2), torch.tensor([[[1.0, 0.0], [2.0, 1.0]]])
        >>> torch_gdn.moe_gate_up(x, weights, torch.tensor([[0]]))[0]
        tensor([[[2.1932]]])
    """
    return torch.ops.gdn.moe_gate_up(x, w_gate_up, topk_ids, shared_gate_proj, shared_up_proj)
