"""Mixtures of experts: the router and the two products."""

import torch
from torch import Tensor

__all__ = ["moe_down", "moe_gate_up", "moe_logits", "moe_router"]


def moe_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Multiplies tokens with a router's weight in float32: router_logits = x Wᵀ.

    DeepSeek-V3's router computes its logits so, whatever the model's dtype is: transformers copies x and the weight to
    float32 first. Products of 16-bit numbers are exact in float32, so without the copies the logits are as close. On
    `mps` this is one launch. `moe_router` takes the logits.

    Args:
        x: [T, D], bfloat16, float16 or float32. Copied if the last stride is not 1.
        weight: [E, D], x's dtype. The last stride must be 1.

    Returns:
        router_logits: [T, E], float32.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.moe_logits(torch.ones(1, 2, dtype=torch.bfloat16), torch.eye(3, 2, dtype=torch.bfloat16))
        tensor([[1., 1., 0.]])
    """
    return torch.ops.gdn.moe_logits(x, weight)


def moe_router(
    router_logits: Tensor,
    top_k: int,
    scoring: str = "softmax",
    correction_bias: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Chooses the top_k experts of each token and their weights.

    vLLM: `fused_topk` and `grouped_topk`; transformers: the routers of Qwen3-Next, Qwen3.5 and DeepSeek-V3. The experts
    with the highest score + bias are chosen, highest first; the lower id wins a tie. A weight is the score without the
    bias. On `mps` this is one launch.

    Args:
        router_logits: [T, E], bfloat16, float16 or float32. E is at most 1024. Copied if the last stride is not 1.
        top_k: Experts per token: at most 32, and at most those that can be chosen.
        scoring: "softmax" over all experts, or "sigmoid". Default: "softmax".
        correction_bias: [E], bfloat16, float16 or float32. Added to the scores for the choice. Default: zeros.
        n_group: Number of groups of neighbouring experts, a divisor of E and at most 32. Default: 1.
        topk_group: Number of groups whose experts can be chosen. A group counts the sum of its two highest values if
            there is a bias, else its highest value. Default: 1.
        renormalize: Whether to divide the weights of a token by their sum + 1e-20. Default: True.
        routed_scaling_factor: Multiplies the weights. Default: 1.0.

    Returns:
        topk_weights: [T, K], float32. K is top_k.
        topk_ids: [T, K], int32.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.moe_router(torch.tensor([[0.0, 2.0, 1.0]]), 2)
        (tensor([[0.7311, 0.2689]]), tensor([[1, 2]], dtype=torch.int32))
    """
    return torch.ops.gdn.moe_router(
        router_logits, top_k, scoring, correction_bias, n_group, topk_group, renormalize, routed_scaling_factor
    )


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

    The weights are numbers, or packed as `quantized_linear` describes them: codes with scales and biases, or e4m3 or
    MXFP4 with scales alone. Blocks of rows of e4m3 are those of gate and up together. Where the experts are packed, the
    shared expert may be packed too, also in another way. Sums are float32, and a result is rounded once. On `mps` up to
    8 tokens take one launch, which reads each active expert's weights once; more tokens take two, which read them once
    per 32 tokens of the expert.

    Args:
        x: [T, D], bfloat16, float16 or float32. Copied if the last stride is not 1.
        w_gate_up: [E, 2 * I, W], x's dtype, int32 or uint8. W is D, or D * bits / 32 of codes. The rows of gate, then
            those of up, as transformers and vLLM keep them. The last stride must be 1.
        topk_ids: [T, K], int32 or int64. Any strides. Ids below E; a negative one leaves out its pair.
        shared_gate_proj: [IS, V], x's dtype, int32 or uint8. V is D, or D * bits / 32 of codes. The shared expert's
            weights, whose last stride must be 1. Default: no shared expert.
        shared_up_proj: [IS, V], x's dtype, int32 or uint8. Given with shared_gate_proj, and packed like it. Default:
            None.
        w_scales: [E, R, G], bfloat16, float16, float32 or uint8. For codes R is 2 * I and G is D / group; see
            `quantized_linear`. The last stride must be 1. Default: w_gate_up is not packed.
        w_biases: [E, R, G], float32 if w_scales are float32, else w_scales' dtype or uint8. See `quantized_linear`.
            Given with w_scales, except for e4m3 and MXFP4. Default: None.
        shared_gate_scales: [S, F], bfloat16, float16, float32 or uint8. For codes S is IS and F is D / group. Default:
            shared_gate_proj is not packed.
        shared_gate_biases: [S, F], float32 if shared_gate_scales are float32, else shared_gate_scales'
            dtype or uint8. Given with shared_gate_scales, except for e4m3 and MXFP4. Default: None.
        shared_up_scales: [S, F], shared_gate_scales' dtype. Given with shared_gate_scales. Default: None.
        shared_up_biases: [S, F], shared_gate_biases' dtype. Given with them. Default: None.

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
    shared_scales = (shared_gate_scales, shared_gate_biases, shared_up_scales, shared_up_biases)
    return torch.ops.gdn.moe_gate_up(
        x, w_gate_up, topk_ids, shared_gate_proj, shared_up_proj, w_scales, w_biases, *shared_scales
    )


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
    W_shared), plus residual. The weights are numbers or packed, as `moe_gate_up` says. Sums are float32 in a
    fixed order, and y is rounded once. On `mps` up to 8 tokens take one launch, which reads each active expert's
    weights once; more tokens take three, with a float32 [T * K, D] in between.

    Args:
        hidden: [T, K, I], bfloat16, float16 or float32. Copied unless contiguous.
        w_down: [E, D, W], hidden's dtype, int32 or uint8. W is I, or I * bits / 32 of codes. The last stride must be 1.
        topk_weights: [T, K], bfloat16, float16 or float32. Any strides.
        topk_ids: [T, K], int32 or int64. Any strides. Ids below E; a negative one leaves out its pair.
        shared_hidden: [T, IS], hidden's dtype. Copied unless contiguous. Default: no shared expert.
        shared_down_proj: [D, V], hidden's dtype, int32 or uint8. V is IS, or IS * bits / 32 of codes. Given with
            shared_hidden; the last stride must be 1. Default: None.
        shared_gate: [T, 1], bfloat16, float16 or float32. Its sigmoid is the shared expert's weight. Default: a weight
            of 1.
        w_scales: [E, R, G], bfloat16, float16, float32 or uint8. For codes R is D and G is I / group; see
            `quantized_linear`. The last stride must be 1. Default: w_down is not packed.
        w_biases: [E, R, G], float32 if w_scales are float32, else w_scales' dtype or uint8. See `quantized_linear`.
            Given with w_scales, except for e4m3 and MXFP4. Default: None.
        shared_scales: [S, F], bfloat16, float16, float32 or uint8. For codes S is D and F is IS / group. Default:
            shared_down_proj is not packed.
        shared_biases: [S, F], float32 if shared_scales are float32, else shared_scales' dtype or uint8. Given with
            shared_scales, except for e4m3 and MXFP4. Default: None.
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
    shared = (shared_hidden, shared_down_proj, shared_gate)
    scales = (w_scales, w_biases, shared_scales, shared_biases)
    return torch.ops.gdn.moe_down(hidden, w_down, topk_weights, topk_ids, *shared, *scales, residual)
