"""What mypy takes the results of overloaded functions to be; tests/tools/test_typing.py runs it, nothing imports it."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import assert_type

import torch_gdn
from torch_gdn import (
    causal_conv1d,
    causal_conv1d_fn,
    causal_conv1d_update,
    chunk_fwd_h,
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_,
    chunk_kda,
    fused_recurrent_gated_delta_rule,
)


def prefill(x: Tensor, wanted: bool) -> None:
    rule = chunk_gated_delta_rule
    assert_type(rule(x, x, x, x, x), tuple[Tensor, None])
    assert_type(rule(x, x, x, g=x, beta=x, scale=0.5, cu_seqlens=x), tuple[Tensor, None])
    assert_type(rule(x, x, x, x, x, initial_state=x, output_final_state=True), tuple[Tensor, Tensor])
    assert_type(rule(x, x, x, x, x, output_final_state=wanted), tuple[Tensor, Tensor | None])
    assert_type(rule(x, x, x, x, x, return_intermediate_states=True), tuple[Tensor, Tensor | None, Tensor])
    rule(x, x, x, x, x, chunk_sise=64)  # type: ignore[call-overload]


def prefill_of_kda(x: Tensor, wanted: bool) -> None:
    assert_type(chunk_kda(x, x, x, x, x, lower_bound=-5.0), tuple[Tensor, Tensor | None])
    assert_type(
        chunk_kda(x, x, x, x, x, output_final_state=wanted, return_intermediate_states=True),
        tuple[Tensor, Tensor | None, Tensor],
    )


def decode(x: Tensor, wanted: bool) -> None:
    rule = fused_recurrent_gated_delta_rule
    assert_type(rule(x, x, x), tuple[Tensor, None])
    assert_type(rule(x, x, x, x, beta=x, output_final_state=True, A_log=x), tuple[Tensor, Tensor])
    assert_type(rule(x, x, x, gk=x, output_final_state=wanted), tuple[Tensor, Tensor | None])


def imported_when_first_used() -> None:
    assert_type(torch_gdn.enable(rollback=True).enabled, bool)
    assert_type(torch_gdn.disable().taken, dict[str, int])
    assert_type(torch_gdn.status().transformers, str)
    assert_type(torch_gdn.tune.positive("1"), int)
    torch_gdn.enabel()  # type: ignore[attr-defined]


def in_place(x: Tensor) -> None:
    assert_type(chunk_gated_delta_rule_(x, x, x, x, x, x), Tensor)
    assert_type(
        chunk_gated_delta_rule_(x, x, x, x, x, x, x, null_index=0, return_intermediate_states=True),
        tuple[Tensor, Tensor],
    )


def around_the_rule(x: Tensor, wanted: bool) -> None:
    assert_type(causal_conv1d(x, x, activation="silu"), tuple[Tensor, None])
    assert_type(causal_conv1d(x, x, x, None, x, output_final_state=True), tuple[Tensor, Tensor])
    assert_type(causal_conv1d(x, x, output_final_state=wanted), tuple[Tensor, Tensor | None])
    assert_type(causal_conv1d_fn(x, x), Tensor)
    assert_type(causal_conv1d_fn(x, x, return_final_states=True), tuple[Tensor, Tensor])
    assert_type(causal_conv1d_fn(x, x, x, None, x, True, x, "silu"), tuple[Tensor, Tensor])
    assert_type(causal_conv1d_update(x, x, weight=x), tuple[Tensor, Tensor])


def stages(x: Tensor) -> None:
    assert_type(chunk_fwd_h(x, x, x), tuple[Tensor, Tensor, None])
    assert_type(chunk_fwd_h(x, x, x, output_final_state=True), tuple[Tensor, Tensor, Tensor])
