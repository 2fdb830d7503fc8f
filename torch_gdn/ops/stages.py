"""The stages of the chunked gated delta rule, each an op of its own."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_gdn.ops.arguments import check_cu_seqlens, check_tensor

__all__ = [
    "chunk_bwd_dqkwg",
    "chunk_bwd_dv_local",
    "chunk_fwd_h",
    "chunk_fwd_o",
    "chunk_gated_delta_rule_bwd_dhu",
    "chunk_gated_delta_rule_fwd_h",
    "chunk_local_cumsum",
    "chunk_scaled_dot_kkt",
    "chunk_scaled_dot_kkt_fwd",
    "prepare_chunk_indices",
    "prepare_chunk_offsets",
    "prepare_wy_repr_bwd",
    "recompute_w_u",
    "recompute_w_u_fwd",
    "solve_tril",
]


def prepare_chunk_indices(cu_seqlens: Tensor, chunk_size: int = 64) -> Tensor:
    """Lists the chunks of packed sequences.

    FLA: `fla.ops.utils.prepare_chunk_indices`. The function reads cu_seqlens on the host. On `mps` that waits for the
    device, so call it once per batch, not once per layer.

    Args:
        cu_seqlens: [N + 1], int32 or int64. The boundaries of N packed sequences.
        chunk_size: Tokens per chunk. Default: 64.

    Returns:
        chunk_indices: [NT, 2], cu_seqlens's dtype. The sequence of each chunk and the chunk's number in that sequence,
            in order. On the device of cu_seqlens.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.prepare_chunk_indices(torch.tensor([0, 17, 17, 100]), 64)
        tensor([[0, 0],
                [2, 0],
                [2, 1]])
    """
    check_cu_seqlens("prepare_chunk_indices", cu_seqlens)
    pairs = [
        (n, chunk)
        for n, (first, last) in enumerate(pairwise(cu_seqlens.tolist()))
        for chunk in range(-(-(last - first) // chunk_size))
    ]
    return torch.tensor(pairs, dtype=cu_seqlens.dtype, device=cu_seqlens.device).reshape(-1, 2)


def prepare_chunk_offsets(cu_seqlens: Tensor, chunk_size: int = 64) -> Tensor:
    """Counts the chunks before each packed sequence, which is the row of h at which the sequence starts.

    FLA: `fla.ops.utils.prepare_chunk_offsets`.

    Args:
        cu_seqlens: [N + 1], int32 or int64. The boundaries of N packed sequences.
        chunk_size: Tokens per chunk. Default: 64.

    Returns:
        chunk_offsets: [N + 1], int64. The last one is the number of chunks. On the device of cu_seqlens.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.prepare_chunk_offsets(torch.tensor([0, 17, 17, 100]), 64)
        tensor([0, 1, 1, 3])
    """
    check_cu_seqlens("prepare_chunk_offsets", cu_seqlens)
    chunks = (cu_seqlens.diff() + chunk_size - 1) // chunk_size
    return pad(chunks.cumsum(0), (1, 0))


def decay_sums(function: str, g: Tensor | None, name: str, like: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Returns g, or zeros for the tokens and heads of `like`."""
    check_tensor(function, name, like)
    check_cu_seqlens(function, cu_seqlens)
    return torch.zeros(like.shape[:3], dtype=torch.float32, device=like.device) if g is None else g


def chunk_local_cumsum(
    g: Tensor, chunk_size: int = 64, *, cu_seqlens: Tensor | None = None, chunk_indices: Tensor | None = None
) -> Tensor:
    """Sums the log decays from the start of each token's chunk up to the token.

    FLA: `fla.ops.utils.chunk_local_cumsum`, without its `reverse`, `scale` and `output_dtype`. The sum is always
    forward, in natural logarithms and in float32.

    Args:
        g: [B, T, HV], any floating dtype. Values below -104 count as -104; exp of either is 0 in float32.
        chunk_size: 16, 32 or 64. Default: 64.
        cu_seqlens, chunk_indices: See `chunk_fwd_h`.

    Returns:
        g_cumsum: [B, T, HV], float32.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.chunk_local_cumsum(torch.full((1, 20, 1), -0.5), chunk_size=16)[0, [0, 15, 16], 0]
        tensor([-0.5000, -8.0000, -0.5000])
    """
    check_cu_seqlens("chunk_local_cumsum", cu_seqlens)
    return torch.ops.gdn.chunk_local_cumsum(g, chunk_size, cu_seqlens, chunk_indices)


def chunk_scaled_dot_kkt(
    k: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    *,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """Computes A[i, j] = beta_i (k_i . k_j) exp(g_i - g_j) for tokens i > j of one chunk; the rest of A is 0.

    FLA: `fla.ops.common.chunk_scaled_dot_kkt.chunk_scaled_dot_kkt_fwd`, without its `output_dtype`. In "Gated Delta
    Networks" (Yang, Kautz, Hatamizadeh, 2024) it is the strictly lower part that the WY form inverts.

    Args:
        k: [B, T, H, K], bfloat16, float16 or float32. K is at most 256.
        g: [B, T, HV], float32. The cumulative sum from `chunk_local_cumsum`. HV is a multiple of H. Default: zeros.
        beta: [B, T, HV], any floating dtype. Default: ones.
        chunk_size: 16, 32 or 64. Default: 64.
        cu_seqlens, chunk_indices: See `chunk_fwd_h`.

    Returns:
        A: [B, T, HV, chunk_size], float32. Columns past the end of a short chunk are 0.

    Example:
        >>> import torch, torch_gdn
        >>> k = torch.ones(1, 3, 1, 4)
        >>> torch_gdn.chunk_scaled_dot_kkt(k, chunk_size=16)[0, :, 0, :3]
        tensor([[0., 0., 0.],
                [4., 0., 0.],
                [4., 4., 0.]])
    """
    check_tensor("chunk_scaled_dot_kkt", "k", k)
    check_cu_seqlens("chunk_scaled_dot_kkt", cu_seqlens)
    if beta is None:
        beta = k.new_ones(k.shape[:3] if g is None else g.shape)
    if g is None:
        g = torch.zeros_like(beta, dtype=torch.float32)
    return torch.ops.gdn.chunk_scaled_dot_kkt(k, g, beta, cu_seqlens, chunk_size, chunk_indices)


chunk_scaled_dot_kkt_fwd = chunk_scaled_dot_kkt


def solve_tril(A: Tensor, cu_seqlens: Tensor | None = None, *, chunk_indices: Tensor | None = None) -> Tensor:
    """Inverts I + A for the strictly lower triangular A of each chunk and head.

    FLA: `fla.ops.utils.solve_tril`, without its `output_dtype`. The kernel uses forward substitution, never a Neumann
    series, so that repeated keys with beta up to 2 lose no digits.

    Args:
        A: [B, T, HV, C], float32. C is the chunk size: 16, 32 or 64. Only the strictly lower triangle is read.
        cu_seqlens, chunk_indices: See `chunk_fwd_h`.

    Returns:
        A_inv: [B, T, HV, C], float32. Columns past the end of a short chunk are 0.

    Example:
        >>> import torch, torch_gdn
        >>> A = torch.zeros(1, 2, 1, 16)
        >>> A[0, 1, 0, 0] = 0.5
        >>> torch_gdn.solve_tril(A)[0, :, 0, :2]
        tensor([[ 1.0000,  0.0000],
                [-0.5000,  1.0000]])
    """
    check_cu_seqlens("solve_tril", cu_seqlens)
    return torch.ops.gdn.solve_tril(A, cu_seqlens, chunk_indices)


def recompute_w_u(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    g: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the WY form of each chunk's updates: w = A (beta k exp(g)) and u = A (beta v).

    FLA: `fla.ops.gated_delta_rule.wy_fast.recompute_w_u_fwd`.

    Args:
        k: [B, T, H, K], bfloat16, float16 or float32. K is at most 256.
        v: [B, T, HV, V], k's dtype. HV is a multiple of H. V is at most 512.
        beta: [B, T, HV], any floating dtype.
        A: [B, T, HV, C], float32. The inverse from `solve_tril`.
        g: [B, T, HV], float32. The cumulative sum from `chunk_local_cumsum`. Default: zeros.
        cu_seqlens, chunk_indices: See `chunk_fwd_h`.

    Returns:
        w: [B, T, HV, K], k's dtype.
        u: [B, T, HV, V], k's dtype.

    Example:
        >>> import torch, torch_gdn
        >>> k, v, beta = torch.randn(1, 70, 2, 64), torch.randn(1, 70, 4, 32), torch.rand(1, 70, 4)
        >>> A = torch_gdn.solve_tril(torch_gdn.chunk_scaled_dot_kkt(k, beta=beta))
        >>> w, u = torch_gdn.recompute_w_u(k, v, beta, A)
        >>> w.shape, u.shape
        (torch.Size([1, 70, 4, 64]), torch.Size([1, 70, 4, 32]))
    """
    g = decay_sums("recompute_w_u", g, "beta", beta, cu_seqlens)
    return torch.ops.gdn.recompute_w_u(k, v, beta, A, g, cu_seqlens, chunk_indices)


recompute_w_u_fwd = recompute_w_u


def chunk_fwd_h(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Carries the state S from chunk to chunk: v_new = u - w S, S <- exp(g_last) S + (k exp(g_last - g))^T v_new.

    FLA: `fla.ops.common.chunk_delta_h.chunk_gated_delta_rule_fwd_h`, without its `gk`, `save_new_value` (v_new is
    always returned) and `cu_seqlens_cpu`.

    Args:
        k: [B, T, H, K], bfloat16, float16 or float32. K is at most 256.
        w: [B, T, HV, K], k's dtype. From `recompute_w_u`. HV is a multiple of H.
        u: [B, T, HV, V], k's dtype. From `recompute_w_u`. V is at most 512.
        g: [B, T, HV], float32. The cumulative sum from `chunk_local_cumsum`. Default: zeros.
        initial_state: See `chunk_gated_delta_rule`.
        output_final_state: Whether to return the state after the last token. Default: False.
        chunk_size: 16, 32 or 64. Default: 64.
        state_v_first: Whether states are [V, K] instead of [K, V]. Default: False.
        cu_seqlens: See `chunk_gated_delta_rule`.
        chunk_indices: [NT, 2], int32 or int64. From `prepare_chunk_indices`. With it, a call with cu_seqlens on the
            device launches no surplus chunks. On the CPU or on the inputs' device. Not allowed without cu_seqlens.
            Default: None.

    Returns:
        h: [B, NT, HV, K, V] ([B, NT, HV, V, K] with state_v_first), k's dtype. The state before each chunk. NT is
            ceil(T / chunk_size) without cu_seqlens, ceil(T / chunk_size) + N with cu_seqlens, or the length of
            chunk_indices. Rows without a chunk are 0.
        v_new: [B, T, HV, V], k's dtype.
        final_state: [N, HV, K, V] ([N, HV, V, K] with state_v_first), float32; None unless output_final_state.

    Example:
        >>> import torch, torch_gdn
        >>> k, w, u = torch.randn(1, 70, 2, 64), torch.randn(1, 70, 4, 64), torch.randn(1, 70, 4, 32)
        >>> h, v_new, final_state = torch_gdn.chunk_fwd_h(k, w, u)
        >>> h.shape, v_new.shape, final_state
        (torch.Size([1, 2, 4, 64, 32]), torch.Size([1, 70, 4, 32]), None)
    """
    g = decay_sums("chunk_fwd_h", g, "u", u, cu_seqlens)
    h, v_new, final_state = torch.ops.gdn.chunk_fwd_h(
        k, w, u, g, initial_state, output_final_state, chunk_size, state_v_first, cu_seqlens, chunk_indices
    )
    return h, v_new, final_state if output_final_state else None


chunk_gated_delta_rule_fwd_h = chunk_fwd_h


def chunk_fwd_o(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    h: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """Computes the output of each chunk: o = scale ((q exp(g)) h + tril(q k^T exp(g_i - g_j)) v).

    FLA: `fla.ops.common.chunk_o.chunk_fwd_o`, without its `g_gamma`.

    Args:
        q: [B, T, H, K], bfloat16, float16 or float32. K is at most 256.
        k: q's shape and dtype.
        v: [B, T, HV, V], q's dtype. v_new from `chunk_fwd_h`. HV is a multiple of H. V is at most 512.
        h: [B, NT, HV, K, V] ([B, NT, HV, V, K] with state_v_first), q's dtype. From `chunk_fwd_h` with the same
            cu_seqlens and chunk_indices.
        g: [B, T, HV], float32. The cumulative sum from `chunk_local_cumsum`. Default: zeros.
        scale: Factor of o. Default: K ** -0.5.
        state_v_first: Whether states are [V, K] instead of [K, V]. Default: False.
        chunk_size: 16, 32 or 64. Default: 64.
        cu_seqlens, chunk_indices: See `chunk_fwd_h`.

    Returns:
        o: [B, T, HV, V], q's dtype.

    Example:
        >>> import torch, torch_gdn
        >>> q, k, v = torch.randn(1, 70, 2, 64), torch.randn(1, 70, 2, 64), torch.randn(1, 70, 4, 32)
        >>> torch_gdn.chunk_fwd_o(q, k, v, h=torch.zeros(1, 2, 4, 64, 32)).shape
        torch.Size([1, 70, 4, 32])
    """
    g = decay_sums("chunk_fwd_o", g, "v", v, cu_seqlens)
    return torch.ops.gdn.chunk_fwd_o(q, k, v, h, g, scale, state_v_first, cu_seqlens, chunk_size, chunk_indices)


def chunk_bwd_dv_local(
    q: Tensor,
    k: Tensor,
    do: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 16,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """Computes the gradient of v_new from the outputs of its own chunk: dv = scale tril(q k^T exp(g_i - g_j))^T do.

    FLA: `fla.ops.common.chunk_o.chunk_bwd_dv_local`, without its `g_gamma` and `A`. Newer versions of FLA want g times
    1 / ln 2 in all of these stages. The ops of the gradients' stages launch the kernels of the whole gradients, so
    their chunks have 16 tokens, and they take and return float32.

    Args:
        q, k: [B, T, H, K], float32. K is at most 256.
        do: [B, T, HV, V], float32. The gradient of o. HV is a multiple of H. V is at most 512.
        g: [B, T, HV], float32. The cumulative sum from `chunk_local_cumsum` with the same chunk_size. Default: zeros.
        scale: Factor of o. Default: K ** -0.5.
        chunk_size: 16, which is the only size. Default: 16.
        cu_seqlens, chunk_indices: See `chunk_fwd_h`.

    Returns:
        dv: [B, T, HV, V], float32.

    Example:
        >>> import torch, torch_gdn
        >>> q, k, do = torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), torch.tensor([1.0, 10.0]).view(1, 2, 1, 1)
        >>> torch_gdn.chunk_bwd_dv_local(q, k, do)[0, :, 0, 0]
        tensor([22., 20.])
    """
    g = decay_sums("chunk_bwd_dv_local", g, "do", do, cu_seqlens)
    return torch.ops.gdn.chunk_bwd_dv_local(q, k, do, g, scale, cu_seqlens, chunk_size, chunk_indices)


def chunk_gated_delta_rule_bwd_dhu(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    do: Tensor,
    dv: Tensor,
    g: Tensor | None = None,
    *,
    h0: Tensor | None = None,
    dht: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 16,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Carries the gradient dS of the state back from chunk to chunk, and completes that of v_new with it.

    In each chunk, from the last to the first, dv2 = dv + (k exp(g_last - g)) dS, then
    dS <- exp(g_last) dS + scale (q exp(g))^T do - w^T dv2.

    FLA: `fla.ops.common.chunk_delta_h.chunk_gated_delta_rule_bwd_dhu`, without its `gk`.

    Args:
        q, k: [B, T, H, K], float32. K is at most 256.
        w: [B, T, HV, K], float32. From `recompute_w_u` with chunks of 16 tokens. HV is a multiple of H.
        do: [B, T, HV, V], float32. The gradient of o. V is at most 512.
        dv: do's shape, float32. From `chunk_bwd_dv_local`.
        g: [B, T, HV], float32. The cumulative sum from `chunk_local_cumsum` with the same chunk_size. Default: zeros.
        h0: [N, HV, K, V], any floating dtype. The initial state. Only its presence matters. Default: None.
        dht: [N, HV, K, V], any floating dtype. The gradient of the final state. Default: zeros.
        scale: Factor of o. Default: K ** -0.5.
        chunk_size: 16, which is the only size. Default: 16.
        cu_seqlens, chunk_indices: See `chunk_fwd_h`.

    Returns:
        dh: [B, NT, HV, K, V], float32. The gradient of the state after each chunk. NT is that of `chunk_fwd_h`. Rows
            without a chunk are 0.
        dh0: [N, HV, K, V], float32; None unless h0.
        dv2: [B, T, HV, V], float32. The gradient of v_new.

    Example:
        >>> import torch, torch_gdn
        >>> q, k, w = torch.randn(1, 70, 2, 64), torch.randn(1, 70, 2, 64), torch.randn(1, 70, 4, 64)
        >>> do, dv = torch.randn(1, 70, 4, 32), torch.randn(1, 70, 4, 32)
        >>> dh, dh0, dv2 = torch_gdn.chunk_gated_delta_rule_bwd_dhu(q, k, w, do, dv)
        >>> dh.shape, dh0, dv2.shape
        (torch.Size([1, 5, 4, 64, 32]), None, torch.Size([1, 70, 4, 32]))
    """
    g = decay_sums("chunk_gated_delta_rule_bwd_dhu", g, "do", do, cu_seqlens)
    dh, dh0, dv2 = torch.ops.gdn.chunk_gated_delta_rule_bwd_dhu(
        q, k, w, do, dv, g, h0, dht, scale, cu_seqlens, chunk_size, chunk_indices
    )
    return dh, None if h0 is None else dh0, dv2


def prepare_wy_repr_bwd(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    dw: Tensor,
    du: Tensor,
    g: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of k, v, beta and the log decays from those of w and u, the WY form of each chunk.

    FLA: `fla.ops.gated_delta_rule.wy_fast.prepare_wy_repr_bwd`, without its `gk` and its `A`, which the op computes
    again. dg is that of the log decays, not of their cumulative sum g: it is FLA's dg after `chunk_local_cumsum` with
    `reverse`, in a form in which no terms cancel. Chunks have 16 tokens, as in `chunk_bwd_dv_local`.

    Args:
        k: [B, T, H, K], float32. K is at most 256.
        v: [B, T, HV, V], float32. HV is a multiple of H. V is at most 512.
        beta: [B, T, HV], float32.
        dw: [B, T, HV, K], float32. From `chunk_bwd_dqkwg`.
        du: v's shape, float32. dv2 from `chunk_gated_delta_rule_bwd_dhu`.
        g: [B, T, HV], float32. The cumulative sum from `chunk_local_cumsum` with chunks of 16 tokens. Default: zeros.
        cu_seqlens, chunk_indices: See `chunk_fwd_h`.

    Returns:
        dk: [B, T, H, K], float32. The part of k's gradient that `chunk_bwd_dqkwg` does not return.
        dv: [B, T, HV, V], float32.
        dbeta: [B, T, HV], float32.
        dg: [B, T, HV], float32. The part of the log decays' gradient that `chunk_bwd_dqkwg` does not return.

    Example:
        >>> import torch, torch_gdn
        >>> k, v, beta = torch.randn(1, 70, 2, 64), torch.randn(1, 70, 4, 32), torch.rand(1, 70, 4)
        >>> dw, du = torch.randn(1, 70, 4, 64), torch.randn(1, 70, 4, 32)
        >>> dk, dv, dbeta, dg = torch_gdn.prepare_wy_repr_bwd(k, v, beta, dw, du)
        >>> dk.shape, dv.shape, dbeta.shape
        (torch.Size([1, 70, 2, 64]), torch.Size([1, 70, 4, 32]), torch.Size([1, 70, 4]))
    """
    g = decay_sums("prepare_wy_repr_bwd", g, "beta", beta, cu_seqlens)
    return torch.ops.gdn.prepare_wy_repr_bwd(k, v, beta, dw, du, g, cu_seqlens, chunk_indices)


def chunk_bwd_dqkwg(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    h: Tensor,
    dh: Tensor,
    *,
    dv: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 16,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of q, k, w and the log decays from those of o, of v_new and of the states after chunks.

    FLA: `fla.ops.common.chunk_o.chunk_bwd_dqkwg`, without its `g_gamma` and its `w`, of which only the shape matters.
    dg is that of the log decays, as in `prepare_wy_repr_bwd`. dq and dk are sums over the value heads of a key head.

    Args:
        q, k: [B, T, H, K], float32. K is at most 256.
        v: [B, T, HV, V], float32. v_new from `chunk_fwd_h`. HV is a multiple of H. V is at most 512.
        do: v's shape, float32. The gradient of o.
        h: [B, NT, HV, K, V], float32. From `chunk_fwd_h` with a chunk_size of 16 and the same cu_seqlens.
        dh: h's shape, float32. From `chunk_gated_delta_rule_bwd_dhu`.
        dv: v's shape, float32. dv2 from `chunk_gated_delta_rule_bwd_dhu`.
        g: [B, T, HV], float32. The cumulative sum from `chunk_local_cumsum` with the same chunk_size. Default: zeros.
        scale: Factor of o. Default: K ** -0.5.
        chunk_size: 16, which is the only size. Default: 16.
        cu_seqlens, chunk_indices: See `chunk_fwd_h`.

    Returns:
        dq: [B, T, H, K], float32.
        dk: [B, T, H, K], float32. Without the part from w and u, which `prepare_wy_repr_bwd` returns: add the two.
        dw: [B, T, HV, K], float32.
        dg: [B, T, HV], float32. Also without that part.

    Example:
        >>> import torch, torch_gdn
        >>> q, k, v = torch.randn(1, 70, 2, 64), torch.randn(1, 70, 2, 64), torch.randn(1, 70, 4, 32)
        >>> h, dh = torch.randn(1, 5, 4, 64, 32), torch.randn(1, 5, 4, 64, 32)
        >>> dq, dk, dw, dg = torch_gdn.chunk_bwd_dqkwg(q, k, v, do=v, h=h, dh=dh, dv=v)
        >>> dq.shape, dw.shape, dg.shape
        (torch.Size([1, 70, 2, 64]), torch.Size([1, 70, 4, 64]), torch.Size([1, 70, 4]))
    """
    g = decay_sums("chunk_bwd_dqkwg", g, "v", v, cu_seqlens)
    return torch.ops.gdn.chunk_bwd_dqkwg(q, k, v, do, h, dh, dv, g, scale, cu_seqlens, chunk_size, chunk_indices)
