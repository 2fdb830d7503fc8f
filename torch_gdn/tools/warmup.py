import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from torch_gdn import _C, self_test
from torch_gdn._compiling import compile_variants
from torch_gdn._mps import why_no_mps
from torch_gdn._recorder import KernelVariant, recording
from torch_gdn.ops.convolutions import causal_conv1d, causal_conv1d_update_
from torch_gdn.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from torch_gdn.ops.layers import gdn_gating, rms_norm_gated
from torch_gdn.tools.prefill import prefill_algorithm

Shape = tuple[int, int, int, int]  # H, HV, K, V
FEW_TOKENS, TOKENS = 2, 17  # a convolution with a state has a separate kernel for up to 16 tokens
LONGEST_PROMPT, MOST_SEQUENCES = 2**17, 64  # up to which a shape's prefill algorithms are asked


def warmup(
    model_or_shapes: nn.Module | Iterable[Shape],
    device: torch.device | str = "mps",
    dtypes: Iterable[torch.dtype] = (torch.bfloat16,),
    progress: bool = True,
    *,
    longest_prompt: int = 512,
    cache: Callable[[], Any] | None = None,
) -> list[str]:
    """Compiles the Metal pipelines that a model will need, before the first request does.

    A pipeline is otherwise compiled when it is first used, which takes from a tenth of a second to a few seconds.
    warmup records the launches of real calls (`torch_gdn.recording`), so no kernel of torch_gdn runs in this thread
    meanwhile.

    A transformers model must have torch_gdn's integration enabled. It is called with prompts of 1, 2, 4, ... tokens,
    each followed by one token and by a few on the cache, and exactly what these calls launch is compiled. Generation
    from one prompt of up to `longest_prompt` tokens then compiles nothing more. If there is a tuning cache, this holds
    if it was measured at powers of two, which is the default of `torch_gdn tune`.

    For shapes, warmup compiles what a Gated DeltaNet layer launches: both end-to-end ops on aligned rows, in chunks of
    64, with either state layout, with and without use_qk_l2norm_in_kernel, and with each prefill algorithm that the
    tuning cache or the heuristic selects for any prompt or batch; the convolution; the gating; and the gated norm.

    Args:
        model_or_shapes: A model, or a list of (H, HV, K, V), such as [(16, 32, 128, 128)] for Qwen3-Next.
        device: The device to compile for, given shapes; a model has its own. "cpu" has nothing to compile. Default:
            "mps".
        dtypes: The dtypes of q, k and v, given shapes. Default: (bfloat16,).
        progress: Whether to show a progress bar (tqdm). Default: True.
        longest_prompt: The longest prompt in tokens, given a model. Default: 512.
        cache: Returns the cache that a model is called with, such as `lambda: AuraCache(model.config)`. Default: the
            model's own.

    Returns:
        names: The pipelines that this call compiled.

    Raises:
        ValueError, TypeError: If an argument is not as above, or if the ops do not take a shape or dtype.
        RuntimeError: If Metal cannot compile a kernel, or if PyTorch has no mps device.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.warmup([(2, 4, 64, 64)], device="cpu", dtypes=[torch.float32], progress=False)
        []
    """
    self_test.load()
    if isinstance(model_or_shapes, nn.Module):
        variants = variants_of_model(model_or_shapes, longest_prompt, cache)
    else:
        variants = variants_of_shapes(shapes_of(model_or_shapes), torch.device(device), dtypes_of(dtypes))
    return compile_missing(variants, progress)


def shapes_of(model_or_shapes: Any) -> list[Shape]:
    shapes = list(model_or_shapes) if isinstance(model_or_shapes, Iterable) else [model_or_shapes]
    if not all(is_shape(shape) for shape in shapes):
        raise TypeError(
            "warmup: model_or_shapes: expected a model, or a list of (H, HV, K, V), such as [(16, 32, 128, 128)], "
            f"got {model_or_shapes!r}"
        )
    return shapes


def is_shape(shape: Any) -> bool:
    return isinstance(shape, Sequence) and len(shape) == 4 and all(isinstance(size, int) for size in shape)


def dtypes_of(dtypes: Any) -> list[torch.dtype]:
    result: list[Any] = list(dtypes) if isinstance(dtypes, Iterable) else [None]
    if not all(isinstance(dtype, torch.dtype) for dtype in result):
        raise TypeError(f"warmup: dtypes: expected a list of dtypes, such as [torch.bfloat16], got {dtypes!r}")
    return result


def compile_missing(variants: list[KernelVariant], progress: bool = True) -> list[str]:
    """Compiles the variants that have no pipeline yet, and returns their names."""
    if not variants:
        return []
    compiled = {facts["name"] for facts in _C.pipelines()}
    missing = [each for each in variants if each.name not in compiled]
    from tqdm.auto import tqdm  # here, because importing it takes longer than importing torch_gdn

    with tqdm(total=len(missing), desc="torch_gdn: compiling", unit="kernel", disable=not progress) as bar:
        compile_variants(missing, bar.update)
    return [each.name for each in missing]


@torch.no_grad()
def variants_of_model(
    model: nn.Module, longest_prompt: int, cache: Callable[[], Any] | None = None
) -> list[KernelVariant]:
    """Returns what forward passes launch: for a prompt, for one token on its cache, and for a few, as in a draft."""
    from torch_gdn.integrations.transformers import versions  # here, because it needs transformers

    device = next(model.parameters()).device
    if device.type != "mps":
        return []
    with recording() as recorded:
        for length in sizes_up_to(longest_prompt):
            past = {} if cache is None else versions.with_cache(cache())
            for tokens in (length, 1, FEW_TOKENS):
                ids = torch.zeros(1, tokens, dtype=torch.long, device=device)
                past = versions.with_cache(versions.cache_in(model(input_ids=ids, use_cache=True, **past)))
    return recorded.variants


@torch.no_grad()
def variants_of_shapes(shapes: list[Shape], device: torch.device, dtypes: list[torch.dtype]) -> list[KernelVariant]:
    """Returns what a layer of each shape launches."""
    for shape, dtype in itertools.product(shapes, dtypes):
        require_supported(*shape, dtype)
    if device.type != "mps":
        return []
    reason = why_no_mps()
    if reason:
        raise RuntimeError(f"warmup: device: expected an available device, got {device}: {reason}")
    with recording() as recorded:
        for shape, dtype in itertools.product(shapes, dtypes):
            call_delta_rule(shape, device, dtype)
            call_modules(shape, device, dtype)
    return recorded.variants


def require_supported(H: int, HV: int, K: int, V: int, dtype: torch.dtype) -> None:
    """Raises what the ops raise for such tensors, by calling them without any tokens."""
    q, v = torch.empty(1, 0, H, K, dtype=dtype), torch.empty(1, 0, HV, V, dtype=dtype)
    gates = torch.empty(1, 0, HV)
    chunk_gated_delta_rule(q, q, v, gates, gates)


def prefill_algorithms(shape: Shape) -> Iterator[tuple[str, int]]:
    """Returns all algorithms and chunk sizes that this device chooses for prompts and batches of any size."""
    _, HV, K, V = shape
    facts = _C.device_facts()
    sizes = itertools.product(powers_of_two(LONGEST_PROMPT), powers_of_two(MOST_SEQUENCES))
    choices = (
        _C.prefill_algorithm(tokens, sequences * HV, K, V, facts["name"], facts["core_count"])
        for tokens, sequences in sizes
    )
    yield from dict.fromkeys(choices)


def powers_of_two(largest: int) -> list[int]:
    return [2**i for i in range(largest.bit_length())]


def sizes_up_to(largest: int) -> list[int]:
    """Returns the powers of two, and the largest size."""
    return sorted({1, *powers_of_two(largest), largest})


def call_delta_rule(shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
    H, HV, K, V = shape
    q, v = (torch.zeros(1, TOKENS, *sizes, dtype=dtype, device=device) for sizes in ((H, K), (HV, V)))
    gates = torch.zeros(1, TOKENS, HV, device=device)
    for state_v_first, normalise in itertools.product((False, True), repeat=2):
        options: dict[str, Any] = {
            "initial_state": torch.zeros(1, HV, *((V, K) if state_v_first else (K, V)), device=device),
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": normalise,
            "state_v_first": state_v_first,
        }
        for tokens in (1, TOKENS):  # one token has a separate kernel
            few_q, few_v, few_gates = (x[:, :tokens] for x in (q, v, gates))
            fused_recurrent_gated_delta_rule(few_q, few_q, few_v, few_gates, beta=few_gates, **options)
        for choice in prefill_algorithms(shape):
            with prefill_algorithm(*choice):
                chunk_gated_delta_rule(q, q, v, gates, gates, **options)


def call_modules(shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
    """Calls the convolution (on a prompt, with a state, on one token), the gating and the gated norm."""
    H, HV, K, V = shape
    zeros = partial(torch.zeros, dtype=dtype, device=device)
    D, heads = 2 * H * K + HV * V, zeros(1, TOKENS, HV)
    x, weight, state = zeros(1, TOKENS, D), zeros(D, 4), zeros(1, D, 4)
    causal_conv1d(x, weight, activation="silu")
    causal_conv1d(x, weight, initial_state=state, output_final_state=True, activation="silu")
    causal_conv1d_update_(x[:, :1], weight, state, activation="silu")
    gdn_gating(heads[0, 0].float(), heads, heads, heads[0, 0].float())
    out = zeros(1, TOKENS, HV, V)
    rms_norm_gated(out, out, zeros(V))
