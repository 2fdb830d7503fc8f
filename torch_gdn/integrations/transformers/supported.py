"""Says which calls torch_gdn takes, before they are made."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch

from torch_gdn.integrations.transformers import dispatch, patches
from torch_gdn.integrations.transformers.dispatch import FUNCTIONS, reason_for


def supports(function: str, *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """Returns whether torch_gdn takes this call of a transformers model, and if not, why.

    Args:
        function: "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda",
            "fused_recurrent_kda", "causal_conv1d_fn" or "causal_conv1d_update"; "short_convolution", which OLMo-Hybrid
            has until 5.12, "rms_norm", "rms_norm_gated", "experts", "moe_block", "mlp", "attention" and
            "decoder_layer": these are a layer's forward, and its first argument is the layer; "rotation", of q and k by
            cos and sin; "gdn_decode", whose arguments are the layer, its input and both states.
        args, kwargs: the arguments of the model's call.

    Returns:
        supported: (True, "") or (False, the reason).

    Raises:
        ValueError: If the function is not one of these.
        TypeError: If an argument is unknown or missing.

    Example:
        >>> import torch
        >>> from torch_gdn.integrations.transformers import supports
        >>> q, g = torch.zeros(1, 8, 2, 64), torch.zeros(1, 8, 2)
        >>> supports("chunk_gated_delta_rule", q, q, q, g=g, beta=g)
        (True, '')
        >>> supports("chunk_gated_delta_rule", q, q, q, g=g, beta=g, chunk_size=100)
        (False, 'chunk_size: expected 16, 32 or 64, got 100')
    """
    if function not in FUNCTIONS:
        raise ValueError(f"supports: function: expected one of {', '.join(FUNCTIONS)}, got {function!r}")
    reason_of = FUNCTIONS[function].reason
    try:
        inspect.signature(reason_of).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"supports: arguments of {function}: {error}") from None
    if args and isinstance(args[0], torch.nn.Module):
        learn_models_of(args[0])
    reason = reason_for(reason_of, args, kwargs)
    return not reason, reason


def learn_models_of(layer: torch.nn.Module) -> None:
    """Learns the classes of the layer's model. Otherwise only enable() learns them."""
    if not dispatch.enabled:
        patches.learn(sys.modules[type(layer).__module__])
