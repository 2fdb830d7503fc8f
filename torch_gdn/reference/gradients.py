"""The gradients of the delta rules: autograd through the recurrence, in plain PyTorch of any float dtype.

`csrc/cpu/simd/backward_kernels.h` has the matrix form of a chunk, of which the kernels take the gradients.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torch_gdn.reference import common
from torch_gdn.reference.gdn import fused_recurrent_gated_delta_rule
from torch_gdn.reference.kda import fused_recurrent_kda

__all__ = ["chunk_gated_delta_rule_bwd", "chunk_kda_bwd"]

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, "Tensor | None"]


def chunk_kda_bwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, do: Tensor, dht: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, head_grouping: str = "block",
    rule: Callable[..., Any] = fused_recurrent_kda,
) -> Gradients:  # fmt: skip
    """Returns the gradients of `chunk_kda` with final gates."""
    options = {
        "scale": scale,
        "output_final_state": dht is not None,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "state_v_first": state_v_first,
        "cu_seqlens": cu_seqlens,
        "head_grouping": head_grouping,
    }

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None) -> Any:
        return rule(q, k, v, g, beta, initial_state=initial_state, **options)

    dtype = common.compute_dtype(q)
    in_f32 = (x if x is None else x.to(dtype) for x in (g, beta, initial_state))
    result: Any = common.gradients(run, (q, k, v, *in_f32), (do, dht))
    return tuple(result)


def chunk_gated_delta_rule_bwd(*arguments: Any, **options: Any) -> Gradients:
    """Returns the gradients of `chunk_gated_delta_rule` with final gates. Takes the arguments of `chunk_kda_bwd`."""
    return chunk_kda_bwd(*arguments, **options | {"rule": fused_recurrent_gated_delta_rule})
