"""Tests FLA's arguments of both rules: their order, their old spellings, those without effect, those refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import torch_gdn
from tests.helpers.cases import make_case

# These are the signatures of FLA 0.6.0, from fla/ops/gated_delta_rule and fla/ops/kda.
POSITIONAL = {
    "chunk_gated_delta_rule": (
        "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel "
        "allow_neg_eigval state_v_first cu_seqlens cu_seqlens_cpu chunk_indices cp_context"
    ),
    "fused_recurrent_gated_delta_rule": (
        "q k v g gk gv beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel A_log "
        "dt_bias use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens"
    ),
    "chunk_kda": (
        "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel "
        "use_beta_sigmoid_in_kernel allow_neg_eigval safe_gate lower_bound disable_recompute "
        "return_intermediate_states state_v_first cu_seqlens cu_seqlens_cpu cp_context use_graph max_num_seqs"
    ),
    "fused_recurrent_kda": (
        "q k v g beta A_log dt_bias scale initial_state output_final_state use_qk_l2norm_in_kernel "
        "use_gate_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval lower_bound state_v_first cu_seqlens"
    ),
    "fused_kda_gate": "g A_log dt_bias lower_bound output_dtype",
}
KEYWORDS = {"use_gate_in_kernel", "A_log", "dt_bias", "transpose_state_layout"}
RULES = [name for name in POSITIONAL if name != "fused_kda_gate"]
CHUNKED = [name for name in RULES if name.startswith("chunk")]
HEAD_FIRST = [name for name in RULES if name.endswith("gated_delta_rule")]
GATE = {"use_gate_in_kernel": True, "A_log": torch.zeros(2)}


def call(function: str, **options: Any) -> Any:
    """Calls the function with five tokens, K = 16 and V = 8."""
    case = make_case(5, 16, 8)
    assert case.initial_state is not None
    if options.get("state_v_first") or options.get("transpose_state_layout"):
        case.initial_state = case.initial_state.transpose(-1, -2)
    if function.endswith("kda"):
        case.g = case.g[..., None].expand(*case.g.shape, 16)
    return getattr(torch_gdn, function)(*case.qkv, **(case.options | options))


@pytest.mark.parametrize("function", POSITIONAL)
def test_every_argument_is_there_by_name_and_in_order(function: str) -> None:
    parameters = inspect.signature(getattr(torch_gdn, function)).parameters
    positional = [name for name, each in parameters.items() if each.kind == each.POSITIONAL_OR_KEYWORD]
    assert positional == POSITIONAL[function].split()
    assert function not in RULES or parameters.keys() >= KEYWORDS
    assert function not in HEAD_FIRST or "head_first" in parameters
    assert not [each for each in parameters.values() if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]


@pytest.mark.parametrize("function", RULES)
def test_the_old_name_of_state_v_first_warns(function: str) -> None:
    with pytest.warns(DeprecationWarning, match="transpose_state_layout is deprecated; use state_v_first"):
        old = call(function, transpose_state_layout=True)
    new = call(function, state_v_first=True)
    assert old[1].shape == (1, 2, 8, 16) and torch.equal(old[0], new[0]) and torch.equal(old[1], new[1])
    with pytest.raises(ValueError, match="transpose_state_layout: expected None when state_v_first is set"):
        call(function, transpose_state_layout=True, state_v_first=True)


@pytest.mark.parametrize("function", HEAD_FIRST)
def test_head_first_is_an_error_and_its_default_a_warning(function: str) -> None:
    with pytest.raises(ValueError, match="head_first: expected False"):
        call(function, head_first=True)
    with pytest.warns(DeprecationWarning, match="head_first is deprecated"):
        call(function, head_first=False)


@pytest.mark.parametrize("function", CHUNKED)
def test_a_copy_of_cu_seqlens_must_be_one(function: str) -> None:
    cu_seqlens = torch.tensor([0, 5])
    given = call(function, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens)
    assert torch.equal(given[0], call(function, cu_seqlens=cu_seqlens)[0])
    with pytest.raises(ValueError, match="cu_seqlens_cpu: expected a copy of cu_seqlens"):
        call(function, cu_seqlens=cu_seqlens, cu_seqlens_cpu=torch.tensor([0, 3, 5]))
    with pytest.raises(ValueError, match="cu_seqlens_cpu: expected None when cu_seqlens is None"):
        call(function, cu_seqlens_cpu=cu_seqlens)
    with pytest.raises(ValueError, match="cp_context: expected None"):
        call(function, cp_context=object())


@pytest.mark.parametrize("bound", [{}, {"lower_bound": -6.0}], ids=["no bound", "-6"])
def test_the_bound_of_a_safe_gate(bound: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"^chunk_kda: lower_bound: expected a number from -5 to 0"):
        call("chunk_kda", **GATE, **bound, safe_gate=True)


def test_options_of_training_and_graphs_change_nothing() -> None:
    options = {"disable_recompute": True, "use_graph": True, "max_num_seqs": 1, "chunk_size": 32, "safe_gate": True}
    assert torch.equal(call("chunk_kda", **options)[0], call("chunk_kda")[0])


@pytest.mark.parametrize("function", RULES)
def test_parameters_of_a_gate_that_is_not_used_are_not_read(function: str) -> None:
    """As in FLA, layers pass them whether or not the kernel computes the gate."""
    unused = {"A_log": torch.ones(7), "dt_bias": torch.ones(9)} | ({"lower_bound": -3.0} if "kda" in function else {})
    assert torch.equal(call(function, **unused)[0], call(function)[0])
