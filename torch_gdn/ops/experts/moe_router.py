from __future__ import annotations

import torch
from torch import Tensor


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
