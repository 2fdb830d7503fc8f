"""Every recorded case of FLA (tests/golden), on every device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.cases import WHOLE_OPS, assert_exact, run
from tests.helpers.devices import kernels_run
from tests.helpers.errors import RECURRENT_F32, assert_close, head_errors, relative_error
from tests.helpers.golden import NAMES, Golden, load

CHUNKED = [name for name in NAMES if name != "decode_b4"]
STAGED = [name for name in CHUNKED if name != "half_k128"]
STAGE_BOUNDS = {"g_cumsum": 2e-5, "A": 2e-5, "A_inv": 5e-6, "w": 3.5e-3, "u": 3.5e-3, "h": 3.5e-3, "v_new": 3.5e-3}


def stage_results(golden: Golden, device: torch.device) -> dict[str, Callable[[], dict[str, Tensor]]]:
    """Each stage op, fed FLA's own inputs of that stage."""
    x = {name: tensor.to(device) for name, tensor in golden.tensors.items()}
    cu = x.get("cu_seqlens")
    packed = {"cu_seqlens": cu, "chunk_indices": None if cu is None else torch_gdn.prepare_chunk_indices(cu)}
    return {
        "chunk_local_cumsum": lambda: {"g_cumsum": torch_gdn.chunk_local_cumsum(x["g"], **packed)},
        "chunk_scaled_dot_kkt": lambda: {
            "A": torch_gdn.chunk_scaled_dot_kkt(x["k"], x["g_cumsum"], x["beta"], **packed)
        },
        "solve_tril": lambda: {"A_inv": torch_gdn.solve_tril(x["A"], **packed)},
        "recompute_w_u": lambda: dict(
            zip(
                ("w", "u"),
                torch_gdn.recompute_w_u(x["k"], x["v"], x["beta"], x["A_inv"], x["g_cumsum"], **packed),
                strict=True,
            )
        ),
        "chunk_fwd_h": lambda: dict(
            zip(
                ("h", "v_new"),
                torch_gdn.chunk_fwd_h(
                    x["k"], x["w"], x["u"], x["g_cumsum"], initial_state=x.get("initial_state"), **packed
                )[:2],
                strict=True,
            )
        ),
        "chunk_fwd_o": lambda: {
            "chunk_o": torch_gdn.chunk_fwd_o(x["q"], x["k"], x["v_new"], x["h"], x["g_cumsum"], **packed)
        },
    }


@pytest.mark.parametrize("name", STAGED)
@pytest.mark.parametrize(
    "op",
    ["chunk_local_cumsum", "chunk_scaled_dot_kkt", "solve_tril", "recompute_w_u", "chunk_fwd_h", "chunk_fwd_o"],
)
def test_a_stage_fed_what_fla_was_fed(device: torch.device, op: str, name: str) -> None:
    golden = load(name)
    compute = stage_results(golden, device)[op]
    with kernels_run(device, op):
        results = compute()
    for tensor, ours in results.items():
        assert_close(tensor, ours, golden.tensors[tensor].double(), STAGE_BOUNDS.get(tensor, 3.5e-3))


@pytest.mark.parametrize("name", CHUNKED)
def test_the_chunked_op_is_as_exact_as_fla(device: torch.device, name: str) -> None:
    golden = load(name)
    o, state = run("chunk_gated_delta_rule", golden.case, device)
    assert_as_exact_as_fla("chunk_o", o, golden, head_dim=2)
    assert_as_exact_as_fla("chunk_final_state", state, golden, head_dim=1)


@pytest.mark.parametrize("name", NAMES)
def test_the_recurrent_op_is_as_exact_as_fla(device: torch.device, name: str) -> None:
    golden = load(name)
    o, state = run("fused_recurrent_gated_delta_rule", golden.case, device)
    assert_as_exact_as_fla("recurrent_o", o, golden, head_dim=2)
    assert_close("recurrent_final_state", state, golden.exact[1], RECURRENT_F32, head_dim=1)


@pytest.mark.parametrize("op", WHOLE_OPS)
@pytest.mark.parametrize("name", ["ragged_k64", "same_keys"])
def test_in_float32(device: torch.device, op: str, name: str) -> None:
    """The recorded inputs, widened: the errors of section "f32" of the rules, not FLA's TF32 ones."""
    golden = load(name)
    wide = golden.case.map(torch.Tensor.float)
    assert_exact(op, wide, run(op, wide, device))


def assert_as_exact_as_fla(name: str, x: Tensor, golden: Golden, head_dim: int) -> None:
    """At most 1.05 x FLA's error: of the tensor, as recorded in the index, and of each head, from FLA's own output."""
    exact = golden.exact[0 if name.endswith("_o") else 1]
    ours, theirs = x.double(), golden.tensors[name].double()
    assert relative_error(ours, exact) <= 1.05 * golden.fla_error[name]
    heads = zip(head_errors(ours, exact, head_dim), head_errors(theirs, exact, head_dim), strict=True)
    for head, (our_error, their_error) in enumerate(heads):
        assert our_error <= 1.05 * their_error, f"{name}: error of head {head}"


def test_the_recorded_error_is_that_of_the_recorded_output() -> None:
    """The index, the tensors and our oracle are of one piece."""
    for name in CHUNKED:
        golden = load(name)
        measured = relative_error(golden.tensors["chunk_o"].double(), golden.exact[0])
        assert measured == pytest.approx(golden.fla_error["chunk_o"], rel=2e-3)
