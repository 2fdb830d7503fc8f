"""Defines layers whose forward `kernels` substitutes for a function or a layer of transformers.

`self` is the patched object. Its class has the original, which gets the calls that torch_gdn does not take.
`kernels` matches the names and the arguments of forward.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor, nn

from torch_gdn.integrations.transformers.dispatch import dispatcher, own_binder
from torch_gdn.integrations.transformers.versions import CACHE_NAMES


class Layer(nn.Module):
    can_torch_compile = True
    has_backward = False


def signature(required: str, defaults: dict[str, Any], takes_more: bool = True) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    arguments = [inspect.Parameter(name, kind) for name in ("self", *required.split())]
    arguments += [inspect.Parameter(name, kind, default=default) for name, default in defaults.items()]
    if takes_more:
        arguments.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(arguments)


def layer(function: str, required: str, defaults: dict[str, Any], takes_more: bool = True) -> type[Layer]:
    """Makes a layer that takes the place of a function with these arguments."""
    binder = own_binder(function)

    def forward(self: Layer, *args: Any, **kwargs: Any) -> Any:
        return dispatcher(function, functools.partial(type(self).forward, self), binder=binder)(*args, **kwargs)

    forward.__signature__ = signature(required, defaults, takes_more)  # type: ignore[attr-defined]
    return type(function, (Layer,), {"forward": forward, "__module__": __name__})


RULE = "query key value g beta"
STATES = {"initial_state": None, "output_final_state": False, "use_qk_l2norm_in_kernel": False}
BIAS = {"bias": None, "activation": None}
chunk_gated_delta_rule = layer("chunk_gated_delta_rule", RULE, {"chunk_size": 64} | STATES)
fused_recurrent_gated_delta_rule = layer("fused_recurrent_gated_delta_rule", RULE, STATES)
causal_conv1d_fn = layer("causal_conv1d_fn", "hidden_states weight", BIAS)
causal_conv1d_update = layer("causal_conv1d_update", "hidden_states conv_state weight", BIAS, takes_more=False)


of_gated_norm = own_binder("rms_norm_gated")


class RMSNormGated(Layer):
    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return dispatcher("rms_norm_gated", type(self).forward, binder=of_gated_norm)(self, hidden_states, gate)


class Qwen3_5GatedDeltaNet(Layer):
    """Runs transformers' own forward, which calls torch_gdn while it is enabled."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = type(self).forward(self, *args, **kwargs)
        return output

    forward.__signature__ = signature(  # type: ignore[attr-defined]
        "hidden_states", {CACHE_NAMES.delta_net: None, "attention_mask": None}
    )
