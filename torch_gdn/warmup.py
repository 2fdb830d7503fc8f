from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from torch_gdn import _C, specialisations, tuning_cache
from torch_gdn.ops.gdn.chunk_gated_delta_rule import chunk_gated_delta_rule


def warmup(
    shapes: Iterable[tuple[int, int, int, int]],
    device: torch.device | str = "mps",
    dtypes: Iterable[torch.dtype] = (torch.bfloat16,),
    progress: bool = True,
) -> list[str]:
    """Compiles the Metal pipelines that models with these head sizes will need, before the first request does.

    A pipeline is otherwise compiled when it is first used, which takes from a tenth of a second to some seconds. Those
    compiled are what both end-to-end ops need on aligned rows, in chunks of 64, with either state layout and with or
    without use_qk_l2norm_in_kernel, whichever algorithm (`torch_gdn.tune`) a prefill takes.

    Args:
        shapes: (H, HV, K, V) of each model, as (16, 32, 128, 128) of Qwen3-Next.
        device: where to compile; a device without pipelines ("cpu") has nothing to compile. Default: "mps".
        dtypes: of q, k and v. Default: bfloat16 alone.
        progress: whether to show a progress bar (by tqdm). Default: True.

    Returns:
        the names of the pipelines that were compiled by this call.

    Raises:
        ValueError, TypeError: a shape or dtype that the ops do not take.
        RuntimeError: Metal could not compile a kernel, or no Metal device is there.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.warmup([(2, 4, 64, 64)], device="cpu", dtypes=[torch.float32], progress=False)
        []
    """
    shapes, dtypes = list(shapes), list(dtypes)
    for dtype in dtypes:
        for shape in shapes:
            require_supported(*shape, dtype)
    if torch.device(device).type != "mps":
        return []
    before = {facts["name"] for facts in _C.pipelines()}
    variants = specialisations.model_variants([shape[2:] for shape in shapes], dtypes)
    sizes = sorted(tuning_cache.chunk_sizes(_C.device_facts()["name"]))
    wanted = specialisations.of_variants(replace(each, wanted_chunk_size=size) for size in sizes for each in variants)
    missing = [each for each in wanted if each.name not in before]
    from tqdm.auto import tqdm  # here, since importing it takes longer than importing torch_gdn

    for each in tqdm(missing, desc="torch_gdn: compiling", unit="kernel", disable=not progress):
        _C.compile(each.kernel, each.file, list(each.arguments))
    return [each.name for each in missing]


def require_supported(H: int, HV: int, K: int, V: int, dtype: torch.dtype) -> None:
    """Raises what the ops raise for such tensors; without a token they compute nothing."""
    q, v = torch.empty(1, 0, H, K, dtype=dtype), torch.empty(1, 0, HV, V, dtype=dtype)
    gates = torch.empty(1, 0, HV)
    chunk_gated_delta_rule(q, q, v, gates, gates)
