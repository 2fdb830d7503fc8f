"""What mypy takes the results of the public functions to be; tests/tools/test_typing.py runs it, nothing imports it."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import assert_type

from torch_gdn import (
    aura_attention,
    aura_decode,
    aura_encode,
    causal_conv1d,
    causal_conv1d_fn,
    causal_conv1d_update,
    causal_conv1d_update_,
    chunk_fwd_h,
    chunk_fwd_o,
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gated_delta_rule_,
    gdn_gating,
    l2norm,
    rms_norm_gated,
)


def prefill(x: Tensor, wanted: bool) -> None:
    rule = chunk_gated_delta_rule
    assert_type(rule(x, x, x, x, x), tuple[Tensor, None])
    assert_type(rule(x, x, x, g=x, beta=x, scale=0.5, cu_seqlens=x), tuple[Tensor, None])
    assert_type(rule(x, x, x, x, x, initial_state=x, output_final_state=True), tuple[Tensor, Tensor])
    assert_type(rule(x, x, x, x, x, output_final_state=wanted), tuple[Tensor, Tensor | None])
    assert_type(rule(x, x, x, x, x, return_intermediate_states=True), tuple[Tensor, Tensor | None, Tensor])
    rule(x, x, x, x, x, chunk_sise=64)  # type: ignore[call-overload]


def decode(x: Tensor, wanted: bool) -> None:
    rule = fused_recurrent_gated_delta_rule
    assert_type(rule(x, x, x), tuple[Tensor, None])
    assert_type(rule(x, x, x, x, beta=x, output_final_state=True, A_log=x), tuple[Tensor, Tensor])
    assert_type(rule(x, x, x, gk=x, output_final_state=wanted), tuple[Tensor, Tensor | None])


def in_place(x: Tensor) -> None:
    assert_type(chunk_gated_delta_rule_(x, x, x, x, x, x), Tensor)
    assert_type(
        chunk_gated_delta_rule_(x, x, x, x, x, x, x, null_index=0, return_intermediate_states=True),
        tuple[Tensor, Tensor],
    )
    assert_type(fused_recurrent_gated_delta_rule_(x, x, x, None, None, x), Tensor)
    assert_type(causal_conv1d_update_(x, x, x), Tensor)


def around_the_rule(x: Tensor, wanted: bool) -> None:
    assert_type(causal_conv1d(x, x, activation="silu"), tuple[Tensor, None])
    assert_type(causal_conv1d(x, x, x, None, x, output_final_state=True), tuple[Tensor, Tensor])
    assert_type(causal_conv1d(x, x, output_final_state=wanted), tuple[Tensor, Tensor | None])
    assert_type(causal_conv1d_fn(x, x), Tensor)
    assert_type(causal_conv1d_fn(x, x, return_final_states=True), tuple[Tensor, Tensor])
    assert_type(causal_conv1d_fn(x, x, x, None, x, True, x, "silu"), tuple[Tensor, Tensor])
    assert_type(causal_conv1d_update(x, x, weight=x), tuple[Tensor, Tensor])
    assert_type(gdn_gating(x, x, x), tuple[Tensor, Tensor])
    assert_type(l2norm(x), Tensor)
    assert_type(rms_norm_gated(x, x), Tensor)


def stages(x: Tensor) -> None:
    assert_type(chunk_fwd_h(x, x, x), tuple[Tensor, Tensor, None])
    assert_type(chunk_fwd_h(x, x, x, output_final_state=True), tuple[Tensor, Tensor, Tensor])
    assert_type(chunk_fwd_o(x, x, x, x), Tensor)


def aura(x: Tensor) -> None:
    assert_type(aura_encode(x, x, x, x), tuple[Tensor, Tensor, Tensor])
    assert_type(aura_decode(x, x, x, x), Tensor)
    assert_type(aura_attention(x, x, x, x, x, x, x, x, x), Tensor)
