from __future__ import annotations

import torch
from torch import Tensor


def moe_down(
    hidden: Tensor,
    w_down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    shared_hidden: Tensor | None = None,
    shared_down_proj: Tensor | None = None,
    shared_gate: Tensor | None = None,
    w_scales: Tensor | None = None,
    w_biases: Tensor | None = None,
    shared_scales: Tensor | None = None,
    shared_biases: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Multiplies what `moe_gate_up` returned with the experts' down matrices, and adds up each token's results.

    y is the sum over a token's experts of weight * (hidden W_down), plus sigmoid(shared_gate) * (shared_hidden
    W_shared), plus residual. The weights are numbers or packed codes, as `moe_gate_up` says. Sums are float32 in a
    fixed order, and y is rounded once. On `mps` up to 8 tokens take one launch, which reads each active expert's
    weights once; more tokens take three, with a float32 [T * K, D] in between.

    Args:
        hidden: [T, K, I], bfloat16, float16 or float32. Copied unless contiguous.
        w_down: [E, D, W], hidden's dtype or int32. W is I, or I * bits / 32 of packed rows. The last stride must be 1.
        topk_weights: [T, K], bfloat16, float16 or float32. Any strides.
        topk_ids: [T, K], int32 or int64. Any strides. Ids below E; a negative one leaves out its pair.
        shared_hidden: [T, IS], hidden's dtype. Copied unless contiguous. Default: no shared expert.
        shared_down_proj: [D, V], hidden's dtype or int32. V is IS, or IS * bits / 32 of packed rows. Given with
            shared_hidden; the last stride must be 1. Default: None.
        shared_gate: [T, 1], bfloat16, float16 or float32. Its sigmoid is the shared expert's weight. Default: a weight
            of 1.
        w_scales: [E, D, G], bfloat16, float16 or float32. G is I / group, and a group has 32, 64 or 128 codes. The last
            stride must be 1. Default: w_down is not packed.
        w_biases: [E, D, G], float32 if w_scales are float32, else w_scales' dtype or uint8. See `quantized_linear`.
            Given with w_scales. Default: None.
        shared_scales: [D, F], bfloat16, float16 or float32. F is IS / group. Default: shared_down_proj is not packed.
        shared_biases: [D, F], float32 if shared_scales are float32, else shared_scales' dtype or uint8. Given with
            shared_scales. Default: None.
        residual: [T, D], hidden's dtype. Copied unless contiguous. Default: zeros.

    Returns:
        y: [T, D], hidden's dtype.

    Raises:
        RuntimeError: On `mps`, at the next synchronisation, if an id is wrong. It counts as a negative one.

    Example:
        >>> import torch, torch_gdn
        >>> hidden, weights = torch.ones(1, 2, 1), torch.tensor([[[1.0]], [[10.0]]])
        >>> torch_gdn.moe_down(hidden, weights, torch.tensor([[0.25, 0.75]]), torch.tensor([[1, 0]]))
        tensor([[3.2500]])
    """
    return torch.ops.gdn.moe_down(
        hidden,
        w_down,
        topk_weights,
        topk_ids,
        shared_hidden,
        shared_down_proj,
        shared_gate,
        w_scales,
        w_biases,
        shared_scales,
        shared_biases,
        residual,
    )
