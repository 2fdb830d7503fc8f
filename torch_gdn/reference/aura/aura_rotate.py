from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.reference.common import compute_dtype

MASK = 2**64 - 1


def aura_signs(D: int, seed: int) -> Tensor:
    """D signs, float32: the top bit of SplitMix64's draws (Steele, Lea, Flood 2014), set for -1."""
    signs, state = [], seed & MASK
    for _ in range(D):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
        z ^= z >> 31
        signs.append(-1.0 if z >> 63 else 1.0)
    return torch.tensor(signs)


def hadamard(D: int) -> Tensor:
    """A matrix H [D, D], float64, of ones and minus ones with H H^T = D I, for D = m 2^k with m in {1, 12, 20}.

    It is the Kronecker product of H_m with Sylvester's matrix of size 2^k: symmetric for m = 1 alone.
    """
    odd = D // (D & -D) if D > 0 else 0
    m = {1: 1, 3: 12, 5: 20}.get(odd, 0)
    if m == 0 or D % m != 0:
        raise ValueError(f"hadamard: D: expected m 2^k with m 1, 12 or 20, got {D}")
    H = paley(m - 1) if m > 1 else torch.ones(1, 1, dtype=torch.float64)
    for _ in range((D // m).bit_length() - 1):
        H = torch.kron(H, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64))
    return H


def paley(q: int) -> Tensor:
    """Paley's first construction (1933) of size q + 1, for a prime q = 3 (mod 4): 1 on the diagonal, skew beside it."""
    residues = {n * n % q for n in range(1, q)}
    H = torch.ones(q + 1, q + 1, dtype=torch.float64)
    H[1:, 0] = -1
    for i in range(q):
        for j in range(q):
            H[i + 1, j + 1] = 1 if i == j or (j - i) % q in residues else -1
    return H


def rotation(signs: Tensor) -> Tensor:
    """Pi = H diag(signs) / sqrt(D), float64 [D, D]: orthogonal."""
    D = signs.shape[0]
    return hadamard(D).to(signs.device) * signs.double() / D**0.5


def aura_rotate(x: Tensor, signs: Tensor, scale: float = 1.0, inverse: bool = False) -> Tensor:
    """scale * Pi x, or scale * Pi^T x, over the last dimension."""
    dtype = compute_dtype(x)
    Pi = rotation(signs).to(dtype)
    return scale * (x.to(dtype) @ (Pi if inverse else Pi.T))
