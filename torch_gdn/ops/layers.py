"""Norms, gates, activations and copies around the delta rules."""

from typing import Any

import torch
from torch import Tensor

from torch_gdn.autograd import needs_grad
from torch_gdn.autograd.layers import GdnGating, L2Norm, RmsNorm, RmsNormGated

__all__ = [
    "act_and_mul",
    "batch_copy_",
    "copy_from_host_",
    "fused_gdn_gate",
    "gdn_gating",
    "l2norm",
    "l2norm_fwd",
    "qk_norm_rope",
    "rms_norm",
    "rms_norm_gated",
]


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Normalises the last dimension: x * rsqrt(sum x^2 + eps), computed in float32.

    FLA: `fla.modules.l2norm.l2norm`, without its `output_dtype`.

    Args:
        x: [..., D], bfloat16, float16 or float32.
        eps: Added to the sum of squares. With 0, a row of zeros returns NaN. Default: 1e-6.

    Returns:
        y: x's shape and dtype.

    Raises:
        ValueError: If x has no dimension, or if eps is negative.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.l2norm(torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])
    """
    return L2Norm.apply(x, eps) if needs_grad(x) else torch.ops.gdn.l2norm(x, eps)[0]


def l2norm_fwd(x: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Returns what `l2norm` does, and the factor by which it multiplied each row. It raises the same errors.

    FLA: `fla.modules.l2norm.l2norm_fwd`, without its `output_dtype`.

    Args:
        x, eps: See `l2norm`.

    Returns:
        y: x's shape and dtype.
        rstd: [...], float32. The factor rsqrt(sum x^2 + eps).

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.l2norm_fwd(torch.tensor([3.0, 4.0]))
        (tensor([0.6000, 0.8000]), tensor(0.2000))
    """
    return torch.ops.gdn.l2norm(x, eps, return_rstd=True)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    *,
    zero_centered: bool = False,
    round_norm: bool = False,
) -> Any:
    """Adds the residual and normalises the sum h = x + residual: h * rsqrt(mean of h^2 + eps) * weight.

    FLA: `fla.modules.layernorm.rms_norm`, without bias and dropout. Both h and its norm are computed in float32; h is
    not rounded before the norm, as in FLA and vLLM.

    Args:
        x: [..., D], bfloat16, float16 or float32. D is at most 16384. Any strides. x is copied if its last stride is
            not 1, or if it has more than 4 dimensions and is not contiguous.
        weight: [D], bfloat16, float16 or float32. Default: ones.
        bias: None. The norm has no bias.
        residual: x's shape and dtype. Any strides. Default: zeros.
        eps: Added to the mean. With 0, a row of zeros returns NaN. Default: 1e-6.
        prenorm: Whether to return h too, which is the residual of the next layer. Default: False.
        zero_centered: Whether to multiply by 1 + weight, as Qwen3-Next, Qwen3.5 and Gemma do. Default: False.
        round_norm: Whether to round the normalised h to x's dtype before the weight, as transformers' Llama does.
            Default: False.

    Returns:
        y: x's shape and dtype. Contiguous.
        residual_out: x's shape and dtype; only with prenorm. This is h, or x itself without a residual.

    Raises:
        ValueError: If there is a bias, or if zero_centered is set without a weight.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.rms_norm(torch.tensor([1.0, 4.0]), residual=torch.tensor([2.0, 0.0]), prenorm=True)
        (tensor([0.8485, 1.1314]), tensor([3., 4.]))
    """
    if bias is not None:
        raise ValueError(f"rms_norm: bias: expected None, got a tensor of shape {list(bias.shape)}")
    norm = RmsNorm.apply if needs_grad(x, weight, residual) else torch.ops.gdn.rms_norm
    y, h = norm(x, weight, residual, eps, zero_centered, round_norm)
    if not prenorm:
        return y
    return y, x if residual is None else h


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "silu",
    *,
    eps: float = 1e-6,
    round_norm: bool = False,
) -> Tensor:
    """Normalises a layer's output and multiplies it by its gate: x * rsqrt(mean of x^2 + eps) * weight * silu(g).

    FLA: `fla.modules.fused_norm_gate.rms_norm_gated`, without residual and bias. Like FLA's `FusedRMSNormGated` and
    vLLM's norm, it computes in float32 and rounds once. transformers' `Qwen3NextRMSNormGated` rounds twice more: see
    round_norm.

    Args:
        x: [..., D], bfloat16, float16 or float32. D is at most 16384, on `mps` 1024. Any strides. x is copied if its
            last stride is not 1, or if it has more than 4 dimensions and is not contiguous.
        g: x's shape, bfloat16, float16 or float32. The gate. Any strides.
        weight: [D], bfloat16, float16 or float32. Default: ones.
        bias: None. The norm has no bias.
        activation: The gate's activation: "silu", its synonym "swish", or "sigmoid". Default: "silu".
        eps: Added to the mean. With 0, a row of zeros returns NaN. FLA's layer has 1e-5. Default: 1e-6.
        round_norm: Whether to round the normalised x to x's dtype before the weight, and the product to the dtype of
            both, as transformers does. Default: False.

    Returns:
        y: x's shape and dtype. Contiguous.

    Raises:
        ValueError: If there is a bias.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.rms_norm_gated(torch.tensor([3.0, 4.0]), torch.tensor([100.0, 0.0]))
        tensor([84.8528,  0.0000])
    """
    if bias is not None:
        raise ValueError(f"rms_norm_gated: bias: expected None, got a tensor of shape {list(bias.shape)}")
    norm = RmsNormGated.apply if needs_grad(x, g, weight) else torch.ops.gdn.rms_norm_gated
    return norm(x, g, weight, activation, eps, round_norm)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    zero_centered: bool = False,
    heads_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """Normalises each head of q and k, and rotates its first 2 P elements by the angles of the token.

    The norm is x * rsqrt(mean of x^2 + eps) * weight. Then the pair (x[i], x[i + P]) becomes
    (x[i] cos[i] - x[i + P] sin[i], x[i + P] cos[i] + x[i] sin[i]) for i < P, and the elements from 2 P on stay. This is
    how Qwen, Llama and GPT-NeoX place their pairs. The caller's tables decide the angles, so that scaled positions and
    sections of positions (mrope) need nothing else. Computed in float32 and rounded once. On `mps` this is one launch.

    Args:
        q: [B, T, HQ, D], bfloat16, float16 or float32. Any strides, so that it can be a part of a projection. Copied if
            its last stride is not 1.
        k: [B, T, HK, D], q's dtype. Any strides; copied as q is.
        cos: [B, T, P], bfloat16, float16 or float32. P is from 1 to D / 2. Any strides; a stride of 0 repeats the
            angles for each sequence. Tables of transformers have each angle twice: pass the first half.
        sin: cos's shape and dtype.
        q_weight: [D], bfloat16, float16 or float32. Default: q and k are rotated without a norm.
        k_weight: [D], q_weight's dtype. Default: None; there are two weights or none.
        eps: Added to the mean. With 0, a head of zeros returns NaN. Default: 1e-6.
        zero_centered: Whether to multiply by 1 + weight, as Qwen3-Next and Qwen3.5 do. Default: False.
        heads_first: Whether q_out and k_out are [B, H, T, D], contiguous, as attention takes them. Default: False.

    Returns:
        q_out: [B, T, HQ, D] ([B, HQ, T, D] with heads_first), q's dtype. Contiguous.
        k_out: [B, T, HK, D] ([B, HK, T, D] with heads_first), q's dtype. Contiguous.

    Raises:
        ValueError: If there is one weight, or if zero_centered is set without weights.

    Example:
        >>> import torch, torch_gdn
        >>> q = torch.tensor([3.0, 0.0, 5.0, 1.0]).view(1, 1, 1, 4)
        >>> torch_gdn.qk_norm_rope(q, q, torch.zeros(1, 1, 1), torch.ones(1, 1, 1))[0].flatten()
        tensor([0., 3., 5., 1.])
    """
    return torch.ops.gdn.qk_norm_rope(q, k, cos, sin, q_weight, k_weight, eps, zero_centered, heads_first)


def gdn_gating(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor | None = None, allow_neg_eigval: bool = False
) -> tuple[Tensor, Tensor]:
    """Computes a layer's gates: the log decay g = -exp(A_log) softplus(a + dt_bias), and beta = sigmoid(b).

    FLA: `fla.ops.gated_delta_rule.gate`; vLLM: `fused_gdn_gating`. Both ops of the delta rule can compute the same
    gates themselves (use_gate_in_kernel, use_beta_sigmoid_in_kernel).

    Args:
        A_log: [HV], bfloat16, float16 or float32. Any strides.
        a: [..., HV], bfloat16, float16 or float32. Any strides.
        b: a's shape, bfloat16, float16 or float32. Any strides.
        dt_bias: [HV], bfloat16, float16 or float32. Default: zeros.
        allow_neg_eigval: Whether to double beta. Default: False.

    Returns:
        g, beta: a's shape, float32.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.gdn_gating(torch.zeros(1), torch.zeros(1), torch.zeros(1))
        (tensor([-0.6931]), tensor([0.5000]))
    """
    gating = GdnGating.apply if needs_grad(A_log, a, b, dt_bias) else torch.ops.gdn.gdn_gating
    return gating(A_log, a, b, dt_bias, allow_neg_eigval)


def fused_gdn_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, output_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Computes a layer's log decay from its projection: -exp(A_log) softplus(g + dt_bias).

    FLA: `fla.ops.gated_delta_rule.gate.fused_gdn_gate`. `gdn_gating` returns beta too.

    Args:
        g: [..., HV], bfloat16, float16 or float32. Any strides.
        A_log: [HV], bfloat16, float16 or float32. Any strides.
        dt_bias: [HV], bfloat16, float16 or float32. Default: zeros.
        output_dtype: bfloat16, float16 or float32. The arithmetic is in float32. Default: float32.

    Returns:
        log_decay: g's shape, output_dtype.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.fused_gdn_gate(torch.zeros(2), torch.zeros(2), torch.tensor([0.0, 1.0]))
        tensor([-0.6931, -1.3133])
    """
    if output_dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(
            f"fused_gdn_gate: output_dtype: expected bfloat16, float16 or float32, got {str(output_dtype)[6:]}"
        )
    return gdn_gating(A_log, g, g, dt_bias)[0].to(output_dtype)


def act_and_mul(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """Multiplies up by the activated gate, element by element: silu(gate) * up, or sigmoid(gate) * up.

    vLLM: `silu_and_mul`; FLA: `swiglu`. Computed in float32 and rounded once. On `mps` this is one launch.

    Args:
        gate: [..., D], bfloat16, float16 or float32. Any strides, so that gate and up can be halves of one projection.
            Copied if its last stride is not 1, or if it has more than 4 dimensions and is not contiguous.
        up: gate's shape and dtype. Any strides; copied as gate is.
        activation: "silu", "swish" (the same) or "sigmoid". Default: "silu".

    Returns:
        y: gate's shape and dtype. Contiguous.

    Raises:
        ValueError: If the shapes differ, if there is no dimension, or if the activation is not as above.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.act_and_mul(torch.tensor([0.0, 4.0]), torch.tensor([3.0, 1.0]))
        tensor([0.0000, 3.9281])
    """
    return torch.ops.gdn.act_and_mul(gate, up, activation)


def batch_copy_(pool: Tensor, source_offsets: Tensor, destination_offsets: Tensor, sizes: Tensor) -> None:
    """Copies ranges of bytes within one buffer, in place and in one dispatch.

    An engine moves states with it: prefix caching copies blocks of states of any size, and a window of columns slides
    within its slot. A range may overlap itself. The result is then as if it had been read before it was written.

    vLLM: `batch_memcpy` of `vllm.v1.worker.mamba_utils`, here with offsets into pool instead of addresses.

    Args:
        pool: [bytes], uint8. The bytes of an engine's storage, with a stride of 1, as `torch.empty(0,
            dtype=torch.uint8, device=...).set_(states.untyped_storage())` returns them.
        source_offsets, destination_offsets: [n], int32 or int64. The byte at which each range starts. Any stride, on
            the CPU or on pool's device. No range may write bytes that another one reads or writes; only offsets on the
            CPU are checked for this. Two ranges may read the same bytes.
        sizes: [n], int32 or int64. The number of bytes in each range, which may be 0. Any stride, on the CPU or on
            pool's device. The kernel copies 16 bytes at a time if both offsets are the same distance from a multiple of
            16 in the storage, and 2 bytes at a time if both are odd or both are even.

    Raises:
        ValueError: If a range leaves the pool, or if it writes bytes that another one reads or writes. Nothing is
            copied then.
        RuntimeError: On `mps`, at the next synchronisation, if a range given on the device leaves the pool. That range
            is not copied.

    Example:
        >>> import torch, torch_gdn
        >>> pool = torch.arange(8, dtype=torch.uint8)
        >>> source_offsets, destination_offsets, sizes = torch.tensor([[1, 6], [0, 4], [3, 2]]).unbind()
        >>> torch_gdn.batch_copy_(pool, source_offsets, destination_offsets, sizes)
        >>> pool
        tensor([1, 2, 3, 3, 6, 7, 6, 7], dtype=torch.uint8)
    """
    torch.ops.gdn.batch_copy_(pool, source_offsets, destination_offsets, sizes)


def copy_from_host_(dst: Tensor, src: Tensor) -> None:
    """Copies a small array of the host to the device without waiting for it, in place.

    On `mps`, PyTorch's copy ends the stream's encoder and submits the work so far, and a blocking one waits for the
    GPU. This op puts the numbers into its own command instead, so you may change src as soon as the op returns. PyTorch
    copies arrays of more than 32 KiB, and the host waits.

    Source: `CpuGpuBuffer.copy_to_gpu` in vLLM has this purpose.

    Args:
        dst: [...], any dtype. Contiguous. Written in place.
        src: [...], dst's dtype. dst's shape, with any strides, on the CPU or on dst's device.

    Example:
        >>> import torch, torch_gdn
        >>> lengths = torch.zeros(3, dtype=torch.int32)
        >>> torch_gdn.copy_from_host_(lengths, torch.tensor([7, 1, 12], dtype=torch.int32))
        >>> lengths
        tensor([ 7,  1, 12], dtype=torch.int32)
    """
    torch.ops.gdn.copy_from_host_(dst, src)
