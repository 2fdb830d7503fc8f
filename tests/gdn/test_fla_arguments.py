"""FLA's arguments: their order, their old spellings, and those without effect here."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from tests.helpers.cases import END_TO_END_OPS, make_case

# The signatures of FLA 0.6.0, fla/ops/gated_delta_rule.
POSITIONAL = {
    "chunk_gated_delta_rule": (
        "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel "
        "allow_neg_eigval state_v_first cu_seqlens cu_seqlens_cpu chunk_indices cp_context"
    ),
    "fused_recurrent_gated_delta_rule": (
        "q k v g gk gv beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel A_log "
        "dt_bias use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens"
    ),
}
KEYWORDS = ("use_gate_in_kernel", "A_log", "dt_bias", "transpose_state_layout", "head_first")
each_op = pytest.mark.parametrize("op", END_TO_END_OPS)


def call(op: str, **options: Any) -> Any:
    case = make_case(5, 16, 8)
    assert case.initial_state is not None
    if options.get("state_v_first") or options.get("transpose_state_layout"):
        case.initial_state = case.initial_state.transpose(-1, -2)
    return END_TO_END_OPS[op](*case.qkv, **(case.options | options))


@each_op
def test_every_argument_is_there_by_name_and_in_order(op: str) -> None:
    parameters = inspect.signature(END_TO_END_OPS[op]).parameters
    positional = [name for name, each in parameters.items() if each.kind == each.POSITIONAL_OR_KEYWORD]
    assert positional == POSITIONAL[op].split()
    assert set(KEYWORDS) <= set(parameters)
    assert not [each for each in parameters.values() if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]


@each_op
def test_the_old_name_of_state_v_first_warns(op: str) -> None:
    with pytest.warns(DeprecationWarning, match="transpose_state_layout is deprecated; use state_v_first"):
        old = call(op, transpose_state_layout=True)
    new = call(op, state_v_first=True)
    assert old[1].shape == (1, 2, 8, 16) and torch.equal(old[0], new[0]) and torch.equal(old[1], new[1])


@each_op
def test_both_names_of_state_v_first_are_an_error(op: str) -> None:
    with pytest.raises(ValueError, match="transpose_state_layout: expected None when state_v_first is set"):
        call(op, transpose_state_layout=True, state_v_first=True)


@each_op
def test_head_first_is_an_error_and_its_default_a_warning(op: str) -> None:
    with pytest.raises(ValueError, match="head_first: expected False"):
        call(op, head_first=True)
    with pytest.warns(DeprecationWarning, match="head_first is deprecated"):
        call(op, head_first=False)


def test_context_parallelism_is_an_error() -> None:
    with pytest.raises(ValueError, match="cp_context: expected None"):
        call("chunk_gated_delta_rule", cp_context=object())


def test_a_copy_of_cu_seqlens_must_be_one() -> None:
    cu_seqlens = torch.tensor([0, 5])
    given = call("chunk_gated_delta_rule", cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens)
    assert torch.equal(given[0], call("chunk_gated_delta_rule", cu_seqlens=cu_seqlens)[0])
    with pytest.raises(ValueError, match="cu_seqlens_cpu: expected a copy of cu_seqlens"):
        call("chunk_gated_delta_rule", cu_seqlens=cu_seqlens, cu_seqlens_cpu=torch.tensor([0, 3, 5]))
    with pytest.raises(ValueError, match="cu_seqlens_cpu: expected None when cu_seqlens is None"):
        call("chunk_gated_delta_rule", cu_seqlens_cpu=cu_seqlens)


@each_op
def test_parameters_of_a_gate_that_is_not_used_are_not_read(op: str) -> None:
    """Layers pass them whether or not the kernel computes the gate, as in FLA."""
    assert torch.equal(call(op, A_log=torch.ones(7), dt_bias=torch.ones(9))[0], call(op)[0])
