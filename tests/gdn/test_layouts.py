"""Tests memory layouts: views without copies, many short sequences, and that strides have 64 bits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.cases import END_TO_END_OPS, Case, assert_exact, make_case, run
from tests.helpers.devices import on_a_mac, profiled, ready
from tests.helpers.prefill import each_op


def projected(case: Case, offset: int, device: torch.device) -> Case:
    """Returns q, k and v on the device as views of one projection [B, T, columns], after `offset` other columns."""
    B, T = case.q.shape[:2]
    parts = [torch.zeros(B, T, offset, dtype=case.dtype), *(x.reshape(B, T, -1) for x in case.qkv)]
    views = torch.cat(parts, -1).to(device).split([part.shape[-1] for part in parts], -1)[1:]
    q, k, v = (view.unflatten(-1, x.shape[2:]) for view, x in zip(views, case.qkv, strict=True))
    return Case(q, k, v, case.g.to(device), case.beta.to(device), case.initial_state, case.cu_seqlens)


def cost(op: str, case: Case) -> tuple[int, int, int, int]:
    """Returns the dispatches, bytes read, bytes written and bytes allocated by a call on the simulated device."""
    with profiled() as profile:
        END_TO_END_OPS[op](*case.qkv, **case.options)
    assert not profile.fallbacks
    figures = list(profile.kernels.values())
    return (
        sum(kernel.dispatches for kernel in figures),
        sum(kernel.device_bytes_read for kernel in figures),
        sum(kernel.device_bytes_written for kernel in figures),
        profile.allocated_bytes,
    )


@pytest.mark.skipif(on_a_mac(), reason="a Mac does not count bytes")
@each_op("chunked", devices=("mps",))
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_views_of_a_projection_are_not_copied(device: torch.device, op: str, offset: int) -> None:
    """Views need as many dispatches, as much traffic and as much memory as separate tensors."""
    case = make_case(20, 64, 32, B=2, H=1, HV=2, dtype=torch.bfloat16, state=False)
    views = projected(case, offset, device)
    assert not any(x.is_contiguous() for x in views.qkv) and views.q.storage_offset() == offset
    run(op, case, device)  # a process's first call is made twice, once before it knows that the self-test is off
    assert cost(op, views) == cost(op, case.to(device))


@each_op("chunked", "fused_chunk")
def test_thirty_heads(device: torch.device, op: str) -> None:
    """OLMo-Hybrid has as many key heads as value heads, K of 96, V of 192, and beta up to 2."""
    case = make_case(3, 96, 192, H=30, HV=30, beta=1.9)
    assert_exact(op, case, run(op, case, device))


MANY = 65_600


@pytest.mark.parametrize("op", END_TO_END_OPS)
def test_more_sequences_times_heads_than_16_bits_count(op: str) -> None:
    """Each packed sequence must be exact, including the last."""
    case = make_case(MANY // 32, 4, 2, HV=32, cu_seqlens=list(range(MANY // 32 + 1)))
    assert_exact(op, case, run(op, case, torch.device("cpu")))


@pytest.mark.sweep(1, seeds=3)
def test_a_grid_of_more_threadgroups_than_16_bits_count() -> None:
    op = "fused_recurrent_gated_delta_rule"
    case = make_case(1, 4, 2, B=MANY, H=1, HV=1)
    o, state = run(op, case, ready("mps"))
    last = case.map(lambda x: x[-64:])
    assert_exact(op, last, (o[-64:], state[-64:]))
    assert_exact(op, case, (o, state))


SHADERS = Path(__file__).resolve().parents[2] / "shaders"
NARROW = r"(const )?(u?int|short) \w*stride\w*"
FUNCTION = re.compile(r"\b\w+\(\s*((?:[^()]|\([^()]*\))*?)\)\s*\{", re.DOTALL)


def parameters_of_functions(text: str) -> Iterator[list[str]]:
    for match in FUNCTION.finditer(text):
        yield [parameter.strip() for parameter in match[1].split(",")]


@pytest.mark.parametrize(
    "file",
    sorted([*SHADERS.glob("*/*.metal"), *SHADERS.glob("*/*.h")]),
    ids=lambda file: file.name,
)
def test_strides_in_device_memory_are_64_bits_wide(file: Path) -> None:
    """A function that takes a device pointer and a stride takes 64 bits of it. int is enough for threadgroup memory."""
    for parameters in parameters_of_functions(file.read_text()):
        on_device = any(parameter.startswith("device") for parameter in parameters)
        narrow = [parameter for parameter in parameters if re.fullmatch(NARROW, parameter)]
        assert not (on_device and narrow), narrow


def test_a_narrow_stride_is_found() -> None:
    text = "METAL_FUNC float read(device const float* x, int row_stride, uint lane) {"
    ((_, narrow, _),) = parameters_of_functions(text)
    assert re.fullmatch(NARROW, narrow)


def test_strides_of_tensors_are_64_bits_wide() -> None:
    text = (SHADERS / "core" / "parameters.h").read_text()
    for name in ("RowStrides", "StateStrides"):
        (fields,) = re.findall(rf"struct {name} {{(.*?)}};", text, re.DOTALL)
        assert set(re.findall(r"\b\w+_t\b|\bint\b", fields)) == {"int64_t"}
