"""Bad input is an error that names the op, the argument, what was expected and what came; never a crash."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import torch_gdn
from tests.helpers.calls import (
    CHUNKED,
    END_TO_END,
    IN_PLACE,
    KDA,
    OPS,
    STATEFUL,
    UNPACKED,
    Change,
    change,
    flat,
    put,
    refused_by_layers,
    run_op,
    short,
    tensors_of,
    valid_call,
)

PUBLIC_FUNCTIONS = [x for x in (getattr(torch_gdn, name) for name in torch_gdn.__all__) if inspect.isfunction(x)]
PACKABLE = tuple(op for op in OPS if op not in UNPACKED)
SIZED = (*(op for op in CHUNKED if op not in ("solve_tril", "recompute_w_u")), *KDA)
QKV = ("chunk_fwd_o", *END_TO_END)
FLOAT32_ONLY = {
    "chunk_scaled_dot_kkt": ["g"],
    "solve_tril": ["A"],
    "recompute_w_u": ["A", "g"],
    "chunk_fwd_h": ["g"],
    "chunk_fwd_o": ["g"],
}
SAME_DTYPE = {
    "recompute_w_u": ["v"],
    "chunk_fwd_h": ["w", "u"],
    "chunk_fwd_o": ["k", "v", "h"],
    **{op: ["k", "v"] if op in KDA else ["k"] for op in END_TO_END},
}
FIRST = {op: next(iter(valid_call(op, torch.device("cpu")))) for op in OPS}
KEY = {op: next(iter(valid_call(op, torch.device("cpu")))) for op in (*QKV, "recompute_w_u", "chunk_fwd_h")}


GATE = {"use_gate_in_kernel": True, "A_log": torch.zeros(4)}
SIGMOID = {"use_beta_sigmoid_in_kernel": True}
WRONG_OPTIONS: list[tuple[str, type[Exception], str, dict[str, Any]]] = [
    ("A_log", ValueError, "none for the gate", {"use_gate_in_kernel": True}),
    ("A_log", ValueError, "one for four heads", GATE | {"A_log": torch.zeros(1)}),
    ("A_log", TypeError, "integers", GATE | {"A_log": torch.zeros(4, dtype=torch.int64)}),
    ("dt_bias", ValueError, "three for four heads", GATE | {"dt_bias": torch.zeros(3)}),
    ("dt_bias", TypeError, "integers", GATE | {"dt_bias": torch.zeros(4, dtype=torch.int64)}),
    ("allow_neg_eigval", ValueError, "without the sigmoid", {"allow_neg_eigval": True}),
    ("output_dtype", ValueError, "float16 for float32", {"output_dtype": torch.float16}),
    ("head_grouping", ValueError, "interleaved", {"head_grouping": "interleaved"}),
]
WRONG_OF_KDA: list[tuple[str, type[Exception], str, dict[str, Any]]] = [
    ("dt_bias", ValueError, "one for each head", GATE | {"dt_bias": torch.zeros(4)}),
    ("lower_bound", ValueError, "zero", GATE | {"lower_bound": 0.0}),
    ("lower_bound", ValueError, "nan", GATE | {"lower_bound": torch.nan}),
]
RAW_GK = {"use_channel_gate_in_kernel": True, "gk": torch.zeros(2, 20, 4, 64), "lower_bound": -5.0}
WRONG_CHANNELS: list[tuple[str, type[Exception], str, dict[str, Any]]] = [
    ("g", ValueError, "none for the gate", GATE | {"g": None}),
    ("beta", ValueError, "none for the sigmoid", SIGMOID | {"beta": None}),
    ("beta", ValueError, "columns of K", {"beta": torch.zeros(2, 20, 4, 64)}),
    ("gk", ValueError, "columns of V", {"gk": torch.zeros(2, 20, 4, 32)}),
    ("gk", ValueError, "none for its gate", RAW_GK | {"gk": None}),
    ("A_log", ValueError, "none for the gate of gk", RAW_GK | {"lower_bound": None}),
    ("dt_bias", ValueError, "one for each head of gk", RAW_GK | {"dt_bias": torch.zeros(4)}),
    ("lower_bound", ValueError, "zero", RAW_GK | {"lower_bound": 0.0}),
    ("use_gate_in_kernel", ValueError, "of g and of gk", RAW_GK | GATE),
    ("gk", TypeError, "integers", {"gk": torch.zeros(2, 20, 4, 64, dtype=torch.int64)}),
    ("gv", ValueError, "a token too few", {"gv": torch.zeros(2, 19, 4, 32)}),
    ("gv", TypeError, "integers", {"gv": torch.zeros(2, 20, 4, 32, dtype=torch.int64)}),
]


class Bad:
    def __init__(self, op: str, argument: str, error: type[Exception], what: str, how: Change, packed: bool = False):
        self.op, self.argument, self.error, self.how, self.packed = op, argument, error, how, packed
        self.name = f"{op}: {argument}: {what}"


def bad_calls() -> list[Bad]:
    calls = []

    def bad(op: str, argument: str, error: type[Exception], what: str, how: Change, packed: bool = False) -> None:
        calls.append(Bad(op, argument, error, what, how, packed))

    for op in OPS:
        first = FIRST[op]
        bad(op, first, TypeError, "integers", change(first, torch.Tensor.int))
        if op not in ("chunk_local_cumsum", *UNPACKED):
            bad(op, first, TypeError, "float64", change(first, torch.Tensor.double))
        if op not in UNPACKED:
            bad(op, first, ValueError, "too few dimensions", change(first, flat))
    for op in ("l2norm", "rms_norm_gated"):
        bad(op, "x", ValueError, "no dimension", put("x", torch.tensor(1.0)))
        bad(op, "eps", ValueError, "negative", put("eps", -1.0))
    for op, names in FLOAT32_ONLY.items():
        for name in names:
            bad(op, name, TypeError, "float16 for float32", change(name, torch.Tensor.half))
    for op, names in SAME_DTYPE.items():
        for name in names:
            bad(op, name, TypeError, "another dtype", change(name, torch.Tensor.bfloat16))
    for op in END_TO_END:
        bad(op, "v", TypeError, "float64", change("v", torch.Tensor.double))
    for op in ("chunk_scaled_dot_kkt", "recompute_w_u", *END_TO_END):
        bad(op, "beta", TypeError, "integers", change("beta", torch.Tensor.long))
        bad(op, "beta", ValueError, "too short", change("beta", short))
    for op in OPS:
        for name in tensors_of(valid_call(op, torch.device("cpu")))[1:]:
            if name in ("g", "k", "v", "w", "A"):
                bad(op, name, ValueError, "too short", change(name, short))
    for op in SIZED:
        bad(op, "chunk_size", ValueError, "48", put("chunk_size", 48))
        bad(op, "chunk_size", ValueError, "zero", put("chunk_size", 0))
    for op in ("solve_tril", "recompute_w_u"):
        bad(op, "A", ValueError, "chunk size 20", change("A", lambda A: A.new_zeros(*A.shape[:3], 20)))
    for op, key in KEY.items():
        bad(op, key, ValueError, "K of 257", change(key, lambda x: x.new_zeros(*x.shape[:3], 257)))
        bad(op, key, ValueError, "K of 0", change(key, lambda x: x.new_zeros(*x.shape[:3], 0)))
        bad(op, key, ValueError, "no heads", change(key, lambda x: x[:, :, :0]))
        value = "u" if op == "chunk_fwd_h" else "v"
        bad(op, value, ValueError, "V of 513", change(value, lambda x: x.new_zeros(*x.shape[:3], 513)))
        bad(op, value, ValueError, "3 heads for 2", change(value, lambda x: x[:, :, :3]))
        bad(op, value, ValueError, "no heads", change(value, lambda x: x[:, :, :0]))
    bad("chunk_scaled_dot_kkt", "g", ValueError, "3 heads for 2", change("g", lambda g: g[:, :, :3]))
    bad("chunk_fwd_o", "h", ValueError, "a chunk too few", change("h", lambda h: h[:, :-1]))
    for op in STATEFUL:
        bad(op, "initial_state", ValueError, "one for two", change("initial_state", lambda s: s[:1]))
        bad(op, "initial_state", ValueError, "one for three", change("initial_state", lambda s: s[:1]), packed=True)
        bad(op, "initial_state", ValueError, "V and K swapped", put("state_v_first", True))
        bad(op, "initial_state", TypeError, "integers", change("initial_state", torch.Tensor.int))
    for op in (op for op in END_TO_END if op in IN_PLACE):
        bad(op, "state_pool", TypeError, "integers", change("state_pool", torch.Tensor.int))
        bad(op, "state_pool", ValueError, "three dimensions", change("state_pool", flat))
        bad(op, "state_pool", ValueError, "three heads for four", change("state_pool", lambda pool: pool[:, :3]))
        bad(op, "state_pool", ValueError, "V and K swapped", put("state_v_first", True))
    for op in END_TO_END:
        for argument, error, what, value in WRONG_OPTIONS:
            bad(op, argument, error, what, lambda call, value=value: call | value)
    wrong = dict.fromkeys(("fused_recurrent_gated_delta_rule", "fused_recurrent_gated_delta_rule_"), WRONG_CHANNELS)
    for op, rows in (wrong | dict.fromkeys(KDA, WRONG_OF_KDA)).items():
        for argument, error, what, value in rows:
            bad(op, argument, error, what, lambda call, value=value: call | value)
    for op in PACKABLE:
        cu = "cu_seqlens"
        bad(op, cu, TypeError, "floats", change(cu, torch.Tensor.float), packed=True)
        bad(op, cu, ValueError, "two dimensions", change(cu, lambda x: x[None]), packed=True)
        bad(op, cu, ValueError, "one boundary", change(cu, lambda x: x[:1]), packed=True)
        bad(op, cu, ValueError, "with a batch", put(cu, torch.tensor([0, 5, 20])))
    for op in CHUNKED:
        indices = "chunk_indices"
        bad(op, indices, ValueError, "one column", change(indices, lambda x: x[:, :1]), packed=True)
        bad(op, indices, TypeError, "floats", change(indices, torch.Tensor.float), packed=True)
        bad(op, indices, ValueError, "without cu_seqlens", put(indices, torch.zeros(2, 2, dtype=torch.int64)))
    refused_by_layers(bad)
    bad_slots(bad)
    return calls


def bad_slots(bad: Callable[..., None]) -> None:
    """Of every in-place op."""
    indices, flags, pool = "state_indices", "has_initial_state", "state_pool"
    for op in IN_PLACE:
        bad(op, indices, TypeError, "floats", change(indices, torch.Tensor.float))
        bad(op, indices, ValueError, "one too few", change(indices, lambda x: x[1:]))
        bad(op, indices, ValueError, "two dimensions", change(indices, lambda x: x[None]))
        bad(op, flags, TypeError, "integers", change(flags, torch.Tensor.int))
        bad(op, flags, ValueError, "one too few", change(flags, lambda x: x[1:]))
        bad(op, "null_index", ValueError, "1", put("null_index", 1))
        bad(op, pool, ValueError, "one slot for two", lambda call: call | {pool: call[pool][:1], indices: None})
        bad(op, pool, ValueError, "overlapping slots", change(pool, lambda s: s[:1].expand_as(s)))


def contents() -> list[Bad]:
    """A cu_seqlens or state_indices on the CPU with wrong numbers: found when the op runs, not on fake tensors."""
    wrong = {"a start of 1": [1, 5, 5, 20], "a descent": [0, 7, 5, 20], "an end before T": [0, 5, 5, 19]}
    wrong |= {"an end past T": [0, 5, 5, 21], "a negative one": [0, -1, 5, 20]}
    found = [
        Bad(op, "cu_seqlens", ValueError, what, put("cu_seqlens", torch.tensor(numbers)), packed=True)
        for op in PACKABLE
        for what, numbers in wrong.items()
    ]
    for op in IN_PLACE:
        for what, numbers in {"an index of 5": [5, 1], "one slot twice": [1, 1]}.items():
            found.append(Bad(op, "state_indices", ValueError, what, put("state_indices", torch.tensor(numbers))))
    for op in CHUNKED:
        found.append(Bad(op, "chunk_indices", ValueError, "a chunk too few", a_chunk_too_few, packed=True))
    return found


def a_chunk_too_few(call: dict[str, Any]) -> dict[str, Any]:
    return call | {"cu_seqlens": call["cu_seqlens"].cpu(), "chunk_indices": call["chunk_indices"][:-1]}


def message_of(bad: Bad) -> str:
    """'<op>: <argument>: expected ..., got ...'"""
    return rf"^{bad.op}: {bad.argument}: expected .+, got .+"


def no_float64_there(bad: Bad, device: torch.device) -> bool:
    return device.type == "mps" and bad.name.endswith("float64")


@pytest.mark.parametrize("bad", bad_calls() + contents(), ids=lambda bad: bad.name)
def test_bad_input_is_an_error(device: torch.device, bad: Bad) -> None:
    if no_float64_there(bad, device):
        with pytest.raises(TypeError, match="float64"):
            bad.how(valid_call(bad.op, device))
        return
    call = bad.how(valid_call(bad.op, device, packed=bad.packed))
    call = {name: x.to(device) if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in call.items()}
    with pytest.raises(bad.error, match=message_of(bad)):
        run_op(bad.op, call)


@pytest.mark.parametrize("bad", bad_calls(), ids=lambda bad: bad.name)
def test_the_fake_raises_the_same(bad: Bad) -> None:
    call = bad.how(valid_call(bad.op, torch.device("cpu"), packed=bad.packed))
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in call.items()}
        with pytest.raises(bad.error, match=message_of(bad)):
            run_op(bad.op, fake)


def tensor_arguments(ops: tuple[str, ...]) -> list[tuple[str, str]]:
    """Every floating tensor argument of each op."""
    calls = {op: valid_call(op, torch.device("cpu")) for op in ops}
    return [(op, name) for op, call in calls.items() for name in tensors_of(call) if call[name].is_floating_point()]


@pytest.mark.parametrize(("op", "argument"), tensor_arguments(OPS))
def test_an_input_that_requires_grad_is_an_error(device: torch.device, op: str, argument: str) -> None:
    call = valid_call(op, device)
    call[argument].requires_grad_()
    with pytest.raises(RuntimeError, match=f"{op}: {argument}: expected a tensor that does not require grad"):
        run_op(op, call)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode_it_is_none(device: torch.device, op: str, mode: Any) -> None:
    expected = run_op(op, valid_call(op, device))
    call = valid_call(op, device)
    call[FIRST[op]].requires_grad_()
    with mode():
        result = run_op(op, call)
    for ours, theirs in zip(as_tuple(result), as_tuple(expected), strict=True):
        assert not ours.requires_grad and torch.equal(ours, theirs)


def as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize(("op", "argument"), [pair for pair in tensor_arguments(OPS) if pair[1] != FIRST[pair[0]]])
def test_a_tensor_on_another_device_is_an_error(device: torch.device, op: str, argument: str) -> None:
    """On `mps` one on the CPU; on the CPU a meta tensor, as loaders of models may leave."""
    call = valid_call(op, device)
    call[argument] = call[argument].to("cpu" if device.type == "mps" else "meta")
    with pytest.raises(ValueError, match=f"^{op}: {argument}: expected a tensor on {device.type}"):
        run_op(op, call)


LAZY_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a negated view": torch._neg_view,
    "a conjugated view": lambda x: x.to(torch.complex64).conj(),
}


@pytest.mark.parametrize("what", LAZY_VIEWS)
@pytest.mark.parametrize("op", IN_PLACE)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_view_without_its_numbers_in_memory_cannot_be_written(
    device: torch.device, op: str, what: str, mode: Any
) -> None:
    with mode():
        call = valid_call(op, device)
        call["state_pool"] = LAZY_VIEWS[what](call["state_pool"])
        with pytest.raises(
            ValueError, match=f"^{op}: state_pool: expected a tensor that can be written .+, got {what}"
        ):
            run_op(op, call)


@pytest.mark.parametrize(("op", "argument"), [(op, FIRST[op]) for op in OPS])
def test_a_negated_view_is_read_as_its_numbers(device: torch.device, op: str, argument: str) -> None:
    call, negated = valid_call(op, device), valid_call(op, device)
    expected = as_tuple(run_op(op, call | {argument: -call[argument]}))
    ours = as_tuple(run_op(op, negated | {argument: torch._neg_view(negated[argument])}))
    for mine, theirs in zip(ours, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("function", PUBLIC_FUNCTIONS, ids=lambda function: function.__name__)
def test_an_unknown_keyword_is_an_error_that_names_it(function: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match=re.escape("'use_gate_in_kernal'")):
        function(use_gate_in_kernal=True)


def test_an_op_without_a_kernel_for_the_device_says_so() -> None:
    call = valid_call("solve_tril", torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="gdn::solve_tril"):
        torch.ops.gdn.solve_tril(call["A"].to_sparse())
