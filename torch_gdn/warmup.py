from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_gdn import _C
from torch_gdn.chunk_gated_delta_rule import chunk_gated_delta_rule
from torch_gdn.fused_recurrent_gated_delta_rule import fused_recurrent_gated_delta_rule


def warmup(
    shapes: Iterable[tuple[int, int, int, int]],
    device: torch.device | str = "mps",
    dtypes: Iterable[torch.dtype] = (torch.bfloat16,),
    progress: bool = True,
) -> list[str]:
    """Compiles the Metal pipelines that models with these head sizes will need, before the first request does.

    A pipeline is compiled when it is first used, which takes from a tenth of a second to some seconds. This runs both
    whole ops once on small tensors of each kind, with the options that models use.

    Args:
        shapes: (H, HV, K, V) of each model, as (16, 32, 128, 128) of Qwen3-Next.
        device: where to compile; on a device without pipelines ("cpu") nothing is left to compile. Default: "mps".
        dtypes: of q, k and v. Default: bfloat16 alone.
        progress: whether to show a progress bar (by tqdm). Default: True.

    Returns:
        the names of the pipelines that were compiled by this call.

    Raises:
        ValueError, TypeError: a shape or dtype that the ops do not take.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.warmup([(2, 4, 64, 64)], device="cpu", dtypes=[torch.float32], progress=False)
        []
    """
    before = compiled_pipelines()
    calls = [
        (H, HV, K, V, dtype, l2norm, state_v_first)
        for H, HV, K, V in shapes
        for dtype in dtypes
        for l2norm in (False, True)
        for state_v_first in (False, True)
    ]
    bar = None
    if progress:
        from tqdm.auto import tqdm

        bar = tqdm(total=len(calls), desc="torch_gdn: compiling", unit="call")
    for call in calls:
        run_once(*call, device=torch.device(device))
        if bar is not None:
            bar.update()
    if bar is not None:
        bar.close()
    return [name for name in compiled_pipelines() if name not in set(before)]


def compiled_pipelines() -> list[str]:
    return [facts["name"] for facts in _C.pipelines()] if _C.has_launcher() else []


@torch.no_grad()
def run_once(
    H: int,
    HV: int,
    K: int,
    V: int,
    dtype: torch.dtype,
    l2norm: bool,
    state_v_first: bool,
    device: torch.device,
) -> None:
    """Both whole ops on 2 tokens: as prefill from nothing, and as decoding from a state."""
    q = torch.ones(1, 2, H, K, dtype=dtype, device=device)
    v = torch.ones(1, 2, HV, V, dtype=dtype, device=device)
    g = torch.zeros(1, 2, HV, device=device)
    state = torch.zeros((1, HV, V, K) if state_v_first else (1, HV, K, V), device=device)
    for initial_state in (None, state):
        for op in (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule):
            op(
                q,
                q,
                v,
                g,
                beta=g,
                initial_state=initial_state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=l2norm,
                state_v_first=state_v_first,
            )
