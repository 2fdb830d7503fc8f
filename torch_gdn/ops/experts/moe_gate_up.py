from __future__ import annotations

import torch
from torch import Tensor


def moe_gate_up(
    x: Tensor,
    w_gate_up: Tensor,
    topk_ids: Tensor,
    shared_gate_proj: Tensor | None = None,
    shared_up_proj: Tensor | None = None,
    w_scales: Tensor | None = None,
    w_biases: Tensor | None = None,
    shared_gate_scales: Tensor | None = None,
    shared_gate_biases: Tensor | None = None,
    shared_up_scales: Tensor | None = None,
    shared_up_biases: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Multiplies each token with the gate and up matrices of its experts: silu(x W_gate) * (x W_up).

    The weights are numbers, or packed codes of 4 or 8 bits as `quantized_linear` describes them; then they have scales
    and biases. Where the experts are packed, the shared expert may be packed too, also with another number of bits.
    Sums are float32, and a result is rounded once. On `mps` up to 8 tokens take one launch, which reads each active
    expert's weights once; more tokens take two, which read them once per 32 tokens of the expert.

    Args:
        x: [T, D], bfloat16, float16 or float32. Copied if the last stride is not 1.
        w_gate_up: [E, 2 * I, W], x's dtype or int32. W is D, or D * bits / 32 of packed rows. The rows of gate, then
            those of up, as transformers and vLLM keep them. The last stride must be 1.
        topk_ids: [T, K], int32 or int64. Any strides. Ids below E; a negative one leaves out its pair.
        shared_gate_proj: [IS, V], x's dtype or int32. V is D, or D * bits / 32 of packed rows. The shared expert's
            weights, whose last stride must be 1. Default: no shared expert.
        shared_up_proj: [IS, V], x's dtype or int32. Given with shared_gate_proj, and packed as it is. Default: None.
        w_scales: [E, 2 * I, G], bfloat16, float16 or float32. G is D / group, and a group has 32, 64 or 128 codes.
            The last stride must be 1. Default: w_gate_up is not packed.
        w_biases: [E, 2 * I, G], float32 if w_scales are float32, else w_scales' dtype or uint8. See `quantized_linear`.
            Given with w_scales. Default: None.
        shared_gate_scales: [IS, F], bfloat16, float16 or float32. F is D / group. Default: shared_gate_proj
            is not packed.
        shared_gate_biases: [IS, F], float32 if shared_gate_scales are float32, else shared_gate_scales'
            dtype or uint8. Given with shared_gate_scales. Default: None.
        shared_up_scales: [IS, F], shared_gate_scales' dtype. Given with shared_gate_scales. Default: None.
        shared_up_biases: [IS, F], shared_gate_biases' dtype. Given with shared_gate_scales. Default: None.

    Returns:
        hidden: [T, K, I], x's dtype. The rows of pairs that are left out are zeros.
        shared_hidden: [T, IS], x's dtype; [0] unless shared_gate_proj.

    Raises:
        RuntimeError: On `mps`, at the next synchronisation, if an id is wrong. It counts as a negative one.

    Example:
        >>> import torch, torch_gdn
        >>> x, weights = torch.ones(1, 2), torch.tensor([[[1.0, 0.0], [2.0, 1.0]]])
        >>> torch_gdn.moe_gate_up(x, weights, torch.tensor([[0]]))[0]
        tensor([[[2.1932]]])
    """
    return torch.ops.gdn.moe_gate_up(
        x,
        w_gate_up,
        topk_ids,
        shared_gate_proj,
        shared_up_proj,
        w_scales,
        w_biases,
        shared_gate_scales,
        shared_gate_biases,
        shared_up_scales,
        shared_up_biases,
    )
