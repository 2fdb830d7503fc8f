"""Makes inputs of Kimi Delta Attention, and compares both functions with the float64 recurrence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

import torch_gdn
from tests.helpers.devices import kernels_run
from tests.helpers.errors import CHUNK_OUTPUT, CHUNK_STATE, RECURRENT_OUTPUT, assert_close
from tests.helpers.prefill import algorithm_at
from torch_gdn import reference
from torch_gdn_check.registry.inputs import doubled, to_device

FUNCTIONS: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "chunk_kda": torch_gdn.chunk_kda,
    "fused_recurrent_kda": torch_gdn.fused_recurrent_kda,
}
CHUNK, RECURRENT = FUNCTIONS
each_function = pytest.mark.parametrize("function", FUNCTIONS)
F32 = 1e-6
KERNEL = "fused_recurrent_gated_delta_rule"
FUSED = "fused_chunk_kda"
CHUNKED = ("kda_chunk_fwd_intra", "chunk_fwd_h", "chunk_fwd_o")
KERNELS = {"chunked": CHUNKED, "fused_chunk": (FUSED,), "recurrent": (KERNEL,)}
Inputs = dict[str, Tensor]


def kda_inputs(
    T: int,
    K: int = 64,
    V: int = 32,
    *,
    B: int = 1,
    H: int = 1,
    HV: int = 2,
    dtype: torch.dtype = torch.float32,
    N: int | None = None,
) -> Inputs:
    """Returns q, k (normalised), v, g of heads that remember some tokens, beta, and a state for each of N sequences."""
    random = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=random)

    return {
        "q": normalize(draw(B, T, H, K), dim=-1).to(dtype),
        "k": normalize(draw(B, T, H, K), dim=-1).to(dtype),
        "v": draw(B, T, HV, V).to(dtype),
        "g": logsigmoid(draw(B, T, HV, K) + 2),
        "beta": draw(B, T, HV).sigmoid(),
        "initial_state": draw(B if N is None else N, HV, K, V),
    }


def inputs_and_options(T: int) -> tuple[Inputs, dict[str, Any]]:
    """Yields inputs for every option of both functions that needs no further tensor."""
    inputs = kda_inputs(T, 32, 16, H=2, HV=4)
    inputs["q"], inputs["k"] = 3 * inputs["q"], 0.2 * inputs["k"]
    inputs["beta"] = 4 * inputs["beta"] - 2
    inputs["initial_state"] = inputs["initial_state"].mT.contiguous()
    flags = ("use_beta_sigmoid_in_kernel", "allow_neg_eigval", "use_qk_l2norm_in_kernel", "state_v_first")
    return inputs, dict.fromkeys(flags, True) | {"scale": 0.3}


def exact_kda(inputs: Inputs, **options: Any) -> tuple[Tensor, Tensor]:
    """Runs the float64 recurrence, which has no chunks, on these inputs."""
    options.pop("chunk_size", None)
    wide: dict[str, Any] = {name: doubled(x) for name, x in inputs.items()}
    o, state = reference.fused_recurrent_kda(**wide, **options, output_final_state=True)
    assert state is not None
    return o, state


def algorithm_of(function: str, inputs: Inputs, device: torch.device) -> str:
    """Returns the algorithm that the function uses on mps."""
    if device.type != "mps" or not function.startswith("chunk"):
        return "recurrent"
    batch, tokens, heads, V = inputs["v"].shape
    sequences = len(inputs["initial_state"])
    mean = -(-batch * tokens // sequences)
    return algorithm_at(mean, sequences * heads, inputs["k"].shape[3], V, channel_decays=True)


def assert_exact_kda(function: str, inputs: Inputs, device: torch.device, *, f32: float = F32, **options: Any) -> None:
    """Asserts that each head of the function's output and final state is within its bound of the float64 recurrence."""
    on_device = to_device(inputs, device)
    algorithm = algorithm_of(function, inputs, device)
    with kernels_run(device, *KERNELS[algorithm]):
        o, state = FUNCTIONS[function](**on_device, **to_device(options, device), output_final_state=True)
    assert state is not None
    exact_o, exact_state = exact_kda(inputs, **options)
    assert o.dtype == inputs["v"].dtype and state.dtype == torch.float32
    output, final = (CHUNK_OUTPUT, CHUNK_STATE) if algorithm == "chunked" else (RECURRENT_OUTPUT, {})
    assert_close("o", o.cpu(), exact_o, max(f32, output.get(o.dtype, 0)))
    assert_close("final_state", state.cpu(), exact_state, max(f32, final.get(o.dtype, 0)), head_dim=1)
