"""FLA's arguments of Kimi Delta Attention: their order, those without effect, and what is refused in which words."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import torch_gdn
from tests.helpers.kda import FUNCTIONS, each_function, kda_inputs

# The signatures of fla/ops/kda.
POSITIONAL = {
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
GATE = {"use_gate_in_kernel": True, "A_log": torch.zeros(2)}
BAD: list[tuple[str, type[Exception], dict[str, Any]]] = [
    ("g: expected shape [B, T, HV, K] = [1, 5, 2, 32], got [1, 5, 2]", ValueError, {"g": torch.zeros(1, 5, 2)}),
    ("k: expected shape [B, T, H, K] = [1, 5, 1, 32], got [1, 5, 1, 16]", ValueError, {"k": torch.zeros(1, 5, 1, 16)}),
    ("beta: expected a floating dtype, got int64", TypeError, {"beta": torch.zeros(1, 5, 2, dtype=torch.int64)}),
    ("g: expected a floating dtype, got int64", TypeError, {"g": torch.zeros(1, 5, 2, 32, dtype=torch.int64)}),
    ("g: expected a tensor that does not require grad", RuntimeError, {"g": torch.zeros(1, 5, 2, 32).requires_grad_()}),
    ("A_log: expected a tensor when use_gate_in_kernel is set", ValueError, {"use_gate_in_kernel": True}),
    ("A_log: expected HV = 2 values, got [3]", ValueError, GATE | {"A_log": torch.zeros(3)}),
    ("dt_bias: expected HV * K = 64 values, got [2]", ValueError, GATE | {"dt_bias": torch.zeros(2)}),
    ("dt_bias: expected a floating dtype, got bool", TypeError, GATE | {"dt_bias": torch.ones(64).bool()}),
    ("lower_bound: expected None or a number below 0, got 0", ValueError, GATE | {"lower_bound": 0.0}),
]
BAD_CHUNKED: list[tuple[str, type[Exception], dict[str, Any]]] = [
    ("chunk_size: expected 16, 32 or 64, got 24", ValueError, {"chunk_size": 24}),
    ("cp_context: expected None", ValueError, {"cp_context": object()}),
    ("cu_seqlens_cpu: expected None", ValueError, {"cu_seqlens_cpu": torch.tensor([0, 5])}),
    ("lower_bound: expected a number from -5 to 0", ValueError, GATE | {"safe_gate": True}),
    ("lower_bound: expected a number from -5 to 0", ValueError, GATE | {"safe_gate": True, "lower_bound": -6.0}),
]


@pytest.mark.parametrize("function", POSITIONAL)
def test_every_argument_is_there_by_name_and_in_order(function: str) -> None:
    parameters = inspect.signature(getattr(torch_gdn, function)).parameters
    positional = [name for name, each in parameters.items() if each.kind == each.POSITIONAL_OR_KEYWORD]
    assert positional == POSITIONAL[function].split()
    assert not [each for each in parameters.values() if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]


def refuses(function: str, message: str, error: type[Exception], change: dict[str, Any]) -> None:
    with pytest.raises(error) as caught:
        FUNCTIONS[function](**(kda_inputs(5, 32, 32) | change))
    assert str(caught.value).removeprefix("gdn::").startswith(f"{function}: {message}")


@pytest.mark.parametrize(("message", "error", "change"), BAD, ids=[row[0] for row in BAD])
@each_function
def test_refused(function: str, message: str, error: type[Exception], change: dict[str, Any]) -> None:
    refuses(function, message, error, change)


@pytest.mark.parametrize(("message", "error", "change"), BAD_CHUNKED, ids=[str(i) for i in range(len(BAD_CHUNKED))])
def test_refused_by_chunk_kda(message: str, error: type[Exception], change: dict[str, Any]) -> None:
    refuses("chunk_kda", message, error, change)


@each_function
def test_the_old_name_of_state_v_first(function: str) -> None:
    inputs = kda_inputs(5, 32, 16)
    inputs["initial_state"] = inputs["initial_state"].mT.contiguous()
    with pytest.warns(DeprecationWarning, match="transpose_state_layout is deprecated; use state_v_first"):
        old = FUNCTIONS[function](**inputs, transpose_state_layout=True)[0]
    assert torch.equal(old, FUNCTIONS[function](**inputs, state_v_first=True)[0])


def test_options_of_training_and_graphs_change_nothing() -> None:
    inputs = kda_inputs(5, 32, 32) | {"cu_seqlens": torch.tensor([0, 5])}
    plain = torch_gdn.chunk_kda(**inputs)[0]
    options = {"disable_recompute": True, "use_graph": True, "max_num_seqs": 1, "chunk_size": 32, "safe_gate": True}
    assert torch.equal(torch_gdn.chunk_kda(**inputs, **options)[0], plain)  # type: ignore[arg-type]


@each_function
def test_parameters_of_a_gate_that_is_not_used_are_not_read(function: str) -> None:
    """Layers pass them whether or not the kernel computes the gate, as in FLA."""
    inputs = kda_inputs(5, 32, 32)
    given = FUNCTIONS[function](**inputs, A_log=torch.ones(7), dt_bias=torch.ones(9), lower_bound=-3.0)[0]
    assert torch.equal(given, FUNCTIONS[function](**inputs)[0])
