"""What each op returns, without computing it: shapes, dtypes and strides for torch.compile and export.

Wrong shapes and dtypes raise here what csrc/ops/check.h raises when the op is run. Sizes may be symbolic, so conditions
go through torch._check_value, and nothing reads the content of cu_seqlens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ACTIVATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CHUNK_SIZES = (16, 32, 64)
LARGEST_K, LARGEST_V = 256, 512


class Check:
    """The checks of one call of one op, whose first tensor sets the device (and, where one is shared, the dtype)."""

    def __init__(self, op: str, name: str, first: Tensor) -> None:
        self.op, self.name, self.first = op, name, first

    def value(self, holds: bool, argument: str, expected: str, got: object) -> None:
        torch._check_value(holds, lambda: f"{self.op}: {argument}: expected {expected}, got {got}")

    def dtype(self, holds: bool, argument: str, expected: str, x: Tensor) -> None:
        torch._check_type(holds, lambda: f"{self.op}: {argument}: expected {expected}, got {x.dtype}")

    def device(self, argument: str, x: Tensor) -> None:
        expected = f"a tensor on {self.first.device} like {self.name}"
        self.value(x.device == self.first.device, argument, expected, f"one on {x.device}")

    def dimensions(self, argument: str, x: Tensor, pattern: str) -> None:
        count = pattern.count(",") + 1
        self.value(x.dim() == count, argument, f"{count} dimensions {pattern}", f"{x.dim()} of shape {x.shape}")
        self.device(argument, x)

    def shape(self, argument: str, x: Tensor, pattern: str, sizes: Sequence[int]) -> None:
        self.value(x.dim() == len(sizes), argument, f"shape {pattern}", x.shape)
        for size, expected in zip(x.shape, sizes, strict=True):
            self.value(size == expected, argument, f"shape {pattern} = {list(sizes)}", x.shape)
        self.device(argument, x)

    def activation(self, argument: str, x: Tensor) -> None:
        self.dtype(x.dtype in ACTIVATION_DTYPES, argument, "dtype bfloat16, float16 or float32", x)

    def floating(self, argument: str, x: Tensor) -> None:
        self.dtype(x.is_floating_point(), argument, "a floating dtype", x)

    def float32(self, argument: str, x: Tensor) -> None:
        self.dtype(x.dtype == torch.float32, argument, "dtype float32", x)

    def same_dtype(self, argument: str, x: Tensor) -> None:
        self.dtype(x.dtype == self.first.dtype, argument, f"dtype {self.first.dtype} like {self.name}", x)

    def chunk_size(self, size: int) -> None:
        self.value(size in CHUNK_SIZES, "chunk_size", "16, 32 or 64", size)

    def matrix_chunk_size(self, A: Tensor) -> None:
        expected = "a last dimension (the chunk size) of 16, 32 or 64"
        self.value(A.shape[-1] in CHUNK_SIZES, "A", expected, A.shape[-1])

    def heads(self, key: str, key_heads: int, argument: str, value_heads: int) -> None:
        self.value(key_heads >= 1, key, "at least one head", key_heads)
        expected = f"a number of heads that is a multiple of the {key_heads} of {key}"
        self.value(value_heads >= 1, argument, expected, value_heads)
        self.value(value_heads % key_heads == 0, argument, expected, value_heads)

    def key_size(self, argument: str, size: int) -> None:
        self.value(size >= 1, argument, f"K from 1 to {LARGEST_K}", size)
        self.value(size <= LARGEST_K, argument, f"K from 1 to {LARGEST_K}", size)

    def value_size(self, argument: str, size: int) -> None:
        self.value(size >= 1, argument, f"V from 1 to {LARGEST_V}", size)
        self.value(size <= LARGEST_V, argument, f"V from 1 to {LARGEST_V}", size)

    def integers(self, argument: str, x: Tensor) -> None:
        self.dtype(x.dtype in (torch.int32, torch.int64), argument, "dtype int32 or int64", x)
        expected = f"a tensor on the CPU or on {self.first.device} like {self.name}"
        self.value(x.device.type == "cpu" or x.device == self.first.device, argument, expected, f"one on {x.device}")

    def sequences(self, batch: int, cu_seqlens: Tensor | None, chunk_indices: Tensor | None) -> int:
        """N, the number of sequences."""
        if cu_seqlens is None:
            self.value(chunk_indices is None, "chunk_indices", "None where cu_seqlens is None", "a tensor")
            return batch
        self.integers("cu_seqlens", cu_seqlens)
        self.value(cu_seqlens.dim() == 1, "cu_seqlens", "shape [N + 1] with N >= 1", cu_seqlens.shape)
        self.value(cu_seqlens.shape[0] >= 2, "cu_seqlens", "shape [N + 1] with N >= 1", cu_seqlens.shape)
        expected = "a batch of 1 (sequences packed along T)"
        self.value(batch == 1, "cu_seqlens", expected, f"a batch of {batch}")
        if chunk_indices is not None:
            self.integers("chunk_indices", chunk_indices)
            self.value(chunk_indices.dim() == 2, "chunk_indices", "shape [NT, 2]", chunk_indices.shape)
            self.value(chunk_indices.shape[1] == 2, "chunk_indices", "shape [NT, 2]", chunk_indices.shape)
        return cu_seqlens.shape[0] - 1


def chunk_rows(tokens: int, chunk_size: int, cu_seqlens: Tensor | None, chunk_indices: Tensor | None) -> int:
    if chunk_indices is not None:
        return chunk_indices.shape[0]
    surplus = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return (tokens + chunk_size - 1) // chunk_size + surplus


def state_sizes(N: int, HV: int, K: int, V: int, state_v_first: bool) -> tuple[int, int, int, int]:
    return (N, HV, V, K) if state_v_first else (N, HV, K, V)


def state_pattern(rows: str, state_v_first: bool) -> str:
    return f"[{rows}, HV, V, K]" if state_v_first else f"[{rows}, HV, K, V]"


@torch.library.register_fake("gdn::chunk_local_cumsum")
def chunk_local_cumsum(
    g: Tensor, chunk_size: int = 64, cu_seqlens: Tensor | None = None, chunk_indices: Tensor | None = None
) -> Tensor:
    check = Check("chunk_local_cumsum", "g", g)
    check.floating("g", g)
    check.dimensions("g", g, "[B, T, HV]")
    check.chunk_size(chunk_size)
    check.sequences(g.shape[0], cu_seqlens, chunk_indices)
    return g.new_empty(g.shape, dtype=torch.float32)


@torch.library.register_fake("gdn::chunk_scaled_dot_kkt")
def chunk_scaled_dot_kkt(
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    check = Check("chunk_scaled_dot_kkt", "k", k)
    check.activation("k", k)
    check.dimensions("k", k, "[B, T, H, K]")
    check.float32("g", g)
    check.dimensions("g", g, "[B, T, HV]")
    check.chunk_size(chunk_size)
    (B, T, H, K), HV = k.shape, g.shape[2]
    check.key_size("k", K)
    check.heads("k", H, "g", HV)
    check.shape("g", g, "[B, T, HV]", (B, T, HV))
    check.floating("beta", beta)
    check.shape("beta", beta, "[B, T, HV]", (B, T, HV))
    check.sequences(B, cu_seqlens, chunk_indices)
    return k.new_empty((B, T, HV, chunk_size), dtype=torch.float32)


@torch.library.register_fake("gdn::solve_tril")
def solve_tril(A: Tensor, cu_seqlens: Tensor | None = None, chunk_indices: Tensor | None = None) -> Tensor:
    check = Check("solve_tril", "A", A)
    check.float32("A", A)
    check.dimensions("A", A, "[B, T, HV, chunk_size]")
    check.matrix_chunk_size(A)
    check.sequences(A.shape[0], cu_seqlens, chunk_indices)
    return A.new_empty(A.shape)


@torch.library.register_fake("gdn::recompute_w_u")
def recompute_w_u(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    g: Tensor,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    check = Check("recompute_w_u", "k", k)
    check.activation("k", k)
    check.dimensions("k", k, "[B, T, H, K]")
    check.same_dtype("v", v)
    check.dimensions("v", v, "[B, T, HV, V]")
    check.float32("A", A)
    check.dimensions("A", A, "[B, T, HV, chunk_size]")
    check.matrix_chunk_size(A)
    (B, T, H, K), (HV, V) = k.shape, v.shape[2:]
    check.key_size("k", K)
    check.value_size("v", V)
    check.heads("k", H, "v", HV)
    check.shape("v", v, "[B, T, HV, V]", (B, T, HV, V))
    check.floating("beta", beta)
    check.shape("beta", beta, "[B, T, HV]", (B, T, HV))
    check.shape("A", A, "[B, T, HV, chunk_size]", (B, T, HV, A.shape[3]))
    check.float32("g", g)
    check.shape("g", g, "[B, T, HV]", (B, T, HV))
    check.sequences(B, cu_seqlens, chunk_indices)
    return k.new_empty((B, T, HV, K)), k.new_empty((B, T, HV, V))


@torch.library.register_fake("gdn::chunk_fwd_h")
def chunk_fwd_h(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    check = Check("chunk_fwd_h", "k", k)
    check.activation("k", k)
    check.dimensions("k", k, "[B, T, H, K]")
    check.same_dtype("w", w)
    check.same_dtype("u", u)
    check.dimensions("u", u, "[B, T, HV, V]")
    check.chunk_size(chunk_size)
    (B, T, H, K), (HV, V) = k.shape, u.shape[2:]
    check.key_size("k", K)
    check.value_size("u", V)
    check.heads("k", H, "u", HV)
    check.shape("u", u, "[B, T, HV, V]", (B, T, HV, V))
    check.shape("w", w, "[B, T, HV, K]", (B, T, HV, K))
    check.float32("g", g)
    check.shape("g", g, "[B, T, HV]", (B, T, HV))
    N = check.sequences(B, cu_seqlens, chunk_indices)
    final_sizes = check_initial_state(check, initial_state, state_sizes(N, HV, K, V, state_v_first), state_v_first)
    NT = chunk_rows(T, chunk_size, cu_seqlens, chunk_indices)
    h = k.new_empty((B, *state_sizes(NT, HV, K, V, state_v_first)))
    return h, k.new_empty((B, T, HV, V)), final_state(k, final_sizes, output_final_state)


def check_initial_state(
    check: Check, initial_state: Tensor | None, sizes: tuple[int, int, int, int], state_v_first: bool
) -> tuple[int, int, int, int]:
    if initial_state is not None:
        check.shape("initial_state", initial_state, state_pattern("N", state_v_first), sizes)
        check.floating("initial_state", initial_state)
    return sizes


def final_state(like: Tensor, sizes: tuple[int, int, int, int], asked_for: bool) -> Tensor:
    return like.new_empty(sizes if asked_for else (0,), dtype=torch.float32)


@torch.library.register_fake("gdn::chunk_fwd_o")
def chunk_fwd_o(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    h: Tensor,
    g: Tensor,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    check = Check("chunk_fwd_o", "q", q)
    B, T, HV, K, V = check_q_k_v(check, q, k, v, chunk_size)
    check.same_dtype("h", h)
    check.float32("g", g)
    check.shape("g", g, "[B, T, HV]", (B, T, HV))
    check.sequences(B, cu_seqlens, chunk_indices)
    NT = chunk_rows(T, chunk_size, cu_seqlens, chunk_indices)
    check.shape("h", h, state_pattern("B, NT", state_v_first), (B, *state_sizes(NT, HV, K, V, state_v_first)))
    return q.new_empty((B, T, HV, V))


def check_q_k_v(
    check: Check, q: Tensor, k: Tensor, v: Tensor, chunk_size: int | None
) -> tuple[int, int, int, int, int]:
    """B, T, HV, K, V."""
    check.activation("q", q)
    check.dimensions("q", q, "[B, T, H, K]")
    check.same_dtype("k", k)
    check.same_dtype("v", v)
    check.dimensions("v", v, "[B, T, HV, V]")
    if chunk_size is not None:
        check.chunk_size(chunk_size)
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    check.key_size("q", K)
    check.value_size("v", V)
    check.heads("q", H, "v", HV)
    check.shape("k", k, "[B, T, H, K]", (B, T, H, K))
    check.shape("v", v, "[B, T, HV, V]", (B, T, HV, V))
    return B, T, HV, K, V


@torch.library.register_fake("gdn::l2norm")
def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    check = Check("l2norm", "x", x)
    check.activation("x", x)
    check.value(x.dim() >= 1, "x", "at least one dimension", x.dim())
    check.value(eps >= 0, "eps", "a number that is not negative", eps)
    return x.new_empty(x.shape)
