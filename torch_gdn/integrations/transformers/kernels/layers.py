"""Defines layers whose forward `kernels` substitutes for a function or a layer of transformers.

`self` is the patched object. Its class has the original, which gets the calls that torch_gdn does not take.
`kernels` matches the names and the arguments of forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from torch_gdn.integrations.transformers.dispatch import dispatcher


def dispatcher_in(layer: nn.Module, function: str) -> Callable[..., Any]:
    return dispatcher(function, functools.partial(type(layer).forward, layer))


class Layer(nn.Module):
    can_torch_compile = True
    has_backward = False


class chunk_gated_delta_rule(Layer):
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        return dispatcher_in(self, "chunk_gated_delta_rule")(
            query,
            key,
            value,
            g=g,
            beta=beta,
            chunk_size=chunk_size,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **kwargs,
        )


class fused_recurrent_gated_delta_rule(Layer):
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        return dispatcher_in(self, "fused_recurrent_gated_delta_rule")(
            query,
            key,
            value,
            g=g,
            beta=beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **kwargs,
        )


class causal_conv1d_fn(Layer):
    def forward(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        return dispatcher_in(self, "causal_conv1d_fn")(hidden_states, weight, bias, activation=activation, **kwargs)


class causal_conv1d_update(Layer):
    def forward(
        self,
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        return dispatcher_in(self, "causal_conv1d_update")(hidden_states, conv_state, weight, bias, activation)


class RMSNormGated(Layer):
    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return dispatcher("rms_norm_gated", type(self).forward)(self, hidden_states, gate)


class Qwen3_5GatedDeltaNet(Layer):
    """Runs transformers' own forward, which calls torch_gdn while it is enabled."""

    def forward(
        self,
        hidden_states: Tensor,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        output: Tensor = type(self).forward(
            self, hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs
        )
        return output
