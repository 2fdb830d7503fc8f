"""Tests docstrings: their examples run, and they state the tensors and defaults that functions have.

`tests/helpers/docstrings.py` has the grammar of a statement.
"""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.gdn.test_fla_arguments import RULES  # whose options have FLA's orders; the ops share one order
from tests.helpers.docstrings import Call, Statements, entries, entry
from torch_gdn import causal_conv1d_interface, reference
from torch_gdn_check.registry.inputs import empty_on
from torch_gdn_check.registry.registry import REGISTRY, OpEntry

FUNCTIONS = {x.__name__: x for x in (getattr(torch_gdn, n) for n in torch_gdn.__all__) if inspect.isfunction(x)}
OF_OPS = {
    FUNCTIONS.get(name) or FUNCTIONS[name.removesuffix("_")]: op
    for name, op in REGISTRY.items()
    if not name.endswith("_bwd") or name in FUNCTIONS
}
DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
)

each_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
each_op = pytest.mark.parametrize("op", OF_OPS.values(), ids=lambda op: op.name)


@each_function
def test_the_example_runs(function: Callable[..., object]) -> None:
    tests = doctest.DocTestFinder(recurse=False).find(function, function.__name__, globs={})
    assert sum(len(test.examples) for test in tests) >= 2, "no example"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    report: list[str] = []
    for test in tests:
        runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


# ---- shapes and dtypes -----------------------------------------------------------------------------------------------


def calls_of_op(op: OpEntry[Any]) -> Iterator[Call]:
    """Yields one call of the op for each combination of dtypes and options that its points draw, and calls with
    arguments that no point passes. The tensors have no memory.
    """
    changes: list[Call] = [{}, {"gated": True}, {"channels": True}]
    changes += [{"from_state": False}] if "initial_state" in op.arguments else []
    known = {each.name for each in fields(op.small)}
    smaller = [replace(op.small, **change) for change in changes if change.keys() <= known]
    smaller += [replace(op.small, packed=True)] if op.packable else []
    calls = [op.call(point) for point in dict.fromkeys([*smaller, *op.quick, *op.points])]
    different = {str({name: getattr(x, "dtype", x) for name, x in call.items()}): call for call in reversed(calls)}
    for call in [*reversed(different.values()), *rare_calls(op, calls[0])]:
        yield empty_on(call, "meta")


def rare_calls(op: OpEntry[Any], call: Call) -> Iterator[Call]:
    if "state_indices" not in op.arguments:
        return
    N, tokens = len(call["state_indices"]), call[op.first].shape[1]
    numbers = torch.zeros(N, dtype=torch.int64)
    results = op.overload(**empty_on(call, "meta"))
    yield call | {"out": torch.empty_like(results[0] if isinstance(results, tuple) else results, device="cpu")}
    if "checkpoint_offsets" in op.arguments:
        yield call | dict.fromkeys(("checkpoint_offsets", "checkpoint_indices"), numbers)
    if op.name == "causal_conv1d_update_":
        D, W = call["weight"].shape
        yield call | {"num_accepted_tokens": numbers, "state_pool": torch.zeros(5, D, W - 2 + tokens)}
    elif "num_accepted_tokens" in op.arguments:
        if "conv_pool" in call:
            call |= {"conv_pool": torch.zeros(5, call["conv_weight"].shape[0], 2 + tokens)}
        yield call | {"num_accepted_tokens": numbers, "state_indices": numbers[:, None].expand(N, tokens).clone()}


def other_calls() -> dict[Callable[..., Any], list[Call]]:
    """Returns calls of functions that share an op with another."""
    columns, weight = {"x": torch.zeros(2, 5, 7)}, {"weight": torch.zeros(5, 4), "bias": torch.zeros(5)}
    state, indices = torch.zeros(2, 5, 6), torch.tensor([1, 0])
    token_call = {"x": torch.zeros(2, 5), "cache": state, "residual": torch.zeros(2, 5), **weight}
    column_call = {**columns, "conv_state": state, "conv_state_indices": indices, **weight}
    packed = {"cu_seqlens": torch.tensor([0, 17, 17, 100]), "chunk_size": 64}
    return {
        torch_gdn.l2norm_fwd: [{"x": torch.zeros(2, 3, 5)}],
        torch_gdn.fused_gdn_gate: [{"g": torch.zeros(2, 3), "A_log": torch.zeros(3), "dt_bias": torch.zeros(3)}],
        torch_gdn.causal_conv1d_update: [token_call],
        torch_gdn.causal_conv1d_fn: [
            {**columns, **weight, "seq_idx": torch.zeros(2, 7, dtype=torch.int32), "return_final_states": False},
            {**columns, **weight, "initial_states": state, "return_final_states": True, "final_states_out": state + 0},
            {**columns, **weight, "return_final_states": True},
        ],
        causal_conv1d_interface.causal_conv1d_update: [column_call, column_call | {"x": torch.zeros(2, 5)}],
        torch_gdn.prepare_chunk_indices: [packed],
        torch_gdn.prepare_chunk_offsets: [packed],
    }


OTHERS = other_calls()
TENSOR_FUNCTIONS = [*OF_OPS, *OTHERS]
each_tensor_function = pytest.mark.parametrize(
    "function", TENSOR_FUNCTIONS, ids=[f"{f.__module__.rpartition('.')[2]}.{f.__name__}" for f in TENSOR_FUNCTIONS]
)


@cache
def calls_of(function: Callable[..., Any]) -> list[Call]:
    if function in OTHERS:
        return OTHERS[function]
    known = inspect.signature(function).parameters
    return [{name: x for name, x in call.items() if name in known} for call in calls_of_op(OF_OPS[function])]


OTHER_DTYPES = {"output_dtype": torch.float32, "dtype": torch.float16}  # for results that any call can take


@pytest.mark.sweep(6)
@each_tensor_function
def test_shapes_and_dtypes_are_those_stated(function: Callable[..., Any]) -> None:
    stated = Statements(function)
    other_dtypes = {name: dtype for name, dtype in OTHER_DTYPES.items() if name in stated.defaults}
    for call in calls_of(function):
        stated.check(call)
        stated.check(stated.optional_results() | call | other_dtypes)


PACKED = (torch.int32, torch.uint8)
READ_BY_NO_KERNEL = {"cu_seqlens_cpu", "chunk_indices of causal_conv1d"}
ON_HOST = (torch_gdn.prepare_chunk_indices, torch_gdn.prepare_chunk_offsets)  # plain PyTorch takes any integers


@each_tensor_function
def test_arguments_have_the_stated_dtypes_and_no_others(function: Callable[..., Any]) -> None:
    if function in ON_HOST:
        return
    stated, wrong = Statements(function), []
    for name, claim in stated.arguments.items():
        if claim.dtype == "" or {name, f"{name} of {function.__name__}"} & READ_BY_NO_KERNEL:
            continue
        call = next((call for call in calls_of(function) if isinstance(call.get(name), Tensor)), None)
        assert call is not None, f"no call has {name}"
        for dtype in DTYPES:
            own = call
            # Packed weights and their scales have other sizes.
            if dtype in PACKED and (claim.dtype.endswith("or uint8") or name.endswith("scales")):
                same = (each for each in calls_of(function) if getattr(each.get(name), "dtype", None) == dtype)
                own = next(same, call)
            changed = stated.recast(own, name, dtype)
            if dtype in stated.dtypes_of(name, own):
                stated.check(stated.optional_results() | changed)
            elif not stated.refuses(changed):
                wrong.append(f"{name} of {dtype} is taken; stated: {claim.dtype}")
    assert wrong == []


def test_every_function_of_tensors_is_compared() -> None:
    without_tensors = {"prefill_algorithm", "warmup"}
    assert set(FUNCTIONS.values()) - set(TENSOR_FUNCTIONS) == {FUNCTIONS[name] for name in without_tensors}


@each_op
def test_results_have_the_names_of_the_schema(op: OpEntry[Any]) -> None:
    function = next(f for f, each in OF_OPS.items() if each is op)
    names = {each.name or op.result for each in op.overload._schema.returns} | set(op.written)
    assert set(Statements(function).results) <= names


# ---- arguments and defaults ------------------------------------------------------------------------------------------


def stated_default(text: str) -> Any:
    """Returns the value after `Default:`, or None if there is no value or words describe it."""
    match = re.search(r"Default: (.+?)(?:\. |\.?$)", text)
    dtypes = {name: x for name, x in vars(torch).items() if isinstance(x, torch.dtype)}
    try:
        return eval(match[1], {"__builtins__": {}} | dtypes) if match else None
    except (NameError, SyntaxError):
        return None


@each_function
def test_arguments_and_defaults_are_stated(function: Callable[..., Any]) -> None:
    defaults = {
        name: None if each.default is each.empty else each.default
        for name, each in inspect.signature(function).parameters.items()
    }
    assert {name: stated_default(entry(function, "Args", name)) for name in defaults} == defaults


def test_defaults_of_classes_and_of_integrations_are_those_stated() -> None:
    root, compared = Path(torch_gdn.__file__).parent, 0
    for path in (path for path in root.rglob("*.py") if "Default: " in path.read_text()):
        module = import_module(".".join(path.relative_to(root.parent).with_suffix("").parts))
        own = [x for x in vars(module).values() if getattr(x, "__module__", "") == module.__name__ and callable(x)]
        methods = [x for cls in own if isinstance(cls, type) for x in (getattr(cls, name) for name in vars(cls))]
        for function in (x for x in [*own, *methods] if callable(x) and "Default: " in (inspect.getdoc(x) or "")):
            known = inspect.signature(function).parameters
            for argument in entries(function, "Args"):
                if (stated := stated_default(entry(function, "Args", argument))) is not None:
                    compared += 1
                    assert stated == known[argument].default, f"{function.__qualname__}: {argument}"
    assert compared > 100


# Only the Python functions have these arguments.
PYTHON_ONLY = {
    **dict.fromkeys(("transpose_state_layout", "head_first"), "FLA's deprecated spellings, translated"),
    **dict.fromkeys(("cp_context", "bias"), "FLA's, which only None is taken for"),
    **dict.fromkeys(
        ("cu_seqlens_cpu", "chunk_indices", "backend", "use_graph", "max_num_seqs"), "FLA's hints, not needed"
    ),
    **dict.fromkeys(("disable_recompute", "safe_gate"), "FLA's, without effect on the result"),
    "prenorm": "FLA's, which chooses what of the op's results is returned",
}
# Only the ops have these arguments.
OP_ONLY = {
    ("l2norm", "return_rstd"): "l2norm_fwd sets it",
    **dict.fromkeys((("causal_conv1d", "state_width"), ("causal_conv1d", "seq_idx")), "causal_conv1d_fn has them"),
}
# The op requires these arguments, and Python computes them: in FLA's stages None means no decay, and a beta of 1.
COMPUTED = {
    "recompute_w_u": {"g"},
    "chunk_fwd_h": {"g"},
    "chunk_fwd_o": {"g"},
    "chunk_scaled_dot_kkt": {"g", "beta"},
    "chunk_bwd_dv_local": {"g"},
    "chunk_gated_delta_rule_bwd_dhu": {"g"},
    "prepare_wy_repr_bwd": {"g"},
    "chunk_bwd_dqkwg": {"g"},
    "paged_attention_": {"out", "max_query_len", "max_seq_len"},
    "aura_paged_attention_": {"out", "max_query_len", "max_seq_len"},
    "aura_paged_tile_means_": {"max_query_len", "max_seq_len"},
}


def defaults_of_op(op: OpEntry[Any]) -> dict[str, Any]:
    arguments = op.overload._schema.arguments
    return {
        each.name: each.default_value if each.has_default_value() else inspect.Parameter.empty for each in arguments
    }


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    return {each.name: each.default for each in inspect.signature(function).parameters.values()}


@each_op
def test_function_op_and_reference_have_one_signature(op: OpEntry[Any]) -> None:
    function = next(f for f, each in OF_OPS.items() if each is op)
    in_op, in_python = defaults_of_op(op), defaults_of(function)
    assert {(op.name, name) for name in in_op if name not in in_python} <= OP_ONLY.keys()
    assert {name for name in in_python if name not in in_op} <= PYTHON_ONLY.keys()
    shared = {name: value for name, value in in_python.items() if name in in_op.keys() - COMPUTED.get(op.name, ())}
    assert shared == {name: in_op[name] for name in shared}
    assert (list(shared) != [name for name in in_op if name in shared]) == (op.name in RULES)
    if reference_function := getattr(reference, op.name, None):
        assert defaults_of(reference_function).items() <= in_op.items()


def test_fla_names_are_the_same_functions() -> None:
    pairs = {
        "chunk_scaled_dot_kkt_fwd": "chunk_scaled_dot_kkt",
        "recompute_w_u_fwd": "recompute_w_u",
        "chunk_gated_delta_rule_fwd_h": "chunk_fwd_h",
    }
    for fla_name, name in pairs.items():
        assert getattr(torch_gdn, fla_name) is getattr(torch_gdn, name)
