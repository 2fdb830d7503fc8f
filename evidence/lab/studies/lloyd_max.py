"""Computes the best scalar quantiser (Lloyd 1957, Max 1960) for a coordinate of a random unit vector in R^D.

A coordinate's density is proportional to (1 - x^2)^((D - 3) / 2). The best centroids are the means of their cells, and
the cells' boundaries are the midpoints between centroids. A log-concave density like this one has one such set
(Fleischer 1964). Iterating the two conditions (Lloyd's method) takes ever longer with more levels: 100 rounds leave a
table of 256 levels with 3.8 times the squared error it could have. Newton's method converges in some ten.

    python -m evidence.lab.studies.lloyd_max   # writes codebooks.json into torch_gdn/aura
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from torch_gdn.aura import codebooks
from torch_gdn.aura.codebooks import BITS, DIMENSIONS

FILE = Path(codebooks.__file__).with_name("codebooks.json")
NODES, PANELS = 24, 8  # the quadrature's, in each cell
TAIL = 14.0  # in standard deviations, where the density is e^-98 of its maximum


def centroids(D: int, bits: int) -> Tensor:
    """Returns the positive half of the 2^bits centroids, ascending, float64. The others are their negatives."""
    c = companded(D, 2 ** (bits - 1))
    for _ in range(1000):
        error = (lloyd_step(c, D) - c).abs().max()
        if error < 1e-14:
            return c
        nearer = c + newton_step(c, D)
        ordered = bool(nearer[0] > 0 and (nearer.diff() > 0).all() and nearer[-1] < 1)
        better = ordered and (lloyd_step(nearer, D) - nearer).abs().max() < error
        c = nearer if better else lloyd_step(c, D)  # Newton's method only works near the solution
    raise RuntimeError(f"centroids: no convergence for D {D}, {bits} bits: cells' means are {error:.1e} off")


def companded(D: int, levels: int) -> Tensor:
    """Returns a start: levels as dense as the cube root of a normal density (Panter and Dite 1951), a bit closer."""
    quantiles = (torch.arange(levels, dtype=torch.float64) + 0.5) / (levels + 0.5)
    return torch.erfinv(quantiles) * (2 * 3 / D) ** 0.5


def lloyd_step(c: Tensor, D: int) -> Tensor:
    """Returns the means of the cells of c."""
    mass, moment = cell_integrals(c, D)
    return moment / mass


def newton_step(c: Tensor, D: int) -> Tensor:
    """Returns what to add to c, by the tridiagonal derivative of each cell's integral of (x - c) density."""
    mass, moment = cell_integrals(c, D)
    at_boundary = density((c[:-1] + c[1:]) / 2, D) * c.diff() / 4
    diagonal = -mass
    diagonal[:-1] += at_boundary
    diagonal[1:] += at_boundary
    derivative = torch.diag(diagonal) + torch.diag(at_boundary, 1) + torch.diag(at_boundary, -1)
    return torch.linalg.solve(derivative, c * mass - moment)


def density(x: Tensor, D: int) -> Tensor:
    """Returns the density of a coordinate, up to a factor."""
    return (1 - x * x).clamp(min=0) ** ((D - 3) / 2)


def cell_integrals(c: Tensor, D: int) -> tuple[Tensor, Tensor]:
    """Integrates the density, and x times the density, over each centroid's cell, by Gauss-Legendre quadrature."""
    boundaries = (c[:-1] + c[1:]) / 2
    lower = torch.cat([c.new_zeros(1), boundaries])
    upper = torch.cat([boundaries, (c[-1:] + TAIL * D**-0.5).clamp(max=1.0)])
    edges = lower[:, None] + (upper - lower)[:, None] * torch.linspace(0, 1, PANELS + 1, dtype=torch.float64)
    half = edges.diff() / 2
    x, weight = gauss_legendre(NODES)
    points = (edges[:, 1:] - half)[..., None] + half[..., None] * x
    values = density(points, D) * weight * half[..., None]
    return values.sum((1, 2)), (values * points).sum((1, 2))


def gauss_legendre(nodes: int) -> tuple[Tensor, Tensor]:
    """Returns nodes and weights on [-1, 1], from eigenvectors of the recurrence's matrix (Golub and Welsch 1969)."""
    n = torch.arange(1, nodes, dtype=torch.float64)
    off_diagonal = n / (4 * n * n - 1).sqrt()
    x, vectors = torch.linalg.eigh(torch.diag(off_diagonal, 1) + torch.diag(off_diagonal, -1))
    return x, 2 * vectors[0] ** 2


def tables() -> dict[str, dict[str, list[float]]]:
    """Returns the positive centroids for each D and number of bits, to ten digits."""
    return {
        str(D): {str(bits): [float(f"{c:.10g}") for c in centroids(D, bits).tolist()] for bits in BITS}
        for D in DIMENSIONS
    }


def main() -> None:
    rows = [
        f'"{D}": {{\n' + ",\n".join(f'  "{bits}": {json.dumps(half)}' for bits, half in table.items()) + "\n}"
        for D, table in tables().items()
    ]
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
